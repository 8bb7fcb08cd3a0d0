"""Targets of every family: capture against their own hidden states, padding, packing, saving and loading."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from dspark_lightning.loading import load_target, load_target_config
from dspark_lightning.target import DSparkTargetBatch, HFDSparkTargetModel, check_packing, find_decoder
from helpers import TINY, assert_same, seeded, tiny_qwen3, tiny_qwen3_config
from tiny_target import TINY_TARGETS, build_tiny_target

EVERY_KIND = [-1, 0, 2, 3]  # the embedding, the first, an inner and the last layer
S = 40
SPANS_DOCUMENTS = "whose compressor windows span documents"
ANCHORED = "whose blocks are anchored to positions in the row"
RUNS_ON = "whose recurrent state runs on through documents"
UNPACKABLE = {
    "deepseek_v4": ("deepseek_v4", "heavily_compressed_attention", SPANS_DOCUMENTS),
    "minimax_m3_vl": ("minimax_m3_vl", "minimax_m3_sparse", ANCHORED),
    "minimax_m3_text": ("minimax_m3_vl_text", "minimax_m3_sparse", ANCHORED),
    "kimi_linear": ("kimi_linear", "linear_attention", RUNS_ON),
}
VISION = {"hidden_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 32}


def tiny_qwen2_5_vl() -> PreTrainedModel:
    text = TINY | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=VISION))


def tiny_qwen3_vl() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    text = TINY | {"head_dim": 8, "rope_parameters": rope}
    vision = VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision))


THREE_AXES = {"qwen2_5_vl": tiny_qwen2_5_vl, "qwen3_vl": tiny_qwen3_vl}


def captured(model: PreTrainedModel) -> HFDSparkTargetModel:
    """The target with a final norm that would show in a feature taken before it."""
    with seeded(1):
        nn.init.uniform_(find_decoder(model).norm.weight, 0.5, 2.0)
    return HFDSparkTargetModel(model, EVERY_KIND)


@pytest.fixture(scope="module", params=TINY_TARGETS)
def target(request: pytest.FixtureRequest) -> HFDSparkTargetModel:
    return captured(build_tiny_target(request.param))


@pytest.fixture(scope="module", params=[*(name for name in TINY_TARGETS if name not in UNPACKABLE), *THREE_AXES])
def packable(request: pytest.FixtureRequest) -> HFDSparkTargetModel:
    if request.param in TINY_TARGETS:
        return captured(build_tiny_target(request.param))
    with seeded(0):
        return captured(THREE_AXES[request.param]())


def token_ids(rows: int = 2, length: int = S) -> Tensor:
    return torch.randint(2, 90, (rows, length), generator=torch.Generator().manual_seed(0))


def capture(target: HFDSparkTargetModel, input_ids: Tensor, mask: Tensor | None = None) -> DSparkTargetBatch:
    return target.generate_batch(input_ids, mask, torch.ones_like(input_ids))


@torch.no_grad()
def test_features_are_the_models_own_hidden_states(target: HFDSparkTargetModel) -> None:
    output = target.model(input_ids=token_ids(), output_hidden_states=True)
    hidden = [h.mean(dim=2) if h.dim() == 4 else h for h in output.hidden_states]
    batch = capture(target, token_ids(), torch.ones(2, S, dtype=torch.int64))
    features = batch.target_hidden_states.split(64, dim=-1)
    assert len(features) == 4 and len(hidden) == 5
    for feature, layer_id in zip(features, EVERY_KIND, strict=True):
        assert_close(feature, hidden[layer_id + 1], rtol=0, atol=1e-6)
    assert_close(batch.target_last_hidden_states, hidden[-1], rtol=0, atol=1e-6)


def test_hyper_connections_give_streams() -> None:
    """Else the mean over them, above, would be tested on nothing."""
    model = build_tiny_target("deepseek_v4")
    hidden = model(input_ids=token_ids(), output_hidden_states=True).hidden_states
    assert [tuple(h.shape) for h in hidden] == [(2, S, 4, 64)] * 4 + [(2, S, 64)]
    assert not torch.equal(hidden[2][:, :, 0], hidden[2][:, :, 1])


@torch.no_grad()
def test_the_head_on_the_last_states_gives_the_targets_logits(target: HFDSparkTargetModel) -> None:
    logits = target.lm_head(capture(target, token_ids()).target_last_hidden_states)
    cap = getattr(target.model.config.get_text_config(), "final_logit_softcapping", None)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    assert_same(logits, target.model(input_ids=token_ids()).logits)


@pytest.mark.parametrize("with_mask", [True, False])
def test_right_padding_is_exact(target: HFDSparkTargetModel, with_mask: bool) -> None:
    ids, length = token_ids(), S - 7
    mask = (torch.arange(S) < length).long().expand(2, -1)
    padded = capture(target, ids * mask, mask if with_mask else None)
    plain = capture(target, ids[:, :length])
    assert_same(padded.target_hidden_states[:, :length], plain.target_hidden_states)
    assert_same(padded.target_last_hidden_states[:, :length], plain.target_last_hidden_states)
    assert padded.target_hidden_states.isfinite().all()


@pytest.mark.parametrize("splits", [[(18, 22)], [(17, 23), (21, 12)]])  # documents longer than Gemma's window of 16
def test_packed_documents_equal_each_alone(packable: HFDSparkTargetModel, splits: list[tuple[int, int]]) -> None:
    ids = token_ids(rows=len(splits))
    positions = torch.zeros_like(ids)
    for row, lengths in zip(positions, splits, strict=True):
        row[: sum(lengths)] = torch.cat([torch.arange(n) for n in lengths])
    packed = packable.generate_batch(ids, torch.ones_like(ids), ids, positions, torch.tensor(splits))
    leaking = capture(packable, ids)
    for row, (first, second) in enumerate(splits):
        for start, length in ((0, first), (first, second)):
            alone = capture(packable, ids[row : row + 1, start : start + length])
            here = slice(row, row + 1), slice(start, start + length)
            assert_same(packed.target_hidden_states[here], alone.target_hidden_states)
            assert_same(packed.target_last_hidden_states[here], alone.target_last_hidden_states)
        second_alone = packed.target_hidden_states[row, first : first + second]
        assert (second_alone - leaking.target_hidden_states[row, first : first + second]).abs().max() > 1e-2
    assert packed.position_ids is positions


@pytest.mark.parametrize("family", UNPACKABLE)
def test_packing_is_refused_where_documents_would_mix(family: str) -> None:
    model_type, kind, reason = UNPACKABLE[family]
    message = (
        f"rows cannot be packed for a '{model_type}' target: it has '{kind}' layers, {reason}; train on unpacked rows"
    )
    target, ids = HFDSparkTargetModel(build_tiny_target(family), [1]), token_ids()
    positions = torch.arange(20).repeat(2).expand(2, -1)
    for refused in (
        lambda: check_packing(target.model.config),
        lambda: target.generate_batch(ids, None, ids, positions, torch.tensor([[20, 20]] * 2)),
    ):
        with pytest.raises(ValueError) as error:
            refused()
        assert str(error.value) == message


def test_packing_is_refused_for_layers_nobody_knows() -> None:
    config = PretrainedConfig()
    check_packing(config)
    config.layer_types = ["full_attention", "sliding_attention", "indexed_attention"]
    check_packing(config)
    config.layer_types = ["full_attention", "mamba"]
    with pytest.raises(ValueError, match=r"it has 'mamba' layers, which are not known to keep documents apart; train"):
        check_packing(config)


def test_flash_attention_packs_a_single_row_only() -> None:
    target, ids = HFDSparkTargetModel(tiny_qwen3(), [1]), token_ids()
    target.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError) as error:
        target.generate_batch(ids, None, ids, torch.arange(20).repeat(2).expand(2, -1), torch.tensor([[20, 20]] * 2))
    assert str(error.value) == (
        "a batch of 2 packed rows cannot be run with attn_implementation 'flash_attention_2', "
        "which tells documents apart in a batch of 1 only: set batch_size to 1, or use 'sdpa'"
    )


@pytest.mark.parametrize("family", [*TINY_TARGETS, *THREE_AXES])
def test_saving_and_loading_changes_nothing(family: str, tmp_path: Path) -> None:
    model = build_tiny_target(family) if family in TINY_TARGETS else THREE_AXES[family]().eval()
    model.save_pretrained(tmp_path)
    loaded = load_target(str(tmp_path))
    assert type(loaded) is type(model)
    saved, again = model.state_dict(), loaded.state_dict()
    assert saved.keys() == again.keys() and all(torch.equal(saved[name], again[name]) for name in saved)
    both = [capture(HFDSparkTargetModel(x, EVERY_KIND), token_ids()) for x in (model, loaded)]
    assert torch.equal(both[0].target_hidden_states, both[1].target_hidden_states)
    assert HFDSparkTargetModel(model, [1]).fingerprint() == HFDSparkTargetModel(loaded, [1]).fingerprint()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_implementation_is_passed_on(attention: str) -> None:
    assert load_target("embedded", attn_implementation=attention).config._attn_implementation == attention


def test_an_unknown_attention_implementation_is_named() -> None:
    with pytest.raises(ValueError, match=r"target 'embedded' \(attn_implementation 'fast'\): .*=sdpa") as error:
        load_target("embedded", attn_implementation="fast")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified", "minimax_m3_vl", "kimi_k25"])
def test_the_text_stack_beside_a_tower_is_found(family: str) -> None:
    model = build_tiny_target(family)
    assert find_decoder(model) is model.model.language_model


class Wrapped(PreTrainedModel):
    """A causal LM inside a class of its own, as code that comes with a model often has it."""

    config_class = Qwen3Config

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.language_model = Qwen3ForCausalLM(config)
        self.seen: list[Any] = []
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()

    def forward(self, pixel_values: Tensor | None = None, **inputs: Any) -> Any:
        self.seen.append(pixel_values)
        return self.language_model(**inputs)


def test_a_causal_lm_inside_another_model() -> None:
    with seeded(0):
        outer = Wrapped(tiny_qwen3_config()).eval()
    assert find_decoder(outer) is outer.language_model.model
    expected = capture(HFDSparkTargetModel(outer.language_model, EVERY_KIND), token_ids())
    target = HFDSparkTargetModel(outer, EVERY_KIND)
    logits: list[Tensor] = []
    outer.language_model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output))
    text = capture(target, token_ids())
    assert not logits and not outer.seen
    pixels = torch.zeros(1)
    media = target.generate_batch(token_ids(), None, token_ids(), pixel_values=pixels)
    assert torch.equal(outer.seen[0], pixels)
    for batch in (text, media):
        assert torch.equal(batch.target_hidden_states, expected.target_hidden_states)
        assert torch.equal(batch.target_last_hidden_states, expected.target_last_hidden_states)


REMOTE_CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM

class RemoteConfig(Qwen3Config):
    model_type = "remote"

class RemoteModel(Qwen3ForCausalLM):
    config_class = RemoteConfig
"""


@pytest.mark.parametrize("auto_class", ["AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel"])
def test_code_that_comes_with_the_target_names_its_class(
    auto_class: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"remote_{auto_class}"
    tiny_qwen3().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "remote.RemoteConfig", auto_class: "remote.RemoteModel"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "remote", "auto_map": auto_map}))
    (folder / "remote.py").write_text(REMOTE_CODE)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    loaded = load_target(str(folder), trust_remote_code=True)
    assert type(loaded).__name__ == "RemoteModel"
    assert torch.equal(loaded.lm_head.weight, tiny_qwen3().lm_head.weight)
    with pytest.raises(ValueError, match=r"comes with it: read that code, then set trust_remote_code to true$"):
        load_target(str(folder))


def test_a_kimi_k3_config_survives_saving(tmp_path: Path) -> None:
    build_tiny_target("kimi_linear").save_pretrained(tmp_path)
    config = load_target_config(str(tmp_path))
    assert config.model_type == "kimi_linear" and config.mla_use_nope is True and config.mla_use_output_gate is True
    assert (config.activation_situ_beta, config.activation_situ_linear_beta) == (4.0, 25.0)
    assert config.q_lora_rank is None


@pytest.mark.parametrize("family", TINY_TARGETS)
def test_a_bf16_target_runs_as_it_is_served(family: str, tmp_path: Path) -> None:
    """Mixed precision wraps the step in autocast, which would also round what such a target computes in fp32."""
    build_tiny_target(family).save_pretrained(tmp_path)
    target = HFDSparkTargetModel(load_target(str(tmp_path), dtype=torch.bfloat16), EVERY_KIND)
    plain = capture(target, token_ids())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = capture(target, token_ids())
    assert plain.target_hidden_states.dtype == torch.bfloat16
    assert torch.equal(mixed.target_hidden_states, plain.target_hidden_states)
    assert torch.equal(mixed.target_last_hidden_states, plain.target_last_hidden_states)


def test_an_fp32_target_follows_autocast() -> None:
    target = captured(build_tiny_target("qwen3"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = capture(target, token_ids())
    assert not torch.equal(mixed.target_hidden_states, capture(target, token_ids()).target_hidden_states)
