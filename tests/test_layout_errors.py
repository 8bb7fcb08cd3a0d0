"""Folders that cannot be used: one line each, with what was found and where."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspark_lightning import build_draft_model, load_pretrained_draft
from dspark_lightning.pretrained import load_draft_weights
from helpers import tiny_qwen3_config
from layout_helpers import (
    ARGS,
    BACKBONE,
    DEEPSPEC,
    DFLASH,
    DSPARK,
    SPECULATORS,
    WITH_HEADS,
    backbone_tensors,
    same_draft,
    tensors,
    write_dflash,
    write_folder,
    write_sharded,
)

INDEX = "model.safetensors.index.json"


def assert_one_line(action: Callable[[], object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        action()
    assert "\n" not in str(error.value)


def assert_refused(folder: Path, complaint: str) -> None:
    """Neither loaded nor started from, for the same reason."""
    assert_one_line(lambda: load_pretrained_draft(folder), complaint)
    assert_one_line(lambda: load_draft_weights(same_draft(), folder), complaint)


def nested(**changes: Any) -> dict[str, Any]:
    return SPECULATORS | {"transformer_layer_config": BACKBONE | changes}


CONFIGS: dict[str, tuple[object, str]] = {
    "no object": ([1], r"config\.json' must hold an object of fields, got a list"),
    "empty": ({}, r"config\.json' is of no known layout, it has no architectures: known are speculators .*Qwen3DSpark"),
    "a target": (
        {"architectures": ["Qwen3ForCausalLM"]},
        r"no known layout, it has architectures \['Qwen3ForCausalLM'\]",
    ),
    "odd architectures": ({"architectures": 3}, "no known layout, it has architectures 3"),
    "odd names": ({"architectures": [{}, "Qwen3DSparkModel"]}, r"no known layout, it has architectures \[\{\}, 'Q"),
    "windowed": (DEEPSPEC | {"layer_types": ["sliding_attention"] * 2}, "has layer_types with 'sliding_attention'"),
    "other feature": (DSPARK | {"sample_from_anchor": False}, r"config\.json' has sample_from_anchor False"),
    "field missing": ({k: v for k, v in DEEPSPEC.items() if k != "block_size"}, r"config\.json' has no block_size"),
    "field of another kind": (DEEPSPEC | {"block_size": "4"}, "has block_size '4', must be a whole number"),
    "ids of another kind": (
        DEEPSPEC | {"target_layer_ids": [1, 2.5]},
        r"has target_layer_ids\[1\] 2\.5, must be a whole",
    ),
    "another algorithm": (
        {"speculators_model_type": "eagle3"},
        "speculators_model_type 'eagle3': only 'ds",
    ),
    "another backbone": (nested(model_type="llama"), "transformer_layer_config.model_type 'llama', must be 'qwen3'"),
    "no backbone": (SPECULATORS | {"transformer_layer_config": 3}, "has transformer_layer_config 3, must be an object"),
    "another width": (SPECULATORS | {"target_hidden_size": 48}, "hidden_size 32, must be 48"),
    "pruned": (SPECULATORS | {"draft_vocab_size": 64}, "has draft_vocab_size 64 of 97: .* pruned vocabulary cannot be"),
    "no ids": ({k: v for k, v in SPECULATORS.items() if k[:4] != "aux_"}, "has no aux_hidden_state_layer_ids"),
    "dflash of another kind": (DFLASH | {"model_type": "llama"}, "has model_type 'llama': of DFlash checkpoints only"),
    "dflash without ids": (DFLASH | {"dflash_config": {}}, "has no block_size"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(case: str, tmp_path: Path) -> None:
    config, complaint = CONFIGS[case]
    folder = write_folder(tmp_path / "draft", config)
    assert_refused(folder, complaint)
    assert_refused(folder, re.escape(str(folder)))


def test_maps_of_a_pruned_vocabulary(tmp_path: Path) -> None:
    for name, values in (("t2d", torch.arange(97) != 3), ("d2t", torch.arange(97))):
        folder = write_folder(tmp_path / name, SPECULATORS, tensors() | {name: values})
        assert_refused(folder, r"model\.safetensors' has t2d and d2t of a pruned vocabulary: .* cannot be loaded")


FUZZED = {"dspark": DSPARK, "speculators": SPECULATORS, "backbone": BACKBONE, "dflash": DFLASH}


@pytest.mark.parametrize("part", FUZZED)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_any_value_in_any_field_is_refused_in_one_line_or_taken(part: str, tmp_path: Path) -> None:
    """Nothing but a ValueError leaves the loader, whatever a config holds."""
    write_folder(tmp_path, {}, backbone_tensors() if part == "dflash" else tensors())
    refused = 0
    for name in FUZZED[part]:
        for value in (None, 0, -3, 2.5, "ab", [{}], {"a": 1}):
            config = nested(**{name: value}) if part == "backbone" else FUZZED[part] | {name: value}
            (tmp_path / "config.json").write_text(json.dumps(config))
            try:
                load_pretrained_draft(tmp_path)
            except ValueError as error:
                assert "\n" not in str(error)
                refused += 1
    assert refused > 3 * len(FUZZED[part])


@pytest.mark.parametrize("layout", ["deepspec", "speculators"])
@pytest.mark.parametrize("name", ["fc.weight", "markov_head.markov_w1.weight", "confidence_head.proj.bias"])
def test_missing_tensors(name: str, layout: str, tmp_path: Path) -> None:
    config = DEEPSPEC if layout == "deepspec" else SPECULATORS
    weights = {key: tensor for key, tensor in tensors().items() if key != name}
    assert_refused(write_folder(tmp_path / "draft", config, weights), f"'{name}' has shape None in .*, the draft needs")


def test_tensors_of_heads_that_dflash_has_not(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "draft", DFLASH, tensors())
    assert_refused(folder, r"model\.safetensors' has '(markov|confidence)_head\..*': a DFlash draft has no such head")


def test_values_that_cannot_be_trained_from(tmp_path: Path) -> None:
    broken = tensors()["fc.weight"].index_fill(0, torch.tensor(3), torch.nan)
    assert_refused(write_folder(tmp_path / "a", DEEPSPEC, tensors() | {"fc.weight": broken}), "'fc.weight' .* NaN")
    quantised = tensors()["fc.weight"].to(torch.int8)
    assert_refused(
        write_folder(tmp_path / "b", DEEPSPEC, tensors() | {"fc.weight": quantised}), "'fc.weight' .* is int8"
    )


@pytest.mark.parametrize("file", ["pytorch_model.bin", "draft.pt"])
def test_pickled_weights_are_never_read(file: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "draft", DEEPSPEC)
    (folder / "model.safetensors").unlink()
    torch.save(tensors(), folder / file)
    assert_refused(folder, f"has '{file}' and no model.safetensors: pickled weights can run code and are never read")


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("place", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.bin", "..", ""])
def test_an_index_that_points_elsewhere(place: str, tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "draft", DEEPSPEC)
    save_file(tensors(), tmp_path / "x.safetensors")  # it would be there
    edit_index(folder, lambda index: index["weight_map"].update({"fc.weight": place}))
    assert_refused(
        folder, rf"index\.json' says that 'fc\.weight' is in '{re.escape(place)}', must be a \.safetensors file"
    )


def test_other_faults_of_shards(tmp_path: Path) -> None:
    def folder(name: str) -> Path:
        return write_sharded(tmp_path / name, DEEPSPEC)

    second = "model-00002-of-00002.safetensors"
    torn = folder("torn")
    (torn / second).write_bytes((torn / second).read_bytes()[:-3])
    assert_refused(torn, rf"cannot read '.*{second}', which model\.safetensors\.index\.json names")
    gone = folder("gone")
    (gone / second).unlink()
    assert_refused(gone, rf"cannot read '.*{second}', which .* names: ")
    wrong = folder("wrong")
    edit_index(wrong, lambda index: index["weight_map"].update({"fc.weights": second}))
    assert_refused(wrong, rf"cannot read '.*{second}', which .* names: .*fc\.weights")
    short = folder("short")
    edit_index(short, lambda index: index["weight_map"].pop("fc.weight"))
    assert_refused(short, r"'fc\.weight' has shape None in")
    for name, content in (
        ("list", "[]"),
        ("torn json", "{"),
        ("no map", "{}"),
        ("odd map", '{"weight_map": {"a": 3}}'),
    ):
        (folder(name) / INDEX).write_text(content)
        assert_refused(tmp_path / name, r"model\.safetensors\.index\.json'")


@pytest.mark.parametrize("layout", WITH_HEADS)
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"target_layer_ids": [2, 4]}, r"has target_layer_ids \[1, 3\], this draft has \[2, 4\]"),
        ({"num_draft_layers": 1}, "has num_hidden_layers 2, this draft has 1"),
        ({"markov_rank": 4}, "has markov_rank 8, this draft has 4"),
        ({"markov_rank": 0}, "has markov_rank 8, this draft has 0"),
        ({"confidence_head_alpha": 0.0}, "has enable_confidence_head True, this draft has False"),
    ],
)
def test_a_draft_of_another_kind(layout: str, changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    folder = WITH_HEADS[layout](tmp_path / "draft")
    draft = build_draft_model(tiny_qwen3_config(), **{**ARGS, **changes})
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    assert_one_line(lambda: load_draft_weights(draft, folder), complaint)
    assert all(tensor.equal(before[name]) for name, tensor in draft.state_dict().items())


def test_a_draft_for_another_vocabulary(tmp_path: Path) -> None:
    """Of a DFlash folder's weights, embedding and head alone would tell, and those are the target's."""
    weights = backbone_tensors()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:90].clone()
    folder = write_folder(tmp_path / "draft", DFLASH | {"vocab_size": 90}, weights)
    assert_one_line(lambda: load_draft_weights(same_draft(), folder), "has vocab_size 90, this draft has 97")
    assert_one_line(lambda: load_draft_weights(same_draft(), write_dflash(tmp_path / "b") / "x"), "no folder with an")
