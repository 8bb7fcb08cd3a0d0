"""Grouped-query attention of a draft: queries from the block tokens, keys and values from them and the context.

Shapes: B samples, C context length, M blocks, K block size, H hidden size, D head dim, X rows or blocks, L tokens.
"""

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from dspark_lightning.attention import BlockAttention
from dspark_lightning.drafts.rotation import Rope, rotate_halves


class GroupedQueryAttention(nn.Module):
    """Per-head norms on queries and keys, half-split RoPE over as many channels as the tables have.

    Args:
        hidden_size: H.
        heads: of the queries.
        kv_heads: of keys and values.
        head_dim: D.
        norm: makes one RMSNorm over D.
        scale: of the scores; None is D ** -0.5.
        dropout: of the attention weights, in training.
        bias: whether the projections have one.
        keys_are_values: whether the values are the projected keys, before norm and RoPE.
        value_norm: makes the norm of the values; None leaves it out.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        norm: Callable[[], nn.Module],
        scale: float | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        keys_are_values: bool = False,
        value_norm: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.dropout = head_dim, dropout
        self.scale = head_dim**-0.5 if scale is None else scale
        self.q_proj = nn.Linear(hidden_size, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=bias)
        self.v_proj = None if keys_are_values else nn.Linear(hidden_size, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=bias)
        self.q_norm = norm()
        self.k_norm = norm()
        self.v_norm = None if value_norm is None else value_norm()

    def forward(
        self,
        hidden: Tensor,  # [M, K, H]
        context: Tensor,  # [B, C, H]
        rope: Rope,
        context_rope: Rope,
        attention: BlockAttention,
    ) -> Tensor:
        """Returns [M, K, H]."""
        query = rotate_halves(self.q_norm(self._split_heads(self.q_proj(hidden))).transpose(1, 2), rope)
        own, seen = self._keys_and_values(hidden, rope), self._keys_and_values(context, context_rope)
        dropout = self.dropout if self.training else 0.0
        attended = attention(query, *own, *seen, scale=self.scale, dropout=dropout)
        return cast(Tensor, self.o_proj(attended.transpose(1, 2).flatten(2)))

    def _keys_and_values(self, states: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """From [X, L, H] to two of [X, kv_heads, L, D]."""
        keys = self._split_heads(self.k_proj(states))
        values = keys if self.v_proj is None else self._split_heads(self.v_proj(states))
        if self.v_norm is not None:
            values = self.v_norm(values)
        return rotate_halves(self.k_norm(keys).transpose(1, 2), rope), values.transpose(1, 2)

    def _split_heads(self, projected: Tensor) -> Tensor:
        return cast(Tensor, projected.unflatten(-1, (-1, self.head_dim)))
