"""Tiny random targets of every family: the whole path of a family on a laptop, without downloading anything.

    python scripts/tiny_target.py gemma4 targets/tiny-gemma4

writes a model folder with the tokenizer of the embedded target beside the weights, so that a training configuration
can name the folder as its `target`. The tests build the same models with `build_tiny_target`.
"""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLConfig,
    MiniMaxM3VLForCausalLM,
    MiniMaxM3VLTextConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dspark_lightning.embedded import embedded_path
from dspark_lightning.loading import load_target_config

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LOGITS_STD = 2.0
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
GROUPED_HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
LATENT_HEADS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
KIMI_K3: dict[str, Any] = {  # what a Kimi K3 config has beyond the fields of this class
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
}
# An indexer's scores are sums of ReLUs. Those of a few random heads are often 0 alike, and then it depends on the
# length of the row which of the positions with equal scores are picked.
MANY_HEADS = 32
ONE_DENSE_LAYER = ["dense", "sparse", "sparse", "sparse"]


def tiny_qwen3(vocab_size: int) -> PreTrainedModel:
    """Grouped-query attention, dense."""
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab_size, **SIZES, **GROUPED_HEADS, tie_word_embeddings=False))


def tiny_qwen3_moe(vocab_size: int) -> PreTrainedModel:
    """Grouped-query attention, experts in every layer."""
    sizes = {**SIZES, **GROUPED_HEADS, **EXPERTS, "num_experts": 4}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=vocab_size, **sizes, tie_word_embeddings=False))


def gemma4_text(vocab_size: int, keys_are_values: bool) -> dict[str, Any]:
    """The text part of a Gemma 4 config."""
    return {
        **SIZES,
        **GROUPED_HEADS,
        "vocab_size": vocab_size,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1 if keys_are_values else None,
        "attention_k_eq_v": keys_are_values,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 16,
        "final_logit_softcapping": 30.0,
    }


def _gemma4_without_towers(vocab_size: int) -> dict[str, Any]:
    """Text alone; the placeholders of images, video and audio are the last ids of the vocabulary."""
    placeholders = (
        "boa_token_id",
        "eoa_token_index",
        "boi_token_id",
        "eoi_token_id",
        "image_token_id",
        "video_token_id",
        "audio_token_id",
    )
    ids = range(vocab_size - len(placeholders), vocab_size)
    return {"vision_config": None, "audio_config": None, **dict(zip(placeholders, ids, strict=True))}


def _gemma4(vocab_size: int, keys_are_values: bool) -> PreTrainedModel:
    text = gemma4_text(vocab_size, keys_are_values) | {
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": vocab_size,
    }
    return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, **_gemma4_without_towers(vocab_size)))


def tiny_gemma4(vocab_size: int) -> PreTrainedModel:
    """Sliding and full layers, whose keys are their values; tied head with a softcap."""
    return _gemma4(vocab_size, keys_are_values=True)


def tiny_gemma4_noeq(vocab_size: int) -> PreTrainedModel:
    """`tiny_gemma4` with values of their own."""
    return _gemma4(vocab_size, keys_are_values=False)


def tiny_gemma4_unified(vocab_size: int) -> PreTrainedModel:
    """`tiny_gemma4` in the class of the models that read every medium without towers."""
    text = gemma4_text(vocab_size, keys_are_values=True)
    config = Gemma4UnifiedConfig(text_config=text, **_gemma4_without_towers(vocab_size))
    return Gemma4UnifiedForConditionalGeneration(config)


def tiny_deepseek_v4(vocab_size: int) -> PreTrainedModel:
    """Hyper-connections of four streams, one layer of every kind of attention, hashed and routed experts."""
    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    config = DeepseekV4Config(
        vocab_size=vocab_size,
        **sizes,
        **EXPERTS,
        num_key_value_heads=1,
        head_dim=32,
        partial_rotary_factor=0.5,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=16,
        n_routed_experts=4,
        layer_types=[
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
        ],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        sliding_window=16,
        hc_mult=4,
        index_n_heads=MANY_HEADS,
        index_head_dim=16,
        index_topk=4,
    )
    return DeepseekV4ForCausalLM(config)


def tiny_glm_moe_dsa(vocab_size: int) -> PreTrainedModel:
    """Latent attention over the positions that an indexer picks."""
    config = GlmMoeDsaConfig(
        vocab_size=vocab_size,
        **SIZES,
        **LATENT_HEADS,
        **EXPERTS,
        n_routed_experts=4,
        q_lora_rank=24,
        mlp_layer_types=ONE_DENSE_LAYER,
        indexer_types=["full", "full", "shared", "shared"],
        index_topk=8,
        index_head_dim=16,
        index_n_heads=MANY_HEADS,
    )
    return GlmMoeDsaForCausalLM(config)


def minimax_m3_text(vocab_size: int) -> dict[str, Any]:
    """The text part of a MiniMax M3 config."""
    return {
        **SIZES,
        **GROUPED_HEADS,
        "vocab_size": vocab_size,
        "intermediate_size": 32,
        "dense_intermediate_size": 128,
        "shared_intermediate_size": 32,
        "rotary_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ONE_DENSE_LAYER,
        "layer_types": ["full_attention", "full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 2,
        "index_local_blocks": 1,
    }


def tiny_minimax_m3_vl(vocab_size: int) -> PreTrainedModel:
    """Full and block-sparse layers below a vision tower, which this class always has."""
    tower = {
        "hidden_size": 48,  # each head's width is cut into the axes of a 3-D rotary embedding
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = MiniMaxM3VLConfig(
        text_config=minimax_m3_text(vocab_size),
        vision_config=tower,
        projector_hidden_size=64,
        image_token_index=vocab_size - 2,
        video_token_index=vocab_size - 1,
    )
    return MiniMaxM3SparseForConditionalGeneration(config)


def tiny_minimax_m3_text(vocab_size: int) -> PreTrainedModel:
    """The text stack of `tiny_minimax_m3_vl` alone."""
    return MiniMaxM3VLForCausalLM(MiniMaxM3VLTextConfig(**minimax_m3_text(vocab_size)))


def tiny_kimi_linear(vocab_size: int) -> PreTrainedModel:
    """Three layers of linear attention below one of latent attention; its config has the fields of a Kimi K3 too."""
    config = KimiLinearConfig(
        vocab_size=vocab_size,
        **SIZES,
        **LATENT_HEADS,
        **EXPERTS,
        q_lora_rank=None,
        n_shared_experts=1,
        num_local_experts=4,
        linear_head_dim=16,
        linear_num_heads=4,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        mlp_layer_types=ONE_DENSE_LAYER,
        **KIMI_K3,
    )
    return KimiLinearForCausalLM(config)


def tiny_kimi_k25(vocab_size: int) -> PreTrainedModel:
    """Latent attention and experts below a vision tower."""
    text = {
        **SIZES,
        **LATENT_HEADS,
        **EXPERTS,
        "model_type": "deepseek_v3",
        "vocab_size": vocab_size,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
    }
    tower = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
        "pos_emb_time": 2,
    }
    config = Kimi_K25Config(
        text_config=text,
        vision_config=tower,
        projection_hidden_size=32,
        vision_start_token_id=vocab_size - 4,
        vision_end_token_id=vocab_size - 3,
        image_token_id=vocab_size - 2,
        video_token_id=vocab_size - 1,
        tie_word_embeddings=False,
    )
    return Kimi_K25ForConditionalGeneration(config)


TINY_TARGETS: dict[str, Callable[[int], PreTrainedModel]] = {
    "qwen3": tiny_qwen3,
    "qwen3_moe": tiny_qwen3_moe,
    "gemma4": tiny_gemma4,
    "gemma4_noeq": tiny_gemma4_noeq,
    "gemma4_unified": tiny_gemma4_unified,
    "deepseek_v4": tiny_deepseek_v4,
    "glm_moe_dsa": tiny_glm_moe_dsa,
    "minimax_m3_vl": tiny_minimax_m3_vl,
    "minimax_m3_text": tiny_minimax_m3_text,
    "kimi_linear": tiny_kimi_linear,
    "kimi_k25": tiny_kimi_k25,
}
"""From a family's name to a function of the vocabulary's size."""
CONFIGURATIONS = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "gemma4": "gemma4",
    "gemma4_noeq": "gemma4",
    "gemma4_unified": "gemma4",
    "deepseek_v4": "deepseek_v4",
    "glm_moe_dsa": "glm_5_2",
    "minimax_m3_vl": "minimax_m3",
    "minimax_m3_text": "minimax_m3",
    "kimi_linear": "kimi_k3",
}
"""Which of configs/tiny trains a drafter for it; kimi_k25 is a target that no draft serves."""


def build_tiny_target(family: str, vocab_size: int = 256, seed: int = 0) -> PreTrainedModel:
    """A random target in eval mode, the same for the same seed; leaves the global generator alone.

    Its next-token distributions are far from uniform, so that a draft has something to learn from it.

    Args:
        family: a key of `TINY_TARGETS`.
        vocab_size: at least 16.
        seed: of the weights.

    Raises:
        ValueError: an unknown family.
    """
    if family not in TINY_TARGETS:
        raise ValueError(f"there is no tiny target {family!r}: known are {', '.join(TINY_TARGETS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TINY_TARGETS[family](vocab_size)
        model.eval()
        spread_logits(model, torch.randint(vocab_size - 8, (4, 64)))
    return model


@torch.no_grad()
def spread_logits(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    """Scale what makes the logits until their standard deviation over `input_ids` [B, S] is `LOGITS_STD`."""
    head = cast(torch.nn.Module, model.get_output_embeddings())
    weight = cast(torch.Tensor, head.weight)
    if weight is model.get_input_embeddings().weight:
        # A tied head takes the embedding along. So that the last states are not just the embedding again, and every
        # token its own successor, the layers (Gemma's, with a norm behind each part) speak louder too.
        weight.mul_(LOGITS_STD / (weight.std() * weight.shape[1] ** 0.5))
        for name, parameter in model.named_parameters():
            if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                parameter.fill_(3.0)
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    weight.mul_(LOGITS_STD / head(hidden).std())


def write_tiny_target(family: str, folder: Path) -> PreTrainedModel:
    """Write a tiny target with the embedded target's tokenizer and vocabulary. Returns it.

    Args:
        family: a key of `TINY_TARGETS`.
        folder: created where it is missing.

    Raises:
        ValueError: an unknown family.
    """
    model = build_tiny_target(family, load_target_config("embedded").vocab_size)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(embedded_path() / name, folder)
    return model


def main() -> None:
    """Write one tiny target and say how to train a drafter for it."""
    parser = argparse.ArgumentParser(description="Write a tiny random target of one family.")
    parser.add_argument("family", choices=list(CONFIGURATIONS), metavar="FAMILY", help=", ".join(CONFIGURATIONS))
    parser.add_argument("folder", type=Path, help="where to write it, such as targets/tiny-gemma4")
    arguments = parser.parse_args()
    model = write_tiny_target(arguments.family, arguments.folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    vocab_size = model.config.get_text_config().vocab_size
    print(
        f"Wrote {arguments.folder}: {type(model).__name__}, {parameters:,} parameters, "
        f"vocabulary of {vocab_size:,} tokens"
    )
    config = f"configs/tiny/{CONFIGURATIONS[arguments.family]}.yaml"
    print(f"Next: dspark fit --config {config} --model.init_args.target {arguments.folder}")


if __name__ == "__main__":
    main()
