"""Which draft serves which target, and what its config takes over."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
)

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.config import DraftArgs
from dspark_lightning.drafts.qwen3 import Qwen3DSparkModel, build_qwen3_draft_config
from dspark_lightning.drafts.registry import (
    DSPARK_DRAFT_REGISTRY,
    DraftSpec,
    build_draft_config,
    build_draft_model,
    resolve_draft_class,
    resolve_dspark_draft_spec,
)
from helpers import TINY, seeded, tiny_llama_config, tiny_qwen3_config

ARGS = {"mask_token_id": 96, "num_draft_layers": 2, "block_size": 4, "num_anchors": 3, "markov_rank": 8}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
MROPE_INTERLEAVED = {**MROPE, "mrope_interleaved": True}
MROPE_OF_OLD = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "rope_theta": 1e6}
TARGET_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**TINY),
    "mistral": lambda: MistralConfig(**TINY, sliding_window=8),
    "qwen2": lambda: Qwen2Config(**TINY),
    "qwen3": lambda: Qwen3Config(**TINY, head_dim=16),
    "qwen3_moe": lambda: Qwen3MoeConfig(**TINY, num_experts=4, moe_intermediate_size=16),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(text_config={**TINY, "rope_parameters": MROPE}),
    "qwen3_vl": lambda: Qwen3VLConfig(text_config={**TINY, "head_dim": 16, "rope_parameters": MROPE_INTERLEAVED}),
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}


def make_draft(config: PretrainedConfig | None = None, **changes: Any) -> DSparkDraft:
    with seeded(0):
        return build_draft_model(config or tiny_qwen3_config(), **{**ARGS, **changes})


def logits_of(draft: DSparkDraft) -> Tensor:
    """Logits for two random rows of features."""
    with seeded(0):
        ids, features = torch.randint(0, 96, (2, 16)), torch.randn(2, 16, 64)
    return draft(ids, features, torch.ones_like(ids)).draft_logits


@pytest.mark.parametrize("family", TARGET_CONFIGS)
def test_every_served_family(family: str) -> None:
    config = TARGET_CONFIGS[family]()
    assert config.architectures is None and config.model_type == family
    draft = make_draft(config)
    assert type(draft) is Qwen3DSparkModel
    assert draft.config.model_type == "qwen3" and draft.config.architectures == ["Qwen3DSparkModel"]
    assert (draft.config.vocab_size, draft.config.hidden_size, draft.config.num_key_value_heads) == (97, 32, 2)
    logits = logits_of(draft)
    assert logits.shape == (2, 3, 4, 97) and logits.isfinite().all()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_dispatch_by_architecture(family: str) -> None:
    spec = resolve_dspark_draft_spec([ARCHITECTURES[family]])
    assert spec.model_class is Qwen3DSparkModel
    assert spec is resolve_dspark_draft_spec([family])


def test_an_unknown_architecture_of_a_known_type_is_served() -> None:
    assert type(make_draft(tiny_qwen3_config(architectures=["MyQwen"]))) is Qwen3DSparkModel


@pytest.mark.parametrize("build", [build_draft_config, lambda config, args: build_draft_model(config, **args)])
def test_an_unknown_target_lists_the_known_ones(build: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="gpt2") as error:
        build(GPT2Config(), ARGS)
    assert all(name in str(error.value) for name in ARCHITECTURES) and "\n" not in str(error.value)


@pytest.mark.parametrize("architectures", [None, [], ["Foo"]])
def test_nothing_known_is_refused(architectures: list[str] | None) -> None:
    with pytest.raises(ValueError, match="qwen3_moe"):
        resolve_dspark_draft_spec(architectures)
    with pytest.raises(ValueError, match="Qwen3DSparkModel"):
        resolve_draft_class(architectures)


class MadeUpDraft(Qwen3DSparkModel):
    """A family from outside, as a user would write it."""


class MadeUpConfig(PretrainedConfig):
    model_type = "made_up"


def made_up_spec() -> DraftSpec:
    def build(config: PretrainedConfig, args: object) -> Qwen3Config:
        del config
        return build_qwen3_draft_config(tiny_qwen3_config(num_hidden_layers=9), args)

    return DraftSpec(MadeUpDraft, build, architectures=("MadeUpForCausalLM",), model_types=("made_up",))


@pytest.mark.parametrize(
    "config",
    [
        MadeUpConfig(),
        MadeUpConfig(architectures=["MadeUpForCausalLM"]),
        tiny_qwen3_config(architectures=["MadeUpForCausalLM"]),  # the architecture decides before the model type
    ],
)
def test_a_family_registered_from_outside(config: PretrainedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = made_up_spec()
    for name in (*spec.architectures, *spec.model_types):
        monkeypatch.setitem(DSPARK_DRAFT_REGISTRY, name, spec)
    assert type(build_draft_model(config, **ARGS)) is MadeUpDraft
    assert build_draft_config(config, ARGS).num_target_layers == 9
    assert resolve_draft_class(["MadeUpDraft"]) is MadeUpDraft
    assert type(make_draft()) is Qwen3DSparkModel


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [
        (tiny_qwen3_config(head_dim=16), 16),
        (Qwen3MoeConfig(**TINY), 8),
        (Qwen3MoeConfig(**TINY, head_dim=16), 16),
        (LlamaConfig(**TINY), 8),
        (LlamaConfig(**TINY, head_dim=24), 24),
        (Qwen2Config(**TINY), 8),
        (MistralConfig(**TINY), 8),
        (Qwen2_5_VLConfig(text_config=TINY), 8),
    ],
)
def test_head_dim_is_the_targets_else_h_over_heads(config: PretrainedConfig, head_dim: int) -> None:
    draft = make_draft(config)
    assert draft.config.head_dim == head_dim
    assert draft.layers[0].self_attn.q_proj.weight.shape == (4 * head_dim, 32)


def test_heads_that_do_not_divide_the_hidden_size() -> None:
    draft = make_draft(tiny_qwen3_config(num_attention_heads=6, num_key_value_heads=3, head_dim=10))
    assert draft.layers[0].self_attn.k_proj.weight.shape == (30, 32)
    assert logits_of(draft).isfinite().all()


def test_key_value_heads_default_to_all_heads() -> None:
    config = LlamaConfig(**{**TINY, "num_key_value_heads": None})
    assert make_draft(config).config.num_key_value_heads == 4


@pytest.mark.parametrize(("pad", "kept"), [(None, None), (0, 0), (96, 96), (97, None), (5000, None), (-1, None)])
def test_a_pad_id_outside_the_vocabulary_is_ignored(pad: int | None, kept: int | None) -> None:
    draft = make_draft(Qwen2Config(**{**TINY, "pad_token_id": pad}))
    assert draft.config.pad_token_id == kept


@pytest.mark.parametrize(
    "config",
    [
        Qwen2_5_VLConfig(text_config={**TINY, "rope_parameters": MROPE}),
        Qwen2_5_VLConfig(text_config={**TINY, **MROPE_OF_OLD}),
        Qwen3VLConfig(text_config={**TINY, "head_dim": 16, "rope_parameters": MROPE_INTERLEAVED}),
    ],
)
def test_nothing_of_multi_axis_rope_is_left(config: PretrainedConfig) -> None:
    draft_config = make_draft(config).config
    assert draft_config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert "mrope" not in str(draft_config.to_dict())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_is_taken_over(rope: dict[str, Any]) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = tiny_llama_config(rope_parameters=rope)
    rotary, own = make_draft(config).rotary_emb, LlamaRotaryEmbedding(config)
    assert torch.equal(rotary.inv_freq, own.inv_freq)
    assert rotary.attention_scaling == own.attention_scaling


def test_the_older_rope_fields_are_taken_over() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    draft = make_draft(LlamaConfig(**TINY, rope_theta=5e5, rope_scaling=scaling))
    assert draft.config.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}


@pytest.mark.parametrize("eos", [2, [2, 5]])
def test_backbone_fields_are_the_targets(eos: int | list[int]) -> None:
    changes = {"rms_norm_eps": 1e-4, "attention_bias": True, "hidden_act": "gelu", "eos_token_id": eos}
    draft = make_draft(tiny_llama_config(**changes))
    assert {name: getattr(draft.config, name) for name in changes} == changes
    assert draft.layers[0].self_attn.q_proj.bias is not None
    assert draft.norm.variance_epsilon == 1e-4


def test_the_draft_never_slides_its_window() -> None:
    config = make_draft(TARGET_CONFIGS["mistral"]()).config
    assert config.sliding_window is None and config.layer_types == ["full_attention"] * 2


def test_default_arguments() -> None:
    args = DraftArgs.of({"mask_token_id": 3})
    assert (args.num_draft_layers, args.block_size, args.num_anchors, args.markov_rank) == (5, 7, 512, 256)
    assert (args.markov_head_type, args.confidence_head_with_markov) == ("vanilla", True)
    assert (args.confidence_head_alpha, args.target_layer_ids) == (1.0, None)


def test_the_default_layers_are_the_published_spread() -> None:
    config = build_draft_config(tiny_qwen3_config(num_hidden_layers=36), {"mask_token_id": 3})
    assert config.target_layer_ids == [1, 9, 17, 25, 33]
    assert config.num_target_layers == 36 and config.num_hidden_layers == 5


def test_arguments_come_from_attributes_too() -> None:
    from_mapping = build_draft_config(tiny_qwen3_config(), ARGS)
    from_attributes = build_draft_config(tiny_qwen3_config(), SimpleNamespace(**ARGS, something_else=1))
    assert from_attributes.to_dict() == from_mapping.to_dict()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"mask_token_id": None}, "mask_token_id is not set"),
        ({"mask_token_id": 97}, r"mask_token_id 97 .*0\.\.96"),
        ({"mask_token_id": -1}, r"mask_token_id -1 .*0\.\.96"),
        ({"mask_token_id": "5"}, "mask_token_id .*'5'"),
        ({"block_size": 0}, "block_size .*got 0"),
        ({"block_size": 2.5}, r"block_size .*got 2\.5"),
        ({"num_draft_layers": 0}, "num_draft_layers .*got 0"),
        ({"num_anchors": 0}, "num_anchors .*got 0"),
        ({"markov_rank": -1}, "markov_rank .*got -1"),
        ({"markov_head_type": "lstm"}, "vanilla, gated, rnn, got 'lstm'"),
        ({"confidence_head_alpha": -0.5}, r"confidence_head_alpha .*got -0\.5"),
        ({"target_layer_ids": []}, "target_layer_ids is empty"),
        ({"target_layer_ids": [2, 1]}, "strictly increasing"),
        ({"target_layer_ids": [6]}, r"\[6\] must lie in -1\.\.5"),
        ({"target_layer_ids": [0.5]}, r"\[0\.5\]"),
        (
            {"num_draft_layers": 6},
            "num_draft_layers 6 asks for as many feature layers, but the target has only 6 layers",
        ),
        ({"mask_token": 3}, "unknown draft argument 'mask_token'.*mask_token_id"),
    ],
)
def test_wrong_arguments_are_explained(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        make_draft(**changes)
    assert "\n" not in str(error.value)


def test_the_mask_token_has_no_default() -> None:
    with pytest.raises(ValueError, match="mask_token_id is not set"):
        build_draft_model(tiny_qwen3_config(), num_draft_layers=2)


@pytest.mark.parametrize("mask_token_id", [0, 96])
def test_the_whole_vocabulary_can_be_the_mask(mask_token_id: int) -> None:
    assert make_draft(mask_token_id=mask_token_id).mask_token_id == mask_token_id


def test_more_draft_layers_than_features() -> None:
    draft = make_draft(num_draft_layers=8, target_layer_ids=[1, 4])
    assert len(draft.layers) == 8 and draft.fc.weight.shape == (32, 64)


def test_config_round_trips(tmp_path: Path) -> None:
    config = make_draft(markov_head_type="gated", target_layer_ids=[-1, 5]).config
    assert Qwen3Config.from_dict(config.to_dict()).to_dict() == config.to_dict()
    config.save_pretrained(tmp_path)
    for loaded in (Qwen3Config.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert {**loaded.to_dict(), "_name_or_path": ""} == config.to_dict()
        assert Qwen3DSparkModel(loaded).state_dict().keys() == make_draft(markov_head_type="gated").state_dict().keys()
