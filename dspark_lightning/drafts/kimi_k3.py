"""The Kimi K3 draft: multi-head latent attention without positions (NoPE) and with an output gate, a SiTU-gated MLP.

What knows about order is the context itself; a block token tells its slot by the Markov head and by what it attends to.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import KimiLinearConfig, PretrainedConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.config import DraftArgs, inherited_fields, shared_draft_fields, text_config_of
from dspark_lightning.drafts.latent import LatentAttention
from dspark_lightning.drafts.layers import GatedMLP, PreNormDecoderLayer
from dspark_lightning.drafts.spec import DraftSpec


def situ(beta: float | None, linear_beta: float | None) -> Callable[[Tensor, Tensor], Tensor]:
    """The gating of a SiTU MLP: a SiLU whose linear part saturates at beta, times an input that saturates too.

    Args:
        beta: of the gate; None is 1.
        linear_beta: of the input; None leaves it linear.

    Returns:
        from gate and input [..., width] to their combination, computed in fp32.
    """
    beta = beta or 1.0

    def combine(gate: Tensor, up: Tensor) -> Tensor:
        wide_gate, wide_up = gate.float(), up.float()
        gated = beta * torch.tanh(wide_gate / beta) * torch.sigmoid(wide_gate)
        if linear_beta is not None:
            wide_up = linear_beta * torch.tanh(wide_up / linear_beta)
        return (gated * wide_up).to(gate.dtype)

    return combine


class KimiK3DSparkDecoderLayer(PreNormDecoderLayer):
    """See the module docstring."""

    def __init__(self, config: KimiLinearConfig) -> None:
        combine = situ(
            getattr(config, "activation_situ_beta", None), getattr(config, "activation_situ_linear_beta", None)
        )
        super().__init__(
            LatentAttention(
                config,
                scale=(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5,
                output_gate=getattr(config, "mla_use_output_gate", False),
            ),
            GatedMLP(config.hidden_size, config.intermediate_size, combine),
            norm=lambda: Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        )


class KimiK3DSparkModel(DSparkDraft):
    """DSpark draft for Kimi K3 and Kimi-Linear targets.

    Args:
        config: from `build_kimi_k3_draft_config`.
    """

    config_class = KimiLinearConfig
    _no_split_modules: list[str] = ["KimiK3DSparkDecoderLayer"]  # noqa: RUF012
    layer_class = KimiK3DSparkDecoderLayer
    norm_class = Qwen3RMSNorm
    rotary_class = None


def build_kimi_k3_draft_config(target_config: PretrainedConfig, model_args: Any) -> KimiLinearConfig:
    """Build the config of a Kimi draft.

    Args:
        target_config: of a Kimi K3 or Kimi-Linear target.
        model_args: see `DraftArgs`.

    Raises:
        ValueError: a target whose latent attention has RoPE or shares keys between heads, or see `DraftArgs`,
            `shared_draft_fields` and `text_config_of`.
    """
    text = text_config_of(target_config, ("kimi_linear", "kimi_k3", "kimi_k3_text"))
    if getattr(text, "mla_use_nope", None) is not True:
        raise ValueError(
            f"a Kimi target with mla_use_nope {getattr(text, 'mla_use_nope', None)!r} has no DSpark draft: the draft's "
            "attention has no positions (NoPE), so the target must have true"
        )
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    if kv_heads not in (None, heads):
        raise ValueError(
            f"a Kimi target with num_key_value_heads {kv_heads} has no DSpark draft: latent attention gives each of "
            f"the {heads} heads its own keys"
        )
    args = DraftArgs.of(model_args)
    own = {
        "layer_types": ["full_attention"] * args.num_draft_layers,
        "mlp_layer_types": ["dense"] * args.num_draft_layers,
        "num_local_experts": 0,
        "n_shared_experts": 0,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {"kda_layers": [], "full_attn_layers": [i + 1 for i in range(args.num_draft_layers)]},
    }
    shared = shared_draft_fields(text, args, KimiK3DSparkModel.__name__)
    fields = inherited_fields(text)
    for older_name in ("num_experts", "num_shared_experts"):
        fields.pop(older_name, None)
    return KimiLinearConfig(**fields | shared | own)


KIMI_K3 = DraftSpec(
    KimiK3DSparkModel,
    build_kimi_k3_draft_config,
    architectures=("KimiK3ForCausalLM", "KimiK3ForConditionalGeneration"),
    model_types=("kimi_k3", "kimi_linear"),
)
