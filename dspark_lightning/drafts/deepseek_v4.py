"""The DeepSeek V4 draft.

Every head shares one latent that is key and value at once; queries come from a latent of their own. RoPE turns
neighbouring channels at the end of a head, and since the value is turned as well, the attended value is turned back at
the query's position. A learned logit per head, the sink, takes its share of every softmax. The output projection is
block-diagonal over groups of heads. A plain residual stream (no hyper-connections), a dense SiLU-gated MLP.
Shapes: B samples, C context length, M blocks, K block size, H hidden size, D head dim, X rows or blocks, L tokens.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DeepseekV4Config, PretrainedConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4GroupedLinear,
    DeepseekV4RotaryEmbedding,
    DeepseekV4UnweightedRMSNorm,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dspark_lightning.attention import BlockAttention
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.config import DraftArgs, inherited_fields, shared_draft_fields, text_config_of
from dspark_lightning.drafts.layers import GatedMLP, PreNormDecoderLayer, gated_by
from dspark_lightning.drafts.rotation import Rope, rotate_neighbours
from dspark_lightning.drafts.spec import DraftSpec


class SinkLogits(nn.Module):
    """One logit for each head; a module of its own because the published name is `sinks_param.weight`."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))


class DeepseekV4DSparkAttention(nn.Module):
    """See the module docstring."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        hidden, heads, self.head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.scale = self.head_dim**-0.5
        self.dropout = config.attention_dropout or 0.0
        self.groups = config.o_groups
        eps = config.rms_norm_eps
        self.wq_a = nn.Linear(hidden, config.q_lora_rank, bias=False)
        self.q_norm = Qwen3RMSNorm(config.q_lora_rank, eps=eps)
        self.wq_b = nn.Linear(config.q_lora_rank, heads * self.head_dim, bias=False)
        self.head_norm = DeepseekV4UnweightedRMSNorm(eps=eps)
        self.wkv = nn.Linear(hidden, self.head_dim, bias=False)
        self.kv_norm = Qwen3RMSNorm(self.head_dim, eps=eps)
        self.sinks_param = SinkLogits(heads)
        out_rank = self.groups * config.o_lora_rank
        self.wo_a = DeepseekV4GroupedLinear(heads * self.head_dim // self.groups, out_rank, self.groups)
        self.wo_b = nn.Linear(out_rank, hidden, bias=False)

    def forward(
        self,
        hidden: Tensor,  # [M, K, H]
        context: Tensor,  # [B, C, H]
        rope: Rope,
        context_rope: Rope,
        attention: BlockAttention,
    ) -> Tensor:
        """Returns [M, K, H]."""
        query = self.wq_b(self.q_norm(self.wq_a(hidden))).unflatten(-1, (-1, self.head_dim))
        query = rotate_neighbours(self.head_norm(query).transpose(1, 2), rope)
        own, seen = self._latent(hidden, rope), self._latent(context, context_rope)
        dropout = self.dropout if self.training else 0.0
        sinks = self.sinks_param.weight
        attended = attention(query, own, own, seen, seen, scale=self.scale, dropout=dropout, sinks=sinks)
        cos, sin = rope
        attended = rotate_neighbours(attended, (cos, -sin)).transpose(1, 2).flatten(2)
        grouped = self.wo_a(attended.unflatten(-1, (self.groups, -1)))
        return cast(Tensor, self.wo_b(grouped.flatten(2)))

    def _latent(self, states: Tensor, rope: Rope) -> Tensor:
        """The one key and value head [X, 1, L, D] of states [X, L, H]."""
        return rotate_neighbours(self.kv_norm(self.wkv(states)).unsqueeze(1), rope)


class DeepseekV4DSparkDecoderLayer(PreNormDecoderLayer):
    """See the module docstring."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__(
            DeepseekV4DSparkAttention(config),
            GatedMLP(config.hidden_size, config.moe_intermediate_size, gated_by(F.silu)),
            norm=lambda: Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        )


class DeepseekV4DSparkModel(DSparkDraft):
    """DSpark draft for DeepSeek V4 targets.

    Args:
        config: from `build_deepseek_v4_draft_config`.
    """

    config_class = DeepseekV4Config
    _no_split_modules: list[str] = ["DeepseekV4DSparkDecoderLayer"]  # noqa: RUF012
    rope_label = "main"
    layer_class = DeepseekV4DSparkDecoderLayer
    norm_class = Qwen3RMSNorm
    rotary_class = DeepseekV4RotaryEmbedding


def build_deepseek_v4_draft_config(target_config: PretrainedConfig, model_args: Any) -> DeepseekV4Config:
    """Build the config of a DeepSeek V4 draft.

    Args:
        target_config: of a DeepSeek V4 target.
        model_args: see `DraftArgs`.

    Raises:
        ValueError: see `DraftArgs` and `shared_draft_fields`.
    """
    text = text_config_of(target_config, ("deepseek_v4",))
    args = DraftArgs.of(model_args)
    main = text.rope_parameters["main"]
    own = {
        # The draft has no compressed layers, so neither their rotary table nor any scaling of it.
        "rope_parameters": {label: {**main, "rope_type": "default"} for label in ("main", "compress")},
        # Required, and without a compressor; the draft's own layers see everything, hence a window over everything.
        "layer_types": ["sliding_attention"] * args.num_draft_layers,
        "sliding_window": text.max_position_embeddings,
        "mlp_layer_types": ["moe"] * args.num_draft_layers,  # required; the draft's MLP is one dense expert
        "num_nextn_predict_layers": 0,
    }
    shared = shared_draft_fields(text, args, DeepseekV4DSparkModel.__name__)
    return DeepseekV4Config(**inherited_fields(text) | shared | own)


DEEPSEEK_V4 = DraftSpec(
    DeepseekV4DSparkModel,
    build_deepseek_v4_draft_config,
    architectures=("DeepseekV4ForCausalLM",),
    model_types=("deepseek_v4",),
)
