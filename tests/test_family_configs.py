"""From a target's config to a family's draft: what is taken over, what is refused, and the formulas that differ."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import AutoConfig, PretrainedConfig

from dspark_lightning.drafts.gemma4 import ScaledEmbedding
from dspark_lightning.drafts.kimi_k3 import situ
from dspark_lightning.drafts.minimax_m3 import swiglu_oai
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.export import export_draft
from dspark_lightning.pretrained import load_draft_weights
from family_helpers import ARGS, FAMILIES, VARIANTS, build_pair
from tiny_target import build_tiny_target

ALL = FAMILIES | VARIANTS


def changed_config(family: str, **changes: Any) -> PretrainedConfig:
    """The tiny target's config, with changes to its text part."""
    config = build_tiny_target(family).config
    for name, value in changes.items():
        setattr(config.get_text_config(), name, value)
    return config


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma4", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input 8, as in E2B and E4B"),
        ("gemma4", {"enable_moe_block": True}, "experts .enable_moe_block true."),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope False"),
        ("kimi_linear", {"mla_use_nope": None}, "mla_use_nope None"),
        ("kimi_linear", {"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ("minimax_m3_vl", {"model_type": "minimax_m2"}, "'minimax_m3_vl' target .* type 'minimax_m2'"),
        ("gemma4", {"model_type": "gemma3_text"}, "'gemma4' target .* type 'gemma3_text': known are gemma4_text"),
        ("kimi_k25", {}, "no draft is registered for a target of type .*'kimi_k25'"),
    ],
)
def test_targets_without_a_draft_are_refused_with_the_reason(family: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        build_draft_model(changed_config(family, **changes), **ARGS)
    assert "\n" not in str(error.value)


def test_a_kimi_linear_without_the_extra_fields_is_served() -> None:
    """A published Kimi-Linear config has no output gate, no SiTU and no query latent, but says that it has no RoPE."""
    config = changed_config("kimi_linear")
    for name in ("mla_use_output_gate", "activation_situ_beta", "activation_situ_linear_beta"):
        delattr(config, name)
    draft = build_draft_model(config, **ARGS)
    names = {name.removeprefix("layers.0.self_attn.") for name in draft.state_dict() if "layers.0.self_attn" in name}
    assert "q_proj.weight" in names and "g_proj.weight" not in names


@pytest.mark.parametrize("family", ALL)
def test_the_draft_config_has_only_its_own_layers(family: str, tmp_path: Path) -> None:
    draft = build_pair(family)[1]
    lists = {name: value for name, value in draft.config.to_dict().items() if name.endswith("_types") and value}
    assert all(len(value) == 2 for value in lists.values()), lists
    draft.config.save_pretrained(tmp_path)  # transformers checks the lengths here
    assert AutoConfig.from_pretrained(tmp_path).to_dict()["target_layer_ids"] == draft.target_layer_ids


def test_a_plain_norm_is_taken_over_from_minimax() -> None:
    draft = build_draft_model(changed_config("minimax_m3_vl", use_gemma_norm=False), **ARGS)
    assert type(draft.norm).__name__ == "Qwen3RMSNorm" and torch.equal(draft.norm.weight, torch.ones(64))


def test_minimax_falls_back_to_the_number_of_turning_channels() -> None:
    config = changed_config("minimax_m3_vl", rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rotary_dim=4)
    cos, _ = build_draft_model(config, **ARGS).rope_tables(torch.zeros(1, 1), torch.zeros(1, 1))
    assert cos.shape[-1] == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_what_describes_the_targets_weights_is_left_behind(family: str) -> None:
    config = changed_config(
        family,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
        auto_map={"AutoConfig": "configuration_x.XConfig"},
        dtype=torch.float16,
    )
    fields = build_draft_model(config, **ARGS).config.to_dict()
    assert not fields.get("quantization_config") and not fields.get("auto_map")
    assert fields.get("dtype") in (None, "float32")


def test_minimax_prefers_the_share_of_turning_channels() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = changed_config("minimax_m3_vl", rope_parameters=rope, rotary_dim=4)
    cos, _ = build_draft_model(config, **ARGS).rope_tables(torch.zeros(1, 1), torch.zeros(1, 1))
    assert cos.shape[-1] == 8


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("rope", "length", "factor"),
    [
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, 128, (0.1 * math.log(4) + 1) ** 2),
        (YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}, 128, (0.07 * math.log(4) + 1) ** 2),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, 32, 1.0),  # not extended
        (YARN, 128, 1.0),
        ({"rope_type": "default", "rope_theta": 1e4}, 128, 1.0),
    ],
)
def test_glm_scales_scores_and_never_tables(rope: dict[str, Any], length: int, factor: float) -> None:
    config = changed_config("glm_moe_dsa", rope_parameters=dict(rope), max_position_embeddings=length)
    draft = build_draft_model(config, **ARGS)
    assert draft.layers[0].self_attn.scale == pytest.approx(24**-0.5 * factor)
    cos, _ = draft.rope_tables(torch.zeros(1, 1), torch.zeros(1, 1))
    assert torch.equal(cos, torch.ones_like(cos))  # at position 0


def test_gemma_rounds_its_embedding_scale_to_the_weights() -> None:
    """sqrt(48) is 6.928...; in bf16 it is 6.9375, and a product with it is not one with the other rounded."""
    embedding = ScaledEmbedding(1, 48, dtype=torch.bfloat16)
    nn.init.constant_(embedding.weight, 1.0078125)
    assert embedding(torch.tensor(0)).tolist() == [float(torch.tensor(1.0078125 * 6.9375, dtype=torch.bfloat16))] * 48
    exact = ScaledEmbedding(1, 48)
    nn.init.ones_(exact.weight)
    assert_close(exact(torch.tensor([0])), torch.full((1, 48), 48**0.5))


def test_gemmas_attention_bias_is_taken_over() -> None:
    names = {
        name for name, _ in build_draft_model(changed_config("gemma4", attention_bias=True), **ARGS).named_parameters()
    }
    assert {"layers.0.self_attn.q_proj.bias", "layers.0.self_attn.o_proj.bias"} <= names


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("limit", "gate", "up", "expected"),
    [
        (7.0, 2.0, 3.0, 2 * sigmoid(3.404) * 4),
        (7.0, 9.0, 9.0, 7 * sigmoid(11.914) * 8),
        (7.0, -9.0, -9.0, -9 * sigmoid(-15.318) * -6),  # the gate is clamped from above only
        (0.0, 9.0, -9.0, 9 * sigmoid(15.318) * -8),  # 0 clamps nothing
    ],
)
def test_minimax_gating(limit: float, gate: float, up: float, expected: float) -> None:
    combined = swiglu_oai(1.702, limit)(torch.tensor([gate]), torch.tensor([up]))
    assert combined.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("beta", "linear_beta", "expected"),
    [
        (4.0, 25.0, 4 * math.tanh(0.75) * sigmoid(3.0) * 25 * math.tanh(0.4)),
        (None, None, math.tanh(3.0) * sigmoid(3.0) * 10),
    ],
)
def test_kimi_gating(beta: float | None, linear_beta: float | None, expected: float) -> None:
    assert situ(beta, linear_beta)(torch.tensor([3.0]), torch.tensor([10.0])).item() == pytest.approx(expected)


def test_deepseeks_mlp_is_not_clamped() -> None:
    """The target's own MLP clamps at 10, the draft's does not."""
    mlp = build_pair("deepseek_v4")[1].layers[0].mlp
    gate, up = torch.tensor([20.0]), torch.tensor([30.0])
    assert mlp.combine(gate, up).item() == pytest.approx(600.0)


def test_draft_init_takes_a_draft_of_the_same_kind_only(tmp_path: Path) -> None:
    """Shapes alone would not tell: GLM's draft without YaRN has those of Kimi's without a gate."""
    saved = export_draft(build_pair("qwen3")[1], tmp_path / "dspark")
    for changes, field in (
        ({"target_layer_ids": [1, 2]}, r"target_layer_ids \[0, 2\], this draft has \[1, 2\]"),
        ({"markov_head_type": "rnn"}, r"markov_head_type 'vanilla', this draft has 'rnn'"),
        ({"markov_rank": 4}, "markov_rank 8, this draft has 4"),
    ):
        with pytest.raises(ValueError, match=field):
            load_draft_weights(build_pair("qwen3", **changes)[1], saved)
    with pytest.raises(
        ValueError, match=r"architectures .'Qwen3DSparkModel'., this draft has .'MiniMaxM3DSparkModel'."
    ):
        load_draft_weights(build_pair("minimax_m3_vl")[1], saved)
    load_draft_weights(build_pair("qwen3", block_size=7)[1], saved)  # another block size is a matter of training
