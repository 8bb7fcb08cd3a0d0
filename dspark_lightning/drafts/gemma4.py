"""The Gemma4 draft: for Gemma4 and Gemma4-Unified targets, through their text model.

Every draft layer is one of the target's global (full attention) layers: grouped-query attention with scale 1, norms on
queries, keys and values, keys that serve as values where the target's do, RoPE on a part of the pairs, norms before AND
after attention and MLP, a tanh-gated GELU. The embedding is scaled by sqrt(H), the logits are soft-capped.
Shapes: B samples, C context length, M blocks, K block size, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Gemma4TextConfig, PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm, Gemma4TextRotaryEmbedding

from dspark_lightning.attention import BlockAttention
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.config import DraftArgs, inherited_fields, shared_draft_fields, text_config_of
from dspark_lightning.drafts.grouped_query import GroupedQueryAttention
from dspark_lightning.drafts.layers import GatedMLP, gated_by
from dspark_lightning.drafts.rotation import Rope
from dspark_lightning.drafts.spec import DraftSpec

_GLOBAL = "full_attention"


class ScaledEmbedding(nn.Embedding):
    """An embedding whose output is multiplied by sqrt(H), rounded to the dtype of the weight as Gemma does."""

    def forward(self, input: Tensor) -> Tensor:
        """From ids [...] to [..., H]."""
        scale = torch.tensor(self.embedding_dim**0.5, dtype=self.weight.dtype).item()  # no buffer that could go astray
        return super().forward(input) * scale


class Gemma4DSparkDecoderLayer(GradientCheckpointingLayer):
    """See the module docstring."""

    layer_scalar: Tensor

    def __init__(self, config: Gemma4TextConfig) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.self_attn = GroupedQueryAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            norm=lambda: Gemma4RMSNorm(config.head_dim, eps=eps),
            scale=1.0,
            dropout=config.attention_dropout or 0.0,
            bias=config.attention_bias,
            keys_are_values=config.attention_k_eq_v,
            value_norm=lambda: Gemma4RMSNorm(config.head_dim, eps=eps, with_scale=False),
        )
        activation = cast(Callable[[Tensor], Tensor], ACT2FN[config.hidden_activation])
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, gated_by(activation))
        self.input_layernorm = Gemma4RMSNorm(config.hidden_size, eps=eps)
        self.post_attention_layernorm = Gemma4RMSNorm(config.hidden_size, eps=eps)
        self.pre_feedforward_layernorm = Gemma4RMSNorm(config.hidden_size, eps=eps)
        self.post_feedforward_layernorm = Gemma4RMSNorm(config.hidden_size, eps=eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self,
        hidden: Tensor,  # [M, K, H]
        context: Tensor,  # [B, C, H]
        rope: Rope,
        context_rope: Rope,
        attention: BlockAttention,
    ) -> Tensor:
        """Returns [M, K, H]."""
        attended = self.self_attn(self.input_layernorm(hidden), context, rope, context_rope, attention)
        hidden = hidden + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden))
        return cast(Tensor, (hidden + self.post_feedforward_layernorm(fed)) * self.layer_scalar)


class Gemma4DSparkModel(DSparkDraft):
    """DSpark draft for Gemma4 targets.

    Args:
        config: from `build_gemma4_draft_config`.
    """

    config_class = Gemma4TextConfig
    _no_split_modules: list[str] = ["Gemma4DSparkDecoderLayer"]  # noqa: RUF012
    rope_label = _GLOBAL
    layer_class = Gemma4DSparkDecoderLayer
    norm_class = Gemma4RMSNorm
    rotary_class = Gemma4TextRotaryEmbedding
    embedding_class = ScaledEmbedding

    def __init__(self, config: Gemma4TextConfig) -> None:
        super().__init__(config)
        self.logit_softcap = config.final_logit_softcapping


def build_gemma4_draft_config(target_config: PretrainedConfig, model_args: Any) -> Gemma4TextConfig:
    """Build the config of a Gemma4 draft.

    Args:
        target_config: of a Gemma4 or Gemma4-Unified target, or of its text model.
        model_args: see `DraftArgs`.

    Raises:
        ValueError: a target with per-layer inputs or experts, or see `DraftArgs`, `shared_draft_fields` and
            `text_config_of`.
    """
    text = text_config_of(target_config, ("gemma4_text", "gemma4_unified_text"))
    per_layer_width = getattr(text, "hidden_size_per_layer_input", 0)  # Unified configs have neither field
    if per_layer_width:
        raise ValueError(
            f"a Gemma4 target with per-layer inputs (hidden_size_per_layer_input {per_layer_width}, as in E2B and E4B) "
            "has no DSpark draft: a draft layer has no such input, so the target must have 0"
        )
    if getattr(text, "enable_moe_block", False):
        raise ValueError(
            "a Gemma4 target with experts (enable_moe_block true) has no DSpark draft: its global layers are not the "
            "dense ones that the draft is built of, so the target must have false"
        )
    args = DraftArgs.of(model_args)
    # Head size and number differ between global and windowed layers; the draft has the first kind only.
    layer = text.per_layer_config[text.layer_types.index(_GLOBAL)]
    own = {
        "head_dim": layer.head_dim,
        "global_head_dim": layer.head_dim,
        "num_key_value_heads": layer.num_key_value_heads,
        "num_global_key_value_heads": layer.num_key_value_heads,
        "num_kv_shared_layers": 0,
        "layer_types": [_GLOBAL] * args.num_draft_layers,
        "target_model_type": target_config.model_type,
    }
    shared = shared_draft_fields(text, args, Gemma4DSparkModel.__name__)
    return Gemma4TextConfig(**inherited_fields(text) | shared | own)


GEMMA4 = DraftSpec(
    Gemma4DSparkModel,
    build_gemma4_draft_config,
    architectures=(
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
    ),
    model_types=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
)
