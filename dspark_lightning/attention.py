"""Which keys a block token sees, and the ways to attend to them.

    dense   one mask over all keys of a row: the definition, and the only way with attention dropout
    split   every block against its stretch of context and itself, see `split_attention.py`; any device
    flex    FlexAttention with a block mask, see `flex_attention.py`; CUDA
    auto    flex on CUDA (split for heads that are too wide for it) and split elsewhere; dense with dropout

Shapes: B samples, C context length, N anchors a row, K block size, M listed blocks, D head dim.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark_lightning.anchors import context_doc_ids
from dspark_lightning.blocks import Blocks
from dspark_lightning.flex_attention import MAX_HEAD_DIM, FlexBlockAttention
from dspark_lightning.split_attention import SplitBlockAttention

AttentionKind = Literal["auto", "dense", "split", "flex"]
"""Ways to compute block attention."""


class BlockAttention(Protocol):
    """Attention of the block tokens over their context and their own block, with the visibility already bound."""

    def __call__(
        self,
        query: Tensor,  # [M, heads, K, D]
        key: Tensor,  # [M, kv_heads, K, D]
        value: Tensor,  # [M, kv_heads, K, Dv]
        context_key: Tensor,  # [B, kv_heads, C, D]
        context_value: Tensor,  # [B, kv_heads, C, Dv]
        *,
        scale: float,
        dropout: float = 0.0,
        sinks: Tensor | None = None,  # [heads], logits that take part in every softmax and carry no value
    ) -> Tensor:
        """Returns [M, heads, K, Dv]."""


def build_attention(
    kind: AttentionKind, blocks: Blocks, visibility: Callable[[], Tensor], dropout: bool, device: torch.device
) -> BlockAttention:
    """Choose and prepare the attention of one forward pass.

    Args:
        kind: see the module docstring.
        blocks: on any device.
        visibility: makes the dense mask, see `block_visibility`.
        dropout: whether attention weights will be dropped.
        device: where the attention runs.

    Raises:
        ValueError: an unknown kind, or flex where there is no CUDA.
    """
    check_attention(kind, device)
    if kind == "auto":
        if device.type == "cuda" and not dropout:
            return FlexOrSplitAttention(blocks, device)
        kind = "dense" if dropout else "split"
    if kind == "split":
        return SplitBlockAttention(blocks)
    if kind == "flex":
        return FlexBlockAttention(blocks.to(device))
    return DenseBlockAttention(blocks.to(device), visibility().to(device))


def check_attention(kind: str, device: torch.device) -> None:
    """Check that a way to attend exists and works on a device.

    Raises:
        ValueError: an unknown kind, or flex where there is no CUDA.
    """
    if kind not in get_args(AttentionKind):
        raise ValueError(f"attention must be one of {', '.join(get_args(AttentionKind))}, got {kind!r}")
    if kind == "flex" and device.type != "cuda":
        raise ValueError(f"attention 'flex' needs CUDA, but the draft is on {device.type}: use 'auto' or 'split'")


def block_visibility(
    seq_len: int,
    anchor_positions: Tensor,  # [B, N]
    block_keep_mask: Tensor,  # [B, N]
    block_size: int,
    seq_lens: Tensor | None = None,  # [B, M], packed rows
    attention_mask: Tensor | None = None,  # [B, S], 0 = never visible as context
) -> Tensor:
    """Build the dense visibility mask of the block tokens.

    A block token sees the real context strictly before its anchor, inside the anchor's document, and every slot of
    its own block. A dummy block sees itself only, so that no row of the softmax is empty.

    Returns:
        bool [B, 1, N*K, S+N*K], True = visible; keys are laid out as [context ; block tokens].
    """
    device = anchor_positions.device
    num_anchors = anchor_positions.shape[1]
    positions = torch.arange(seq_len, device=device)
    context = (positions < anchor_positions.unsqueeze(-1)) & block_keep_mask.unsqueeze(-1)  # [B, N, S]
    if seq_lens is not None:
        doc_ids = context_doc_ids(seq_lens, seq_len, device)
        context = context & (doc_ids.unsqueeze(1) == doc_ids.gather(1, anchor_positions).unsqueeze(-1))
    if attention_mask is not None:
        context = context & attention_mask.to(device).bool().unsqueeze(1)
    block_of_token = torch.arange(num_anchors, device=device).repeat_interleave(block_size)
    own_block = block_of_token.unsqueeze(-1) == block_of_token  # [Q, Q]
    context = context.repeat_interleave(block_size, dim=1)
    return torch.cat([context, own_block.expand(context.shape[0], -1, -1)], dim=-1).unsqueeze(1)


class FlexOrSplitAttention:
    """`BlockAttention` through FlexAttention, or split for heads too wide for its kernels (Gemma4, DeepSeek V4).

    Args:
        blocks: on any device.
        device: where the attention runs.
    """

    def __init__(self, blocks: Blocks, device: torch.device) -> None:
        self.blocks, self.device = blocks, device
        self._chosen: BlockAttention | None = None  # at the first layer; all have heads of one width

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *context: Tensor, **options: Any) -> Tensor:
        """See `BlockAttention`."""
        if self._chosen is None:
            wide = max(query.shape[-1], value.shape[-1]) > MAX_HEAD_DIM
            self._chosen = SplitBlockAttention(self.blocks) if wide else FlexBlockAttention(self.blocks.to(self.device))
        return self._chosen(query, key, value, *context, **options)


class DenseBlockAttention:
    """`BlockAttention` through the dense mask: all block tokens of a row against all its keys.

    Args:
        blocks: on the device of the queries.
        visible: from `block_visibility`, with C context positions.
    """

    def __init__(self, blocks: Blocks, visible: Tensor) -> None:
        self.blocks = blocks
        self.visible = visible

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        *,
        scale: float,
        dropout: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `BlockAttention`."""
        queries = self._by_row(query)
        keys = torch.cat([context_key, self._by_row(key)], dim=2)
        values = torch.cat([context_value, self._by_row(value)], dim=2)
        if sinks is None:
            attended = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=self.visible,
                dropout_p=dropout,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        else:
            attended = attend_with_sinks(queries, keys, values, self.visible, sinks, scale, dropout)
        num_anchors = self.blocks.grid[1]
        return self.blocks.gather(attended.unflatten(2, (num_anchors, -1)).transpose(1, 2))

    def _by_row(self, values: Tensor) -> Tensor:
        """From [M, heads, K, D] to [B, heads, N*K, D]."""
        return self.blocks.scatter(values).transpose(1, 2).flatten(2, 3)


def attend_with_sinks(
    query: Tensor,  # [B, heads, Q, D]
    key: Tensor,  # [B, kv_heads, T, D]
    value: Tensor,  # [B, kv_heads, T, Dv]
    visible: Tensor,  # bool [B, 1, Q, T]
    sinks: Tensor,  # [heads]
    scale: float,
    dropout: float,
) -> Tensor:
    """One more column in every softmax, dropped behind it; torch's own attention has no place for it."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1].to(value.dtype)
    return F.dropout(weights, dropout) @ value
