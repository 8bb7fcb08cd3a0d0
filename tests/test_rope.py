"""RoPE frequencies survive casts, by value."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import Gemma4TextConfig, PretrainedConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.rope import pin_rope_inv_freq_fp32, repair_rope, rope_errors
from helpers import tiny_llama_config, tiny_qwen3, tiny_qwen3_config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def gemma4_config() -> PretrainedConfig:
    return Gemma4TextConfig(hidden_size=32, num_attention_heads=2, head_dim=16, num_hidden_layers=6)


ROTARIES: dict[str, Callable[[], nn.Module]] = {
    "qwen3": lambda: Qwen3RotaryEmbedding(tiny_qwen3_config()),
    "yarn": lambda: Qwen3RotaryEmbedding(tiny_qwen3_config(rope_parameters=YARN)),
    "llama3": lambda: LlamaRotaryEmbedding(tiny_llama_config(rope_parameters=LLAMA3)),
    "gemma4": lambda: Gemma4TextRotaryEmbedding(gemma4_config()),
}


def frequencies(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in module.named_buffers() if name.endswith("inv_freq")}


def make_draft() -> DSparkDraft:
    return build_draft_model(tiny_qwen3_config(), mask_token_id=96, num_draft_layers=2)


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bf16": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "there and back": lambda m: m.bfloat16().float(),
    "parent": lambda m: nn.ModuleDict({"m": m}).bfloat16()["m"],
}


def test_what_rounding_costs() -> None:
    """head_dim 128 and theta 1e6: the cosine is off by 0.58 after 512 tokens, by 2.0 after 4096."""
    config = tiny_qwen3_config(head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    exact = Qwen3RotaryEmbedding(config).inv_freq.double()
    for length, error in ((512, 0.58), (4096, 2.0)):
        positions = torch.arange(length, dtype=torch.float64).unsqueeze(-1)
        off = (torch.cos(positions * exact) - torch.cos(positions * exact.bfloat16().double())).abs().max()
        assert off.item() == pytest.approx(error, abs=0.01)


@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_draft_keeps_its_frequencies(cast: str) -> None:
    draft = CASTS[cast](make_draft())
    assert rope_errors(draft) == []
    assert draft.rotary_emb.inv_freq.dtype == torch.float32
    assert_close(draft.rotary_emb.inv_freq, 1e4 ** (-torch.arange(0, 16, 2) / 16), rtol=1e-6, atol=0)


@pytest.mark.parametrize("cast", ["bf16", "half"])
def test_a_cast_draft_is_cast_elsewhere(cast: str) -> None:
    draft = CASTS[cast](make_draft())
    assert {p.dtype for p in draft.parameters()} == {torch.bfloat16 if cast == "bf16" else torch.float16}


@pytest.mark.parametrize("cast", ["none", "bf16"])
def test_a_draft_from_the_meta_device_gets_its_frequencies(cast: str) -> None:
    with torch.device("meta"):
        draft = make_draft()
    draft = draft.to_empty(device="cpu") if cast == "none" else draft.bfloat16().to_empty(device="cpu")
    assert rope_errors(draft) == []
    assert_close(draft.rotary_emb.inv_freq, make_draft().rotary_emb.inv_freq, rtol=0, atol=0)


@pytest.mark.parametrize("name", ROTARIES)
def test_a_fresh_rotary_is_fine(name: str) -> None:
    rotary = ROTARIES[name]()
    assert len(frequencies(rotary)) >= 1
    assert rope_errors(rotary) == []


@pytest.mark.parametrize("cast", ["bf16", "half", "double", "there and back"])
@pytest.mark.parametrize("name", ROTARIES)
def test_a_cast_rotary_is_reported_and_repaired(name: str, cast: str) -> None:
    rotary, fresh = CASTS[cast](ROTARIES[name]()), ROTARIES[name]()
    errors = rope_errors(rotary)
    assert errors and all("\n" not in line for line in errors)
    repair_rope(rotary)
    assert rope_errors(rotary) == []
    for buffer, expected in frequencies(fresh).items():
        assert torch.equal(frequencies(rotary)[buffer], expected), buffer


@pytest.mark.parametrize("name", ROTARIES)
def test_garbage_behind_the_right_dtype_is_reported(name: str) -> None:
    with torch.device("meta"):
        rotary = ROTARIES[name]()
    rotary.to_empty(device="cpu")
    for buffer in frequencies(rotary).values():
        buffer.fill_(float("nan"))
    assert len(rope_errors(rotary)) >= 1
    repair_rope(rotary)
    assert rope_errors(rotary) == []


def test_each_of_several_tables_is_checked() -> None:
    for name in frequencies(ROTARIES["gemma4"]()):
        rotary = ROTARIES["gemma4"]()
        getattr(rotary, name)[1] *= 1.01
        (error,) = rope_errors(rotary)
        assert name in error and "off by 1.0e-02" in error


def test_error_lines_name_path_and_trouble() -> None:
    model = tiny_qwen3()
    model.model.rotary_emb.inv_freq[3] *= 1 + 1e-4
    (error,) = rope_errors(model)
    assert error.startswith("model.rotary_emb.inv_freq is off by 1.0e-04")
    error = rope_errors(model.bfloat16())[0]
    assert error.startswith("model.rotary_emb.inv_freq is bfloat16") and error.endswith("must be float32")


def test_the_unused_copy_is_checked_too() -> None:
    """transformers keeps `original_inv_freq`, from which some types restore the table."""
    rotary = ROTARIES["llama3"]()
    assert "original_inv_freq" in frequencies(rotary)
    rotary.original_inv_freq *= 2
    assert len(rope_errors(rotary)) == 1


def test_a_changed_theta_is_seen() -> None:
    rotary = Qwen3RotaryEmbedding(tiny_qwen3_config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    rotary.inv_freq.copy_(ROTARIES["qwen3"]().inv_freq)
    assert len(rope_errors(rotary)) == 1


@pytest.mark.parametrize("name", ROTARIES)
def test_pin_restores_a_cast_rotary(name: str) -> None:
    rotary = ROTARIES[name]().to(torch.bfloat16)
    pin_rope_inv_freq_fp32(rotary)
    for buffer, expected in frequencies(ROTARIES[name]()).items():
        assert torch.equal(frequencies(rotary)[buffer], expected), buffer


def test_pin_accepts_none() -> None:
    assert pin_rope_inv_freq_fp32(None) is None


def test_pin_leaves_fp32_alone() -> None:
    rotary = ROTARIES["qwen3"]()
    before = rotary.inv_freq
    before[0] = 5.0
    pin_rope_inv_freq_fp32(rotary)
    assert rotary.inv_freq is before and before[0] == 5.0


def test_pin_says_when_it_cannot_rebuild() -> None:
    rotary = nn.Module()
    rotary.register_buffer("inv_freq", torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"no \.config"):
        pin_rope_inv_freq_fp32(rotary)


def test_repaired_tables_stay_out_of_checkpoints() -> None:
    draft = make_draft().bfloat16()
    assert not [name for name in draft.state_dict() if "inv_freq" in name]
    assert "rotary_emb.inv_freq" in dict(draft.named_buffers())


@pytest.mark.parametrize("rope", [DYNAMIC, LLAMA3, YARN], ids=lambda rope: rope["rope_type"])
def test_moving_a_draft_between_forwards_changes_nothing(rope: dict[str, object]) -> None:
    """A dynamic rotary has grown its table for the long input; putting the short one back would be wrong."""
    config = tiny_qwen3_config(rope_parameters=rope, max_position_embeddings=32)
    draft = build_draft_model(config, mask_token_id=96, num_draft_layers=2)
    positions, like = torch.arange(128).unsqueeze(0), torch.zeros(1)
    before = draft.rotary_emb(like, positions)[0]
    after = draft.to("cpu").rotary_emb(like, positions)[0]
    assert_close(before, after, rtol=0, atol=1e-6)
