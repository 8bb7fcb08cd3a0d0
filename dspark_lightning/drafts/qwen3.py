"""The Qwen3 draft: for Qwen3 (dense, MoE) targets and every Llama-like one.

Grouped-query attention with per-head RMSNorm on queries and keys, half-split RoPE over the whole head, SiLU-gated MLP.
Shapes: B samples, C context length, M blocks, K block size, H hidden size, D head dim.
"""

from typing import Any, cast

from torch import Tensor, nn
from transformers import PretrainedConfig, Qwen3Config
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from dspark_lightning.attention import BlockAttention
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.config import DraftArgs, shared_draft_fields


class Qwen3DSparkAttention(nn.Module):
    """Queries from the block tokens; keys and values from them and the context, with the same projections."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.scale = self.head_dim**-0.5
        self.dropout = config.attention_dropout
        hidden, bias = config.hidden_size, config.attention_bias
        q_dim = config.num_attention_heads * self.head_dim
        kv_dim = cast(int, config.num_key_value_heads) * self.head_dim
        self.q_proj = nn.Linear(hidden, q_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_dim, bias=bias)
        self.o_proj = nn.Linear(q_dim, hidden, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,  # [M, K, H]
        context: Tensor,  # [B, C, H]
        rope: tuple[Tensor, Tensor],  # cos and sin [M, K, D]
        context_rope: tuple[Tensor, Tensor],  # cos and sin [B, C, D]
        attention: BlockAttention,
    ) -> Tensor:
        """Returns [M, K, H]."""
        query = _rotate(self.q_norm(self._split_heads(self.q_proj(hidden))), rope)
        keys = [
            _rotate(self.k_norm(self._split_heads(self.k_proj(states))), tables)
            for states, tables in ((hidden, rope), (context, context_rope))
        ]
        values = [self._split_heads(self.v_proj(states)).transpose(1, 2) for states in (hidden, context)]
        dropout = self.dropout if self.training else 0.0
        attended = attention(query, keys[0], values[0], keys[1], values[1], scale=self.scale, dropout=dropout)
        return cast(Tensor, self.o_proj(attended.transpose(1, 2).flatten(2)))

    def _split_heads(self, projected: Tensor) -> Tensor:
        return cast(Tensor, projected.unflatten(-1, (-1, self.head_dim)))


def _rotate(states: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE to [X, L, heads, D]. Returns [X, heads, L, D]."""
    states = states.transpose(1, 2)
    cos, sin = (table.unsqueeze(1) for table in rope)
    return cast(Tensor, states * cos + rotate_half(states) * sin)


class Qwen3DSparkDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm block; the context enters the attention as it is, without another norm."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = Qwen3DSparkAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,  # [M, K, H]
        context: Tensor,  # [B, C, H]
        rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
        attention: BlockAttention,
    ) -> Tensor:
        """Returns [M, K, H]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context, rope, context_rope, attention)
        return cast(Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))


class Qwen3DSparkModel(DSparkDraft, Qwen3PreTrainedModel):  # type: ignore[misc]  # both declare `config`
    """DSpark draft for Qwen3 and Llama-like targets.

    Args:
        config: from `build_qwen3_draft_config`.
    """

    config_class = Qwen3Config
    _no_split_modules: list[str] = ["Qwen3DSparkDecoderLayer"]  # noqa: RUF012

    def __init__(self, config: Qwen3Config) -> None:
        Qwen3PreTrainedModel.__init__(self, config)
        self.layers = nn.ModuleList(Qwen3DSparkDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.build_shared_parts(config, norm=lambda: Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.post_init()  # type: ignore[no-untyped-call]


# Backbone fields taken over from the target as they are; those a target lacks keep Qwen3Config's default.
_COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
)


def build_qwen3_draft_config(target_config: PretrainedConfig, model_args: Any) -> Qwen3Config:
    """Build the config of a Qwen3 draft.

    Args:
        target_config: of a Qwen3, Qwen3-MoE, Qwen2, Llama or Mistral target, or of a Qwen-VL one (its text part).
        model_args: see `DraftArgs`.

    Raises:
        ValueError: see `DraftArgs` and `shared_draft_fields`.
    """
    text = target_config.get_text_config()
    args = DraftArgs.of(model_args)
    heads = text.num_attention_heads
    shared = shared_draft_fields(text, args, Qwen3DSparkModel.__name__)
    # Multi-axis positions are the target's own affair: on text they are plain positions, which is all the draft sees.
    rope = {k: v for k, v in text.rope_parameters.items() if not k.startswith("mrope") and k != "type"}
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    backbone = {name: getattr(text, name) for name in _COPIED if hasattr(text, name)}
    return Qwen3Config(
        **backbone,
        **shared,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        rope_parameters=rope,
        layer_types=["full_attention"] * args.num_draft_layers,
        max_window_layers=args.num_draft_layers,
        pad_token_id=_inside_vocabulary(getattr(text, "pad_token_id", None), text.vocab_size),
    )


def _inside_vocabulary(token_id: int | None, vocab_size: int) -> int | None:
    return token_id if token_id is not None and 0 <= token_id < vocab_size else None
