"""`dspark check`: every break of a folder is named by its check, in one line, and a sound folder passes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from check_helpers import check, copy_draft, read_tensor, run_check, set_fields, set_tensors
from dspark_lightning.cli import main
from dspark_lightning.embedded import embedded_path
from dspark_lightning.export import export_draft
from dspark_lightning.serving import target_checks
from dspark_lightning.serving.record import ExportRecord
from evaluation_helpers import embedded_pair

BF16 = torch.bfloat16
Break = Callable[[Path], object]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained draft, with no word of its target."""
    draft = embedded_pair(num_draft_layers=2)[1]
    return export_draft(draft, tmp_path_factory.mktemp("export") / "my-dspark")


def fields(**changes: Any) -> Break:
    return lambda folder: set_fields(folder, **changes)


def tensors(**changes: torch.Tensor | None) -> Break:
    return lambda folder: set_tensors(folder, **changes)


def nested(**changes: Any) -> Break:
    right = {"mask_token_id": 5, "target_layer_ids": [1, 3], "block_size": 4}
    return fields(dflash_config={name: value for name, value in (right | changes).items() if value is not None})


def layers(*ids: int, count: int = 6) -> Break:
    """In all three places."""

    def change(folder: Path) -> None:
        set_fields(folder, target_layer_ids=ids, eagle_aux_hidden_state_layer_ids=[i + 1 for i in ids])
        set_fields(folder, num_target_layers=count)
        nested(target_layer_ids=ids)(folder)

    return change


def spoil(folder: Path) -> None:
    weight = read_tensor(folder, "fc.weight")
    weight[3, 4] = float("nan")
    set_tensors(folder, fc__weight=weight)


THETA = {"rope_type": "default", "rope_theta": 500.0}
OWN: dict[str, tuple[Break, str, str]] = {
    "another name": (
        lambda folder: folder.rename(folder.with_name("draft")),
        "folder name",
        "the folder is named 'draft', must contain 'dspark' and not 'dflash': engines go by it",
    ),
    "dflash": (
        lambda folder: folder.rename(folder.with_name("dspark-dflash")),
        "folder name",
        "the folder is named 'dspark-dflash', must contain 'dspark' and not 'dflash': engines go by it",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "files", "cannot read "),
    "cut weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"\x09"), "files", "cannot read "),
    "no config": (lambda folder: (folder / "config.json").unlink(), "files", "'"),
    "a config of something else": (
        fields(architectures=["Qwen3ForCausalLM"]),
        "files",
        "no draft class is named ['Qwen3ForCausalLM']: known are ",
    ),
    "a field of another kind": (
        fields(target_layer_ids=["one"]),
        "files",
        "has target_layer_ids in config.json:[0] 'one', must be a whole number",
    ),
    "architectures that are no list": (
        fields(architectures=3),
        "files",
        "has architectures in config.json: 3, must be a list",
    ),
    "a head that is neither there nor not": (
        fields(enable_confidence_head="x"),
        "files",
        "has enable_confidence_head in config.json: 'x', must be true or false",
    ),
    "another model_type": (fields(model_type="llama"), "files", "model_type is 'llama', must be 'qwen3'"),
    "no block": (fields(block_size=0), "files", "block_size in config.json is 0, must be 1 or more"),
    "no size": (
        fields(hidden_size="wide"),
        "files",
        "the config of a Qwen3DSparkModel cannot be used: Validation error for field 'hidden_size': TypeError: ",
    ),
    "more weights": (
        lambda folder: (folder / "old.safetensors").write_bytes(b""),
        "files",
        "'old.safetensors' lies beside 'model.safetensors', must not: engines load all weights they find",
    ),
    "a tensor missing": (
        tensors(norm__weight=None),
        "tensors",
        "'norm.weight' is missing, must be there with shape (128,)",
    ),
    "a tensor too many": (
        tensors(stranger=torch.zeros(1)),
        "tensors",
        "'stranger' is there, must not: the config asks for no such tensor",
    ),
    "a shape": (
        tensors(fc__weight=torch.zeros(3, 3, dtype=BF16)),
        "tensors",
        "'fc.weight' has shape (3, 3), the config asks for (128, 256)",
    ),
    "a dtype": (tensors(norm__weight=torch.ones(128)), "tensors", "'norm.weight' is float32, must be bfloat16"),
    "the dtype that is declared": (
        fields(torch_dtype="float32"),
        "tensors",
        "torch_dtype is 'float32', must be 'bfloat16'",
    ),
    "layers that fall": (
        layers(3, 1),
        "layer ids",
        "target_layer_ids [3, 1] must be strictly increasing, such as [1, 3]",
    ),
    "layers outside": (
        layers(1, 6),
        "layer ids",
        "target_layer_ids [1, 6] must lie in -1..5: the target has 6 layers",
    ),
    "the other convention": (
        fields(eagle_aux_hidden_state_layer_ids=[1, 3]),
        "layer ids",
        "eagle_aux_hidden_state_layer_ids is [1, 3], must be [2, 4]",
    ),
    "no anchor field": (fields(sample_from_anchor=None), "anchors", "sample_from_anchor is missing, must be True"),
    "a bonus anchor": (fields(dspark_bonus_anchor=True), "anchors", "dspark_bonus_anchor is True, must be False"),
    "1 for true": (fields(sample_from_anchor=1), "anchors", "sample_from_anchor is 1, must be True"),
    "an anchor in dflash_config": (
        nested(sample_from_anchor=True),
        "dflash_config",
        "dflash_config has sample_from_anchor True, must not have it",
    ),
    "other layers in dflash_config": (
        nested(target_layer_ids=[2, 4]),
        "dflash_config",
        "dflash_config: target_layer_ids is [2, 4], must be [1, 3]",
    ),
    "no dflash_config": (
        fields(dflash_config=None),
        "dflash_config",
        "dflash_config is None, must be {'mask_token_id': 5, 'target_layer_ids': [1, 3], 'block_size': 4}",
    ),
    "a mask token outside": (
        fields(mask_token_id=1024),
        "mask token",
        "mask_token_id is 1024, must lie in 0..1023",
    ),
    "another theta": (
        fields(rope_theta=500.0),
        "RoPE",
        "rope_theta is 500.0, must be 10000.0: rope_parameters says so",
    ),
    "another scaling": (
        fields(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        "RoPE",
        "rope_scaling is {'rope_type': 'linear', 'factor': 2.0}, must be None: rope_parameters says so",
    ),
    "one schema only": (
        fields(rope_parameters=None),
        "RoPE",
        "rope_parameters is missing, must be {'rope_theta': 10000.0, 'rope_type': 'default'}",
    ),
    "axes of pictures": (
        fields(rope_parameters={**THETA, "mrope_section": [4, 6, 6]}),
        "RoPE",
        "rope_parameters has mrope_section, must not: a draft sees text positions only",
    ),
    "a narrow confidence head": (
        fields(confidence_head_with_markov=False),
        "confidence head",
        "it reads 136 inputs, must read 128 (hidden_size 128)",
    ),
    "a confidence head that is not described": (
        fields(confidence_head_with_markov=None),
        "confidence head",
        "confidence_head_with_markov is missing, must be true or false",
    ),
    "a NaN": (spoil, "values", "'fc.weight' holds NaN or infinite values, must be finite"),
}


@pytest.mark.parametrize("case", OWN)
def test_a_broken_folder(case: str, exported: Path, tmp_path: Path) -> None:
    change, name, line = OWN[case]
    folder = copy_draft(exported, tmp_path, keep_record=False)
    change(folder)
    (folder,) = tmp_path.iterdir()
    code, found = check(folder)
    outcome, said = found[name]
    assert (code, outcome) == (1, "error") and "\n" not in said
    assert said == line or (line[-1] in "' " and said.startswith(line))


def test_weights_that_are_not_those_exported(exported: Path, tmp_path: Path) -> None:
    folder = copy_draft(exported, tmp_path, keep_record=False)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, found = check(folder)
    damaged = f"{str(weights)!r} is damaged, its weights are not those that were exported: export it again, or, if you "
    damaged += "changed them, take weights_hash out of its config.json"
    assert (code, found["values"]) == (1, ("error", damaged))
    set_fields(folder, weights_hash=None)
    assert check(folder)[1]["values"][0] == "ok"


ON_TARGET: dict[str, tuple[Break, str, str, str]] = {
    "another size": (
        layers(1, 3, count=8),
        "target",
        "error",
        "the draft was trained for a target with num_target_layers 8, this target has 6",
    ),
    "another embedding": (
        tensors(embed_tokens__weight=torch.full((1024, 128), 9.0, dtype=BF16)),
        "embedding",
        "error",
        "1024 of 1024 rows of embed_tokens.weight are not the target's, must be equal in bfloat16",
    ),
    "another RoPE": (
        fields(rope_theta=500.0, rope_parameters=THETA),
        "target RoPE",
        "warning",
        "RoPE is {'rope_type': 'default', 'rope_theta': 500.0}, a draft trained for this target has "
        "{'rope_theta': 10000.0, 'rope_type': 'default'}",
    ),
    "the end as mask": (
        fields(mask_token_id=1),
        "mask token in text",
        "error",
        "mask_token_id 1 is '<|end|>', which ends answers: take a token that never occurs in text",
    ),
    "a mark of the template as mask": (
        fields(mask_token_id=3),
        "mask token in text",
        "error",
        "mask_token_id 3 is '<|user|>', which the chat template writes: take a token that never occurs in text",
    ),
    "a word as mask": (
        fields(mask_token_id=262),
        "mask token in text",
        "warning",
        "mask_token_id 262 is ' a', which text can hold: take a token that never occurs in text",
    ),
}


@pytest.mark.parametrize("case", ON_TARGET)
def test_a_draft_that_does_not_fit_its_target(case: str, exported: Path, tmp_path: Path) -> None:
    change, name, outcome, line = ON_TARGET[case]
    folder = copy_draft(exported, tmp_path, keep_record=False)
    change(folder)
    code, found = check(folder, "--target", "embedded")
    assert found[name] == (outcome, line)
    if name == "mask token in text":  # nested fields say otherwise, which is an error of its own
        assert found["dflash_config"][0] == "error"
    else:
        assert code == (outcome == "error")


def test_every_end_of_the_target_counts_not_the_tokenizers_alone(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_checks, "end_tokens", lambda model: [1, 262])
    folder = copy_draft(exported, tmp_path)
    set_fields(folder, mask_token_id=262)
    outcome, line = check(folder, "--target", "embedded")[1]["mask token in text"]
    assert outcome == "error" and "which ends answers" in line


@pytest.mark.parametrize("mask", [-1, 1024])
def test_a_mask_token_outside_the_vocabulary_is_not_decoded_with(mask: int, exported: Path, tmp_path: Path) -> None:
    folder = copy_draft(exported, tmp_path)
    set_fields(folder, mask_token_id=mask)
    code, found = check(folder, "--target", "embedded")
    assert (code, found["mask token"]) == (1, ("error", f"mask_token_id is {mask}, must lie in 0..1023"))
    assert found["decode"] == ("skipped", "the draft cannot be loaded beside this target: see mask token")


def test_one_row_of_the_head_is_enough(exported: Path, tmp_path: Path) -> None:
    folder = copy_draft(exported, tmp_path)
    head = read_tensor(folder, "lm_head.weight")
    head[7, 0] += 1
    set_tensors(folder, lm_head__weight=head)
    code, found = check(folder, "--target", str(embedded_path()))
    assert code == 1 and [name for name, (outcome, _) in found.items() if outcome == "error"] == ["head"]
    assert found["head"][1] == "1 of 1024 rows of lm_head.weight are not the target's, must be equal in bfloat16"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp", "all"])
@pytest.mark.filterwarnings("ignore:.*(SGLang|vLLM|llama)")
def test_what_an_engine_cannot_serve_is_an_error_for_that_engine(engine: str, tmp_path: Path) -> None:
    draft = embedded_pair(markov_head_type="rnn", num_draft_layers=1)[1]
    code, found = check(export_draft(draft, tmp_path / "dspark"), "--engine", engine)
    line = "vLLM and llama.cpp serve the vanilla Markov head only, not 'rnn'"
    outcome = "warning" if engine == "all" else "error"
    expected = {"vllm": {"vLLM"}, "llamacpp": {"llama.cpp"}, "sglang": set(), "all": {"vLLM", "llama.cpp"}}[engine]
    assert {name for name, verdict in found.items() if verdict == (outcome, line)} == expected
    assert code == (engine in ("vllm", "llamacpp"))
    engines = {"vLLM", "SGLang", "llama.cpp"} & found.keys()
    assert len(engines) == (3 if engine == "all" else 1)


def test_without_a_target_the_rest_is_checked_and_what_is_missing_is_said(exported: Path, tmp_path: Path) -> None:
    code, found = check(copy_draft(exported, tmp_path, keep_record=False))
    reason = "the folder names no target: give it with --target"
    assert code == 0
    skipped = {name: line for name, (outcome, line) in found.items() if outcome == "skipped"}
    assert skipped == {"target": reason, "decode": reason}


def test_a_named_target_that_does_not_load_is_skipped_but_a_given_one_must(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_draft(exported, tmp_path)
    (folder / "dspark.json").write_text(ExportRecord(target="./gone").text())
    line = "target './gone' does not exist: give a folder, a hub id such as org/name, or 'embedded'"
    code, found = check(folder)
    assert (code, found["decode"]) == (0, ("skipped", f"{line}; give another with --target"))
    capsys.readouterr()
    assert run_check(folder, "--target", "./gone") == (2, "")
    assert capsys.readouterr().err == f"dspark: error: {line}\n"


def test_a_card_names_the_target_where_there_is_no_record(exported: Path, tmp_path: Path) -> None:
    folder = copy_draft(exported, tmp_path)
    (folder / "dspark.json").unlink()
    (folder / "README.md").write_text("---\nbase_model: ./elsewhere\n---\n")
    assert check(folder)[1]["target"][1].startswith("target './elsewhere' does not exist")


@pytest.mark.parametrize("content", ["{", "[]", '{"prompts": 3}'])
def test_a_record_that_cannot_be_read_is_a_warning(content: str, exported: Path, tmp_path: Path) -> None:
    folder = copy_draft(exported, tmp_path)
    (folder / "dspark.json").write_text(content)
    code, found = check(folder)
    assert code == 0 and found["record"][0] == "warning" and "dspark.json" in found["record"][1]


@pytest.mark.parametrize("kind", ["nothing", "empty", "file"])
def test_a_folder_that_is_nothing_is_one_line(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my-dspark"
    if kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("")
    with pytest.raises(SystemExit) as exit_:
        main(["check", str(path)])
    (line,) = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2
    assert line == (f"dspark: error: '{path}' holds no draft: give a folder with model.safetensors and config.json")


def test_json_in_a_file_beside_the_table(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(exported), "--json", str(tmp_path / "check.json")])
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "check.json").read_text())
    assert list(content) == ["folder", "target", "engine", "passed", "checks"]
    assert (content["folder"], content["target"], content["engine"]) == (str(exported), None, "all")
    assert content["passed"] is True and {frozenset(each) for each in content["checks"]} == {
        frozenset({"check", "outcome", "line"})
    }
    assert all(each["line"] in printed for each in content["checks"])
    assert "13 ok, 2 skipped" in printed and f"Written to {tmp_path / 'check.json'}" in printed
