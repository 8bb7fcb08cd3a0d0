"""The model card and the commands on it: what is known stands there, what is not is left out."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dspark_lightning import build_draft_model, export_draft
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.embedded import embedded_path
from dspark_lightning.export import check_export_path
from dspark_lightning.serving.card import card_target
from dspark_lightning.serving.engines import serve_command, serve_commands
from dspark_lightning.serving.record import Decoded, ExportRecord, Training, Validation, read_record
from helpers import tiny_qwen3_config

RECORD = ExportRecord(
    target="org/my-target",
    gguf_file="q4.gguf",
    training=Training(120, "answers.jsonl", {"seed": 3, "learning_rate": 0.0006}),
    validation=Validation(100, 2.345, [0.75, 0.5, 0.25, 0.125]),
    prompts=[[3, 4], [5]],
    decoded=Decoded(2.5, 40, 32, "bfloat16", {"device": "cpu"}),
)


def draft(**changes: object) -> DSparkDraft:
    arguments = {"mask_token_id": 96, "num_draft_layers": 2, "block_size": 4, "markov_rank": 8}
    return build_draft_model(tiny_qwen3_config(), **(arguments | changes))


def card(folder: Path) -> tuple[dict[str, object], list[str]]:
    """Front matter and lines of the rest."""
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text.splitlines()


def test_all_that_is_known_stands_on_the_card(tmp_path: Path) -> None:
    front, lines = card(export_draft(draft(), tmp_path / "my-dspark", record=RECORD))
    assert front == {
        "library_name": "dspark-lightning",
        "tags": ["dspark", "speculative-decoding", "draft-model"],
        "base_model": "org/my-target",
    }
    for line in (
        "# my-dspark",
        "| target | `org/my-target` (`q4.gguf`) |",
        "| draft | `Qwen3DSparkModel`, 2 layers |",
        "| features | layers 1, 3 of the target's 6 |",
        "| block size | 4 |",
        "| Markov head | vanilla, rank 8 |",
        "| steps | 120 |",
        "| data | `answers.jsonl` |",
        "| learning_rate | 0.0006 |",
        "Held-out rows, after step 100: **2.35**. Acceptance by position in the block:",
        "| 1 | 2 | 3 | 4 |",
        "|---|---|---|---|",
        "| 0.75 | 0.50 | 0.25 | 0.12 |",
        "Greedy decoding of 2 held-out prompts, 32 new tokens each, bfloat16: **2.50**.",
        *serve_commands(Path("my-dspark"), "org/my-target", 4)["llamacpp"].splitlines(),
        serve_commands(Path("my-dspark"), "org/my-target", 4)["vllm"],
        serve_commands(Path("my-dspark"), "org/my-target", 4)["sglang"],
    ):
        assert line in lines, line


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    front, lines = card(export_draft(draft(), tmp_path / "my-dspark"))
    text = "\n".join(lines)
    assert "base_model" not in front and "| target |" not in text
    assert not any(word in text for word in ("None", "## Training", "## What it is worth", "tau", "| steps |"))
    assert "vllm serve TARGET " in text and "`dspark check my-dspark --target TARGET`" in text


def test_one_measurement_does_not_need_the_other(tmp_path: Path) -> None:
    _, lines = card(export_draft(draft(), tmp_path / "a-dspark", record=replace(RECORD, decoded=None)))
    assert "## What it is worth" in lines and not any("Greedy" in line for line in lines)
    one = replace(RECORD.decoded, accepted=[[1, 2]])  # type: ignore[type-var]
    _, lines = card(export_draft(draft(), tmp_path / "c-dspark", record=replace(RECORD, decoded=one)))
    assert any(line.startswith("Greedy decoding of 1 held-out prompts,") for line in lines)  # the other was too long
    _, lines = card(export_draft(draft(), tmp_path / "b-dspark", record=replace(RECORD, validation=None)))
    assert "## What it is worth" in lines and not any("Held-out rows" in line for line in lines)


@pytest.mark.filterwarnings("ignore:.*(SGLang|vLLM|llama)")
def test_an_engine_that_cannot_serve_the_draft_has_no_command(tmp_path: Path) -> None:
    _, lines = card(export_draft(draft(markov_head_type="gated"), tmp_path / "dspark", record=RECORD))
    text = "\n".join(lines)
    assert "vllm serve" not in text and "llama-server" not in text and "sglang.launch_server" in text
    reason = "vLLM and llama.cpp serve the vanilla Markov head only, not 'gated'"
    assert f"vLLM cannot serve this draft as it is: {reason}." in lines


@pytest.mark.parametrize("target", ["./my/target", "/models/target", "embedded", "runs/x/target"])
def test_only_targets_of_the_hub_are_base_models(target: str, tmp_path: Path) -> None:
    front, lines = card(export_draft(draft(), tmp_path / "dspark", record=ExportRecord(target=target)))
    assert "base_model" not in front and f"| target | `{target}` |" in lines


def test_a_card_names_its_target_to_the_check(tmp_path: Path) -> None:
    folder = export_draft(draft(), tmp_path / "dspark", record=RECORD)
    assert card_target(folder) == "org/my-target"
    for text, found in (
        ("---\nbase_model: [org/a, org/b]\n---\n", "org/a"),
        ("---\nlicense: mit\n---\n", None),
        ("---\n- a list\n---\n", None),
        ("---\n{\n---\n", None),
        ("---\n", None),
        ("# a title", None),
    ):
        (folder / "README.md").write_text(text)
        assert card_target(folder) == found, text
    (folder / "README.md").unlink()
    assert card_target(folder) is None


def test_the_record_comes_back(tmp_path: Path) -> None:
    folder = export_draft(draft(), tmp_path / "dspark", record=RECORD)
    assert read_record(folder) == RECORD
    (folder / "dspark.json").unlink()
    assert read_record(folder) is None


def test_a_folder_that_looks_like_a_hub_id_is_no_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/my-target").mkdir(parents=True)
    assert "base_model" not in card(export_draft(draft(), tmp_path / "dspark", record=RECORD))[0]


def test_card_and_record_are_part_of_an_earlier_export(tmp_path: Path) -> None:
    folder = export_draft(draft(), tmp_path / "dspark", record=RECORD)
    assert check_export_path(folder) == folder
    export_draft(draft(), folder)
    assert read_record(folder) == ExportRecord()


def test_llama_cpps_converter_reads_the_card(tmp_path: Path) -> None:
    """It takes names from it for the GGUF file's header."""
    gguf = pytest.importorskip("gguf")
    folder = export_draft(draft(), tmp_path / "dspark", record=RECORD)
    metadata = gguf.Metadata.load(model_path=folder)
    assert metadata.tags == ["dspark", "speculative-decoding", "draft-model"]
    assert metadata.base_models[0]["repo_url"] == "https://huggingface.co/org/my-target"


def test_sglang_and_llama_cpp_commands() -> None:
    commands = serve_commands(Path("my runs/x-dspark"), "/models/my target", 7)
    assert commands["vllm"] == serve_command(Path("my runs/x-dspark"), "/models/my target", 7)
    words = shlex.split(commands["sglang"])
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert dict(zip(words[3::2], words[4::2], strict=True)) == {
        "--model-path": "/models/my target",
        "--speculative-algorithm": "DSPARK",
        "--speculative-draft-model-path": "my runs/x-dspark",
    }
    convert, serve = map(shlex.split, commands["llamacpp"].splitlines())
    assert convert == ["python", "convert_hf_to_gguf.py", "my runs/x-dspark", "--outfile", "x-dspark.gguf"]
    assert serve[-2:] == ["--model-draft", "x-dspark.gguf"]
    assert str(embedded_path()) in serve_commands(Path("dspark"), "embedded", 7)["sglang"]


def test_serve_command() -> None:
    words = shlex.split(serve_command(Path("my runs/x-dspark"), "/models/my target", 7))
    assert words[:4] == ["vllm", "serve", "/models/my target", "--speculative-config"]
    assert json.loads(words[4]) == {"model": "my runs/x-dspark", "num_speculative_tokens": 7}
