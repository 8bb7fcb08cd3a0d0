"""Targets of several sizes for `memory_per_rank.py`, as configurations without weights."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import (
    DeepseekV4Config,
    Gemma4TextConfig,
    GlmMoeDsaConfig,
    MiniMaxM3VLConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)


@dataclass(frozen=True)
class Shape:
    """A target, and the draft of the configuration of that name."""

    name: str
    config: Callable[[], PretrainedConfig]
    draft_args: dict[str, Any] = field(default_factory=dict)
    tokens: int = 4096
    """Tokens of a micro-batch."""


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, tied: bool) -> Callable[[], PretrainedConfig]:
    return lambda: Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
    )


QWEN3_30B_A3B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}


GEMMA4_30B_CLASS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 5120,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "tie_word_embeddings": True,
}


SHAPES = (
    Shape("Qwen3-4B", _qwen3(2560, 9728, 36, 32, tied=True), {"target_layer_ids": [1, 9, 17, 25, 33]}),
    Shape("Qwen3-14B", _qwen3(5120, 17408, 40, 40, tied=False), {"target_layer_ids": [1, 10, 19, 28, 37]}),
    Shape("Qwen3-30B-A3B", lambda: Qwen3MoeConfig(**QWEN3_30B_A3B)),
    Shape(
        "Gemma4 architecture, 30B class",
        lambda: Gemma4TextConfig(**GEMMA4_30B_CLASS),
        {"target_layer_ids": [7, 22, 37, 52, 58], "num_anchors": 128},
        tokens=2048,
    ),
    Shape("Qwen3 architecture, dense 70B class", _qwen3(8192, 28672, 80, 64, tied=False)),
    Shape(
        "DeepSeek V4 as transformers' default",
        DeepseekV4Config,
        {"num_draft_layers": 2, "target_layer_ids": [39, 40, 41], "block_size": 5},
    ),
    Shape("MiniMax M3 as transformers' default", MiniMaxM3VLConfig, {"target_layer_ids": [10, 22, 34, 46, 58]}),
    Shape(
        "GLM MoE DSA as transformers' default",
        GlmMoeDsaConfig,
        {"num_draft_layers": 3, "target_layer_ids": [75, 76, 77], "block_size": 5},
    ),
)
"""Only the Qwen3 shapes are those of published models. The last three are the defaults of transformers' classes, which
have the number of layers that the configurations of those names expect."""
