"""Multi-head latent attention of a draft: keys and values of all heads come from one small latent per token.

Shapes: B samples, C context length, M blocks, K block size, H hidden size, X rows or blocks, L tokens.
"""

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dspark_lightning.attention import BlockAttention
from dspark_lightning.drafts.rotation import Rope, rotate_neighbours


class LatentAttention(nn.Module):
    """As in DeepSeek V3: a head's key is a part of its own and a part that all heads share, which alone is rotated.

    Args:
        config: num_attention_heads, q_lora_rank (None projects the queries at once), kv_lora_rank, qk_nope_head_dim,
            qk_rope_head_dim, v_head_dim, rms_norm_eps, attention_dropout.
        scale: of the scores.
        output_gate: whether the heads' outputs are gated by a projection of the layer's input.
    """

    def __init__(self, config: PretrainedConfig, scale: float, output_gate: bool = False) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.heads, self.scale = heads, scale
        self.latent_dim, self.value_dim = config.kv_lora_rank, config.v_head_dim
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.dropout = config.attention_dropout or 0.0
        query_dim = heads * (self.nope_dim + self.rope_dim)
        self.latent_queries = config.q_lora_rank is not None
        if self.latent_queries:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
            self.q_a_layernorm = Qwen3RMSNorm(config.q_lora_rank, eps=config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_dim, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, query_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.latent_dim + self.rope_dim, bias=False)
        self.kv_a_layernorm = Qwen3RMSNorm(self.latent_dim, eps=config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.latent_dim, heads * (self.nope_dim + self.value_dim), bias=False)
        self.g_proj = nn.Linear(hidden, heads * self.value_dim, bias=False) if output_gate else None
        self.o_proj = nn.Linear(heads * self.value_dim, hidden, bias=False)

    def forward(
        self,
        hidden: Tensor,  # [M, K, H]
        context: Tensor,  # [B, C, H]
        rope: Rope | None,  # cos and sin [M, K, rope_dim / 2]; None leaves the shared part unrotated
        context_rope: Rope | None,
        attention: BlockAttention,
    ) -> Tensor:
        """Returns [M, K, H]."""
        own, seen = self._keys_and_values(hidden, rope), self._keys_and_values(context, context_rope)
        dropout = self.dropout if self.training else 0.0
        attended = attention(self._queries(hidden, rope), *own, *seen, scale=self.scale, dropout=dropout)
        attended = attended.transpose(1, 2).flatten(2)
        if self.g_proj is not None:
            attended = attended * torch.sigmoid(self.g_proj(hidden))
        return cast(Tensor, self.o_proj(attended))

    def _queries(self, hidden: Tensor, rope: Rope | None) -> Tensor:
        """From [M, K, H] to [M, heads, K, nope_dim + rope_dim]."""
        if self.latent_queries:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        else:
            queries = self.q_proj(hidden)
        queries = queries.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return queries if rope is None else rotate_neighbours(queries, rope)

    def _keys_and_values(self, states: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor]:
        """From [X, L, H] to [X, heads, L, nope_dim + rope_dim] and [X, heads, L, value_dim]."""
        latent, shared = self.kv_a_proj_with_mqa(states).split([self.latent_dim, self.rope_dim], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        keys, values = expanded.split([self.nope_dim, self.value_dim], dim=-1)
        shared = shared.unsqueeze(1)
        if rope is not None:
            shared = rotate_neighbours(shared, rope)
        return torch.cat([keys, shared.expand(-1, self.heads, -1, -1)], dim=-1), values
