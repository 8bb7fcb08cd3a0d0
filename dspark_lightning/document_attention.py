"""Attention of a target inside each document of packed rows, which costs what the documents cost one by one.

The mask that transformers makes of restarting positions is exact too, but every token is then compared with its whole
row. Here each document is cut out and goes through the kernel that a row of its own would.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "dspark_by_document"
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
_lengths: ContextVar[list[list[int]]] = ContextVar("document lengths of each packed row")


@contextmanager
def attending_by_document(decoder: nn.Module, seq_lens: Tensor) -> Iterator[None]:
    """Let a text stack attend document by document meanwhile; one that cannot keeps its mask.

    It can if it runs SDPA through transformers' attention interface, with nothing in its masks but causality and
    sliding windows. That is what flash kernels ask for, so models say it.

    Args:
        decoder: the text stack of a target, with text only in its rows.
        seq_lens: [B, M], document lengths of packed rows, zero padded, on the CPU.
    """
    config = cast(PretrainedConfig, decoder.config)
    plain = _PLAIN_LAYERS.issuperset(getattr(config, "layer_types", None) or ())
    able = all(getattr(decoder, name, False) for name in ("_supports_attention_backend", "_supports_flash_attn"))
    if not (plain and able and config._attn_implementation == "sdpa"):
        yield
        return
    token = _lengths.set([[length for length in row if length] for row in seq_lens.tolist()])
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
        _lengths.reset(token)


def _attend_by_document(
    module: nn.Module,
    query: Tensor,  # [B, heads, S, head_dim]
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[B, S, heads, head_dim]; zeros where no document is."""
    output = value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    for i, lengths in enumerate(_lengths.get()):
        start = 0
        for length in lengths:
            q, k, v = (x[i : i + 1, :, start : start + length] for x in (query, key, value))
            band = _band(length, sliding_window, query.device)
            output[i : i + 1, start : start + length] = sdpa_attention_forward(module, q, k, v, band, **kwargs)[0]
            start += length
    return output, None


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """What a document's tokens see of it [1, 1, length, length]; None where that is all before them."""
    if window is None or length <= window:
        return None
    behind = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return ((behind >= 0) & (behind < window))[None, None]


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend_by_document)
ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, lambda *args, **kwargs: None)
