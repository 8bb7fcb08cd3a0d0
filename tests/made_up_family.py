"""A family from outside the package, as a user would write it: a target of their own, and a draft for it in one file.

Its draft layer is unlike all others: one head, LayerNorm, no positions, attention and MLP side by side.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from dspark_lightning import DraftSpec, DSparkDraft, DSparkModule, register_draft_family
from dspark_lightning.attention import BlockAttention
from dspark_lightning.drafts.config import DraftArgs, shared_draft_fields


class MadeUpConfig(Qwen3Config):
    model_type = "made_up"


class MadeUpForCausalLM(Qwen3ForCausalLM):
    config_class = MadeUpConfig


class MadeUpDraftConfig(PretrainedConfig):
    model_type = "made_up_draft"


class MadeUpLayer(GradientCheckpointingLayer):
    def __init__(self, config: MadeUpDraftConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm = nn.LayerNorm(size)
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(size, config.width), nn.GELU(), nn.Linear(config.width, size))

    def forward(
        self, hidden: Tensor, context: Tensor, rope: None, context_rope: None, attention: BlockAttention
    ) -> Tensor:
        normed = self.norm(hidden)
        inputs = (self.query(normed), self.key(normed), self.value(normed), self.key(context), self.value(context))
        attended = attention(*(x.unsqueeze(1) for x in inputs), scale=hidden.shape[-1] ** -0.5)
        return hidden + attended.squeeze(1) + self.mlp(normed)


class MadeUpDSparkModel(DSparkDraft):
    config_class = MadeUpDraftConfig
    _no_split_modules = ["MadeUpLayer"]  # noqa: RUF012
    layer_class = MadeUpLayer
    norm_class = torch.nn.LayerNorm
    rotary_class = None


def build_made_up_draft_config(target_config: PretrainedConfig, model_args: Any) -> MadeUpDraftConfig:
    shared = shared_draft_fields(target_config, DraftArgs.of(model_args), "MadeUpDSparkModel")
    sizes = {"hidden_size": target_config.hidden_size, "vocab_size": target_config.vocab_size, "rms_norm_eps": 1e-5}
    return MadeUpDraftConfig(**shared, **sizes, width=2 * target_config.hidden_size)


MADE_UP = DraftSpec(
    MadeUpDSparkModel,
    build_made_up_draft_config,
    architectures=("MadeUpForCausalLM",),
    model_types=("made_up",),
)


class MadeUpDSpark(DSparkModule):
    spec = MADE_UP


AutoConfig.register("made_up", MadeUpConfig)
AutoModelForCausalLM.register(MadeUpConfig, MadeUpForCausalLM)
register_draft_family(MADE_UP)  # the one line
