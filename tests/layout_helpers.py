"""Draft folders written by hand, as each tool publishes them: literal fields, and tensors under literal names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model
from helpers import seeded, tiny_qwen3_config

ARGS: dict[str, Any] = {
    "mask_token_id": 96,
    "num_draft_layers": 2,
    "block_size": 4,
    "num_anchors": 3,
    "markov_rank": 8,
    "target_layer_ids": [1, 3],
}
BACKBONE = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "layer_types": ["full_attention", "full_attention"],
}
DEEPSPEC = BACKBONE | {
    "architectures": ["Qwen3DSparkModel"],
    "num_target_layers": 6,
    "block_size": 4,
    "mask_token_id": 96,
    "target_layer_ids": [1, 3],
    "num_anchors": 3,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
DSPARK = DEEPSPEC | {
    "eagle_aux_hidden_state_layer_ids": [2, 4],
    "sample_from_anchor": True,
    "dspark_bonus_anchor": False,
    "dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 3], "block_size": 4},
}
SPECULATORS = {
    "speculators_model_type": "dspark",
    "architectures": ["DSparkSpeculator"],  # whatever its class is called
    "transformer_layer_config": BACKBONE,
    "draft_vocab_size": 97,
    "block_size": 4,
    "target_hidden_size": 32,
    "aux_hidden_state_layer_ids": [2, 4],
    "mask_token_id": 96,
    "sample_from_anchor": True,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "speculators_config": {
        "algorithm": "dspark",
        "proposal_methods": [{"speculative_tokens": 4}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]},
    },
}
DFLASH = BACKBONE | {
    "architectures": ["DFlashDraft"],  # whatever its class is called
    "dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 3], "block_size": 4},
}
_LAYER_SHAPES = {
    "self_attn.q_proj.weight": (64, 32),
    "self_attn.k_proj.weight": (32, 32),
    "self_attn.v_proj.weight": (32, 32),
    "self_attn.o_proj.weight": (32, 64),
    "self_attn.q_norm.weight": (16,),
    "self_attn.k_norm.weight": (16,),
    "mlp.gate_proj.weight": (64, 32),
    "mlp.up_proj.weight": (64, 32),
    "mlp.down_proj.weight": (32, 64),
    "input_layernorm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
}
_SHAPES = {
    "embed_tokens.weight": (97, 32),
    **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in _LAYER_SHAPES.items()},
    "norm.weight": (32,),
    "fc.weight": (32, 64),
    "hidden_norm.weight": (32,),
    "lm_head.weight": (97, 32),
    "markov_head.markov_w1.weight": (97, 8),
    "markov_head.markov_w2.weight": (97, 8),
    "confidence_head.proj.weight": (1, 40),
    "confidence_head.proj.bias": (1,),
}
HEADS = ("markov_head.", "confidence_head.")


def tensors() -> dict[str, Tensor]:
    """The weights of the draft that all these folders hold, in bf16."""
    with seeded(5):
        return {name: (torch.randn(shape) * 0.2).bfloat16() for name, shape in _SHAPES.items()}


def backbone_tensors() -> dict[str, Tensor]:
    """Those without the heads."""
    return {name: tensor for name, tensor in tensors().items() if not name.startswith(HEADS)}


def same_draft(**changes: Any) -> DSparkDraft:
    """Our own draft with these weights, built from a target's config."""
    with seeded(9):
        draft = build_draft_model(tiny_qwen3_config(), **{**ARGS, **changes})
    own = draft.state_dict().keys()
    draft.load_state_dict({name: tensor for name, tensor in tensors().items() if name in own})
    return draft.bfloat16().eval()


def write_folder(folder: Path, config: object, weights: dict[str, Tensor] | None = None) -> Path:
    """A folder with a config and one file of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors() if weights is None else weights, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path, config: object) -> Path:
    """A folder with a config, two files of weights and their index, as Automodel consolidates them."""
    write_folder(folder, config)
    (folder / "model.safetensors").unlink()
    files = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    weight_map = {name: files[i % 2] for i, name in enumerate(tensors())}
    for file in files:
        save_file({name: tensor for name, tensor in tensors().items() if weight_map[name] == file}, folder / file)
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors().values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_speculators_with_maps(folder: Path) -> Path:
    """A whole vocabulary, and maps that say so."""
    maps = {"t2d": torch.ones(97, dtype=torch.bool), "d2t": torch.zeros(97, dtype=torch.int64)}
    return write_folder(folder, SPECULATORS, tensors() | maps)


WITH_HEADS: dict[str, Callable[[Path], Path]] = {
    "dspark": lambda folder: write_folder(folder, DSPARK),
    "deepspec": lambda folder: write_folder(folder, DEEPSPEC),
    "automodel": lambda folder: write_sharded(folder, DEEPSPEC),
    "speculators": lambda folder: write_folder(folder, SPECULATORS),
    "speculators, maps": write_speculators_with_maps,
}
"""Each writes the same draft, in its layout."""


def write_dflash(folder: Path) -> Path:
    """The same backbone without heads."""
    return write_folder(folder, DFLASH, backbone_tensors())
