"""The GLM-5.2 draft.

Multi-head latent attention with RoPE on neighbouring channels; a dense SiLU-gated MLP as wide as one of the target's
experts.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import GlmMoeDsaConfig, PretrainedConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRotaryEmbedding, yarn_get_mscale
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.config import DraftArgs, inherited_fields, shared_draft_fields, text_config_of
from dspark_lightning.drafts.latent import LatentAttention
from dspark_lightning.drafts.layers import GatedMLP, PreNormDecoderLayer, gated_by
from dspark_lightning.drafts.rotation import Rope
from dspark_lightning.drafts.spec import DraftSpec


class Glm5_2DSparkDecoderLayer(PreNormDecoderLayer):
    """See the module docstring."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__(
            LatentAttention(config, scale=score_scale(config)),
            GatedMLP(config.hidden_size, config.moe_intermediate_size, gated_by(F.silu)),
            norm=lambda: Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        )


def score_scale(config: GlmMoeDsaConfig) -> float:
    """(nope + rope) ** -0.5; a context stretched by YaRN with `mscale` makes the scores larger in return."""
    rope = config.rope_parameters or {}
    scale: float = config.qk_head_dim**-0.5
    factor, mscale, original = (rope.get(key) for key in ("factor", "mscale", "original_max_position_embeddings"))
    if factor and mscale and original and config.max_position_embeddings > original:
        scale *= yarn_get_mscale(factor, mscale) ** 2
    return scale


class Glm5_2DSparkModel(DSparkDraft):
    """DSpark draft for GLM-5.2 targets.

    Args:
        config: from `build_glm_5_2_draft_config`.
    """

    config_class = GlmMoeDsaConfig
    _no_split_modules: list[str] = ["Glm5_2DSparkDecoderLayer"]  # noqa: RUF012
    layer_class = Glm5_2DSparkDecoderLayer
    norm_class = Qwen3RMSNorm
    rotary_class = GlmMoeDsaRotaryEmbedding

    def rope_tables(self, states: Tensor, position_ids: Tensor) -> Rope:
        """Cos and sin [X, L, rope_dim / 2], one entry for each pair of neighbours."""
        cos, sin = self.rotary_emb(states, position_ids)  # type: ignore[misc]  # never None here
        return cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]


def build_glm_5_2_draft_config(target_config: PretrainedConfig, model_args: Any) -> GlmMoeDsaConfig:
    """Build the config of a GLM-5.2 draft.

    Args:
        target_config: of a GLM-5.2 (glm_moe_dsa) target.
        model_args: see `DraftArgs`.

    Raises:
        ValueError: see `DraftArgs` and `shared_draft_fields`.
    """
    text = text_config_of(target_config, ("glm_moe_dsa",))
    args = DraftArgs.of(model_args)
    rope = dict(text.rope_parameters)
    if rope.get("rope_type") == "yarn":
        rope["attention_factor"] = 1.0  # plain tables, as published: what there is to scale, `score_scale` does
    own = {
        "rope_parameters": rope,
        "mlp_layer_types": ["dense"] * args.num_draft_layers,
        "indexer_types": ["full"] * args.num_draft_layers,  # required; the draft has no indexer
        "num_nextn_predict_layers": 0,
    }
    shared = shared_draft_fields(text, args, Glm5_2DSparkModel.__name__)
    return GlmMoeDsaConfig(**inherited_fields(text) | shared | own)


GLM_5_2 = DraftSpec(
    Glm5_2DSparkModel,
    build_glm_5_2_draft_config,
    architectures=("GlmMoeDsaForCausalLM",),
    model_types=("glm_moe_dsa",),
)
