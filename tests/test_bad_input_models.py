"""Targets, drafts and checkpoints that a run cannot do with: the whole line that each ends with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bad_input_helpers import chat_rows, refusal, small_fit, write_files
from dspark_lightning import build_draft_model, export_draft
from dspark_lightning.embedded import embedded_path
from helpers import tiny_qwen3_config


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_files({"rows.jsonl": chat_rows()})
    return tmp_path


# Arguments of the model, the line, and whether the target's config has to be read before it is noticed.
ARGUMENTS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "block_size": ({"block_size": 0}, "block_size must be an integer of at least 1, got 0", False),
    "num_anchors": ({"num_anchors": 0}, "num_anchors must be an integer of at least 1, got 0", False),
    "num_draft_layers": ({"num_draft_layers": 0}, "num_draft_layers must be an integer of at least 1, got 0", False),
    "markov_rank": ({"markov_rank": -1}, "markov_rank must be an integer of at least 0, got -1", False),
    "markov_head_type": (
        {"markov_head_type": "7"},
        "markov_head_type must be one of vanilla, gated, rnn, got '7'",
        False,
    ),
    "mask_token_id": (
        {"mask_token_id": 4000},
        "mask_token_id 4000 lies outside the target's vocabulary, must be in 0..1023",
        True,
    ),
    "no target": (
        {"target": "./nowhere"},
        "tokenizer './nowhere': no such folder (unless one is given, it is that of the model's target)",
        False,
    ),
    "draft_init": (
        {"draft_init": "nowhere"},
        "'nowhere' is no folder with an exported draft: it has no config.json",
        True,
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_is_refused_in_one_line(case: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, line, opens_run = ARGUMENTS[case]
    args = small_fit(**{f"model__init_args__{name}": value for name, value in changes.items()})
    assert refusal(args, capsys, opens_run) == line


def target_files(**config: Any) -> dict[str, bytes]:
    """The embedded target in the folder `target`, with changes to its config.json."""
    files = {f"target/{path.name}": path.read_bytes() for path in embedded_path().iterdir()}
    changed = json.loads(files["target/config.json"]) | config
    return files | {"target/config.json": json.dumps(changed).encode()}


TARGETS: dict[str, tuple[Callable[[], dict[str, Any]], str, bool]] = {
    "a file": (
        lambda: {"target": "no folder"},
        "tokenizer './target': no such folder (unless one is given, it is that of the model's target)",
        False,
    ),
    "cut off": (
        lambda: target_files() | {"target/model.safetensors": b"\x00\x00"},
        "cannot read the target './target': Error while deserializing header: header too small",
        True,
    ),
    "config nested too deeply": (
        lambda: target_files() | {"target/config.json": "[" * 100_000},
        "tokenizer './target': maximum recursion depth exceeded while decoding a JSON array from a unicode string",
        False,
    ),
}


@pytest.mark.parametrize("case", TARGETS)
def test_a_target_is_refused_in_one_line(case: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, line, opens_run = TARGETS[case]
    write_files(files())
    assert refusal(small_fit(model__init_args__target="./target"), capsys, opens_run) == line


def test_a_draft_of_another_kind_is_no_start(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_draft(build_draft_model(tiny_qwen3_config(), mask_token_id=96, num_draft_layers=2), "other-dspark")
    line = refusal(small_fit(model__init_args__draft_init="other-dspark"), capsys, opens_run=True)
    assert line == (
        "draft_init 'other-dspark' has target_layer_ids [1, 3], this draft has [3]: start from a draft of the same kind"
    )


# A checkpoint's bytes, and the line.
CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "cannot read the checkpoint 'a.ckpt': No such file or directory"),
    "empty": (lambda path: path.write_bytes(b""), "'a.ckpt' is not a checkpoint file, or is damaged (RuntimeError)"),
    "junk": (
        lambda path: path.write_bytes(b"junk"),
        "'a.ckpt' is not a checkpoint file, or is damaged (RuntimeError)",
    ),
    "cut off": (
        lambda path: path.write_bytes(b"PK\x03\x04 cut off"),
        "'a.ckpt' is not a checkpoint file, or is damaged (RuntimeError)",
    ),
    "of another program": (
        lambda path: torch.save({"state_dict": {"weight": torch.zeros(2)}}, path),
        "the checkpoint 'a.ckpt' was not written by a DSparkModule",
    ),
    "an empty folder": (
        lambda path: path.mkdir(),
        "'a.ckpt' is no complete sharded checkpoint: .metadata is missing",
    ),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
@pytest.mark.parametrize("command", ["fit", "validate", "export"])
def test_a_checkpoint_is_refused_in_one_line(
    case: str, command: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, line = CHECKPOINTS[case]
    make(Path("a.ckpt"))
    args = ["export", "--output=my-dspark"] if command == "export" else [command, *small_fit()[1:]]
    assert refusal([*args, "--ckpt_path=a.ckpt"], capsys) == line
