"""The MiniMax M3 draft: for MiniMax M3 targets, through their text model.

Grouped-query attention with per-head norms and RoPE on the leading channels of a head; norms that store their weight
minus one; a clamped SwiGLU whose linear part is shifted by one.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import MiniMaxM3VLTextConfig, PretrainedConfig
from transformers import initialization as init
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLRMSNorm, MiniMaxM3VLRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.config import DraftArgs, inherited_fields, shared_draft_fields, text_config_of
from dspark_lightning.drafts.grouped_query import GroupedQueryAttention
from dspark_lightning.drafts.layers import GatedMLP, PreNormDecoderLayer
from dspark_lightning.drafts.spec import DraftSpec


def swiglu_oai(alpha: float, limit: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The gating of the MLP: gate * sigmoid(alpha * gate) * (input + 1), both clamped where limit is above 0.

    Returns:
        from gate and input [..., width] to their combination, computed in fp32.
    """

    def combine(gate: Tensor, up: Tensor) -> Tensor:
        wide_gate, wide_up = gate.float(), up.float()
        if limit > 0:
            wide_gate, wide_up = wide_gate.clamp(max=limit), wide_up.clamp(-limit, limit)
        return (wide_gate * torch.sigmoid(alpha * wide_gate) * (wide_up + 1)).to(gate.dtype)

    return combine


def make_norm(config: MiniMaxM3VLTextConfig, dim: int) -> nn.Module:
    """An RMSNorm over `dim` as the target has it: with the weight stored minus one, unless it says otherwise."""
    norm = MiniMaxM3VLRMSNorm if getattr(config, "use_gemma_norm", True) else Qwen3RMSNorm
    return cast(nn.Module, norm(dim, eps=config.rms_norm_eps))


class MiniMaxM3DSparkDecoderLayer(PreNormDecoderLayer):
    """See the module docstring."""

    def __init__(self, config: MiniMaxM3VLTextConfig) -> None:
        attention = GroupedQueryAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            norm=lambda: make_norm(config, config.head_dim),
            dropout=config.attention_dropout or 0.0,
        )
        combine = swiglu_oai(config.swiglu_alpha, config.swiglu_limit)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, combine)
        super().__init__(attention, mlp, norm=lambda: make_norm(config, config.hidden_size))


class MiniMaxM3DSparkModel(DSparkDraft):
    """DSpark draft for MiniMax M3 targets.

    Args:
        config: from `build_minimax_m3_draft_config`.
    """

    config_class = MiniMaxM3VLTextConfig
    _no_split_modules: list[str] = ["MiniMaxM3DSparkDecoderLayer"]  # noqa: RUF012
    layer_class = MiniMaxM3DSparkDecoderLayer
    rotary_class = MiniMaxM3VLRotaryEmbedding

    def make_norm(self) -> nn.Module:
        """One RMSNorm over H."""
        return make_norm(cast(MiniMaxM3VLTextConfig, self.config), self.config.hidden_size)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, MiniMaxM3VLRMSNorm):  # transformers would start every norm at 1, which here means 2
            init.zeros_(module.weight)
        else:
            super()._init_weights(module)


def build_minimax_m3_draft_config(target_config: PretrainedConfig, model_args: Any) -> MiniMaxM3VLTextConfig:
    """Build the config of a MiniMax M3 draft.

    Args:
        target_config: of a MiniMax M3 target, or of its text model.
        model_args: see `DraftArgs`.

    Raises:
        ValueError: see `DraftArgs`, `shared_draft_fields` and `text_config_of`.
    """
    text = text_config_of(target_config, ("minimax_m3", "minimax_m3_vl_text"))
    args = DraftArgs.of(model_args)
    own = {
        # Some configs only say how many channels turn; the rotary table goes by their share.
        "rope_parameters": {"partial_rotary_factor": text.rotary_dim / text.head_dim, **text.rope_parameters},
        "layer_types": ["full_attention"] * args.num_draft_layers,
        "mlp_layer_types": ["dense"] * args.num_draft_layers,
        "num_mtp_modules": 0,
        "target_model_type": target_config.model_type,
    }
    shared = shared_draft_fields(text, args, MiniMaxM3DSparkModel.__name__)
    return MiniMaxM3VLTextConfig(**inherited_fields(text) | shared | own)


MINIMAX_M3 = DraftSpec(
    MiniMaxM3DSparkModel,
    build_minimax_m3_draft_config,
    architectures=("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForCausalLM"),
    model_types=("minimax_m3_vl", "minimax_m3_vl_text"),
)
