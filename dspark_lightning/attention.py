"""Which keys a block token sees, and the attention over them.

Keys are laid out as [context (S) ; block tokens (N*K)].
Shapes: B samples, S context length, N anchors, K block size, Q = N*K queries, D head dim.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark_lightning.anchors import context_doc_ids


class BlockAttention(Protocol):
    """Attention of the block tokens over [context ; block tokens], with the visibility already bound."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
        """Attend with query [B, heads, Q, D] over key and value [B, kv_heads, S+Q, D]; returns [B, heads, Q, D]."""


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
        bool [B, 1, N*K, S+N*K], True = visible.
    """
    device = anchor_positions.device
    num_anchors = anchor_positions.shape[1]
    positions = torch.arange(seq_len, device=device)
    context = (positions < anchor_positions.unsqueeze(-1)) & block_keep_mask.unsqueeze(-1)  # [B, N, S]
    if seq_lens is not None:
        doc_ids = context_doc_ids(seq_lens, seq_len, device)
        context = context & (doc_ids.unsqueeze(1) == doc_ids.gather(1, anchor_positions).unsqueeze(-1))
    if attention_mask is not None:
        context = context & attention_mask.bool().unsqueeze(1)
    block_of_token = torch.arange(num_anchors, device=device).repeat_interleave(block_size)
    own_block = block_of_token.unsqueeze(-1) == block_of_token  # [Q, Q]
    context = context.repeat_interleave(block_size, dim=1)
    return torch.cat([context, own_block.expand(context.shape[0], -1, -1)], dim=-1).unsqueeze(1)


def dense_block_attention(
    query: Tensor,  # [B, heads, Q, D]
    key: Tensor,  # [B, kv_heads, S+Q, D]
    value: Tensor,  # [B, kv_heads, S+Q, D]
    *,
    visible: Tensor,  # bool [B, 1, Q, S+Q]
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Attend through the dense mask. Returns [B, heads, Q, D]."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
