"""The sizes that are measured, by name."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import Qwen3Config

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model

BACKBONES = {64: (4, 2, 16, 128), 576: (9, 3, 64, 1536), 1024: (16, 8, 128, 3072), 2560: (32, 8, 128, 9728)}
"""By hidden size: attention heads, key-value heads, head dim and intermediate size of a model people train for."""

TARGET_LAYERS = 28
"""Of the target whose features are stood in for; only the layer ids depend on it."""


@dataclass(frozen=True)
class Size:
    """Shapes of one training step."""

    hidden: int
    vocab: int
    seq_len: int
    num_anchors: int
    batch: int
    block_size: int = 7
    draft_layers: int = 2
    markov_rank: int = 256

    @property
    def mask_token_id(self) -> int:
        """The last token; random ids stay below it."""
        return self.vocab - 1


SIZES = {
    "tiny": Size(hidden=64, vocab=2000, seq_len=64, num_anchors=8, batch=2, block_size=4, markov_rank=16),
    "small": Size(hidden=576, vocab=49152, seq_len=256, num_anchors=32, batch=4),
    "large": Size(hidden=1024, vocab=151936, seq_len=1024, num_anchors=64, batch=1),
    **{
        f"anchors{anchors}": Size(hidden=576, vocab=49152, seq_len=1024, num_anchors=anchors, batch=1)
        for anchors in (32, 64, 128, 256, 512)
    },
    "gpu": Size(hidden=2560, vocab=151936, seq_len=4096, num_anchors=512, batch=1, draft_layers=5),
}


def build_draft(size: Size, device: torch.device, dtype: torch.dtype) -> DSparkDraft:
    """Build a draft with fresh weights, the same ones every time; embedding and head are frozen."""
    heads, kv_heads, head_dim, intermediate = BACKBONES[size.hidden]
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=intermediate,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
    )
    torch.manual_seed(0)
    with device:
        draft = build_draft_model(
            config,
            mask_token_id=size.mask_token_id,
            num_draft_layers=size.draft_layers,
            block_size=size.block_size,
            num_anchors=size.num_anchors,
            markov_rank=size.markov_rank,
        )
    cast(nn.Module, draft).to(dtype)
    return draft
