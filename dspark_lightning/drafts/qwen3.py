"""The Qwen3 draft: for Qwen3 (dense, MoE) targets and every Llama-like one.

Grouped-query attention with per-head RMSNorm on queries and keys, half-split RoPE over the whole head, SiLU-gated MLP.
"""

from typing import Any, cast

from transformers import PretrainedConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel, Qwen3RMSNorm, Qwen3RotaryEmbedding

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.config import DraftArgs, inside_vocabulary, shared_draft_fields, text_config_of
from dspark_lightning.drafts.grouped_query import GroupedQueryAttention
from dspark_lightning.drafts.layers import GatedMLP, PreNormDecoderLayer, gated_by
from dspark_lightning.drafts.spec import DraftSpec


class Qwen3DSparkDecoderLayer(PreNormDecoderLayer):
    """See the module docstring."""

    def __init__(self, config: Qwen3Config) -> None:
        eps = config.rms_norm_eps
        attention = GroupedQueryAttention(
            config.hidden_size,
            config.num_attention_heads,
            cast(int, config.num_key_value_heads),
            config.head_dim,
            norm=lambda: Qwen3RMSNorm(config.head_dim, eps=eps),
            dropout=config.attention_dropout,
            bias=config.attention_bias,
        )
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, gated_by(ACT2FN[config.hidden_act]))
        super().__init__(attention, mlp, norm=lambda: Qwen3RMSNorm(config.hidden_size, eps=eps))


class Qwen3DSparkModel(DSparkDraft, Qwen3PreTrainedModel):  # type: ignore[misc]  # both declare `config`
    """DSpark draft for Qwen3 and Llama-like targets.

    Args:
        config: from `build_qwen3_draft_config`.
    """

    config_class = Qwen3Config
    _no_split_modules: list[str] = ["Qwen3DSparkDecoderLayer"]  # noqa: RUF012
    layer_class = Qwen3DSparkDecoderLayer
    norm_class = Qwen3RMSNorm
    rotary_class = Qwen3RotaryEmbedding


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
        ValueError: see `DraftArgs`, `shared_draft_fields` and `text_config_of`.
    """
    text = text_config_of(target_config, ("qwen2_5_vl_text", "qwen3_vl_text"))
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
        pad_token_id=inside_vocabulary(getattr(text, "pad_token_id", None), text.vocab_size),
    )


QWEN3 = DraftSpec(
    Qwen3DSparkModel,
    build_qwen3_draft_config,
    architectures=(
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
    ),
    model_types=("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen2_5_vl", "qwen3_vl"),
)
