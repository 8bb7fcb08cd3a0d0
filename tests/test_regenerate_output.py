"""The files of `dspark regenerate`: whole lines, a finished output in order, and nothing twice or lost."""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from dspark_lightning.regeneration.output import OutputFiles, PartialFile
from dspark_lightning.regeneration.scripts import Failure

SETTINGS = {"target": "a", "temperature": 0.5}


def row(id: int | str) -> dict[str, Any]:
    return {"id": id, "messages": [{"role": "assistant", "content": f"é {id}"}]}


def append(path: Path, *ids: int | str) -> None:
    partial = PartialFile(path)
    partial.append([row(id) for id in ids])
    partial.close()


def ids(path: Path) -> list[Any]:
    return [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def files(tmp_path: Path) -> OutputFiles:
    return OutputFiles(tmp_path / "new" / "out.jsonl")


def test_rows_end_up_in_the_order_of_the_data(files: OutputFiles) -> None:
    assert files.begin(SETTINGS, {}) == set()
    append(files.partial(0), 3, 1)
    append(files.partial(1), "x", 2)
    assert files.begin(SETTINGS, {}) == {"1", "2", "3", "x"}
    assert not files.output.exists()
    assert files.finish(["1", "2", "failed", "3", "x"], []) == 4
    assert ids(files.output) == [1, 2, 3, "x"]
    assert json.loads(files.output.read_text(encoding="utf-8").splitlines()[0]) == row(1)
    assert sorted(path.name for path in files.output.parent.iterdir()) == ["out.jsonl", "out.jsonl.settings.json"]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_was_cut_counts_for_nothing(cut: int, files: OutputFiles) -> None:
    files.begin(SETTINGS, {})
    append(files.partial(0), 1, 2)
    whole = files.partial(0).read_bytes()
    files.partial(0).write_bytes(whole[:-cut])
    assert files.begin(SETTINGS, {}) == {"1"}
    append(files.partial(0), 2)
    assert files.partial(0).read_bytes() == whole


def test_a_finished_output_without_its_last_newline_is_not_glued_to_the_next_row(files: OutputFiles) -> None:
    files.begin(SETTINGS, {})
    append(files.partial(0), 1, 2)
    files.finish(["1", "2"], [])
    files.output.write_bytes(files.output.read_bytes()[:-1])
    assert files.begin(SETTINGS, {}) == {"1"}


def test_a_cut_line_longer_than_a_block_is_removed(files: OutputFiles) -> None:
    files.begin(SETTINGS, {})
    append(files.partial(0), 1)
    whole = files.partial(0).read_bytes()
    files.partial(0).write_bytes(whole + b'{"id": 2' + b" " * 200_000)
    append(files.partial(0))
    assert files.partial(0).read_bytes() == whole
    files.partial(0).write_bytes(b"x" * 200_000)
    append(files.partial(0))
    assert files.partial(0).read_bytes() == b""


def test_rows_that_failed_are_tried_again_into_the_finished_output(files: OutputFiles) -> None:
    files.begin(SETTINGS, {})
    append(files.partial(0), 1, 3)
    failure = Failure(2, "a.jsonl:2", "too long", "2,000 tokens")
    files.finish(["1", "2", "3"], [failure])
    assert ids(files.output) == [1, 3]
    assert json.loads(files.failures.read_text()) == {
        "id": 2,
        "place": "a.jsonl:2",
        "reason": "too long",
        "detail": "2,000 tokens",
    }
    assert files.begin(SETTINGS, {}) == {"1", "3"}
    append(files.partial(0), 2)
    files.finish(["1", "2", "3"], [])
    assert ids(files.output) == [1, 2, 3] and not files.failures.exists()


def test_without_any_answer_there_is_no_output(files: OutputFiles) -> None:
    files.begin(SETTINGS, {})
    append(files.partial(0))
    files.finish(["1"], [Failure(1, "a.jsonl:1", "too long", "")])
    assert not files.output.exists() and not files.partials() and files.failures.exists()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (SETTINGS | {"temperature": 1.0}, "were begun with temperature 0.5, this run has 1.0"),
        (SETTINGS | {"top_k": 4}, "were begun with top_k None, this run has 4"),
        ({"target": "a"}, "were begun with temperature 0.5, this run has None"),
    ],
)
def test_other_settings_are_refused_once_there_are_answers(
    settings: dict[str, Any], error: str, files: OutputFiles
) -> None:
    files.begin(settings, {})
    files.begin(SETTINGS, {})  # nothing was answered yet
    append(files.partial(0), 1)
    with pytest.raises(ValueError, match=re.escape(error)):
        files.begin(settings, {})
    files.finish(["1"], [])
    with pytest.raises(ValueError, match=re.escape(error)):
        files.begin(settings, {})


@pytest.mark.parametrize("settings", [None, "junk", "[]", '{"settings": 3}'])
def test_an_output_of_unknown_origin_is_left_alone(settings: str | None, tmp_path: Path) -> None:
    files = OutputFiles(tmp_path / "out.jsonl")
    files.output.write_text("mine\n")
    if settings is not None:
        files.settings.write_text(settings)
    with pytest.raises(ValueError, match=r"settings\.json' does not tell how it was made: give another"):
        files.begin(SETTINGS, {})
    assert files.output.read_text() == "mine\n"


def test_two_runs_cannot_write_the_same_output(files: OutputFiles) -> None:
    files.begin(SETTINGS, {})
    first = PartialFile(files.partial(0))
    with pytest.raises(ValueError, match="is being written by another run"):
        PartialFile(files.partial(0))
    first.close()
    PartialFile(files.partial(0)).close()


def test_the_settings_are_those_of_the_run_that_writes(files: OutputFiles) -> None:
    files.begin(SETTINGS, {})
    first = PartialFile(files.partial(0))
    with pytest.raises(ValueError, match="is being written by another run"):
        files.begin({**SETTINGS, "target": "b"}, {})  # there is no answer yet to compare with
    assert json.loads(files.settings.read_text())["settings"] == SETTINGS
    first.close()


def test_what_another_run_did_meanwhile_is_seen_before_the_first_answer(files: OutputFiles) -> None:
    other = OutputFiles(files.output)
    files.begin(SETTINGS, {})
    other.begin({**SETTINGS, "target": "b"}, {})
    files.claim(SETTINGS, {})
    assert json.loads(files.settings.read_text())["settings"] == SETTINGS
    append(files.partial(0), 1)
    files.finish(["1"], [])
    with pytest.raises(ValueError, match="begun with target 'a', this run has 'b'"):
        other.claim({**SETTINGS, "target": "b"}, {})


def test_a_full_disk_is_one_line_and_costs_no_whole_row(files: OutputFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    files.begin(SETTINGS, {})
    partial = PartialFile(files.partial(0))
    partial.append([row(1)])
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"partial-0': No space left on device"):
        patch.setattr(os, "fsync", full)
        partial.append([row(2)])
    partial.close()
    assert "1" in files.begin(SETTINGS, {})


@pytest.mark.parametrize("name", ["settings.json", "failures.jsonl", "partial-0"])
def test_folders_in_the_way_are_refused_and_kept(name: str, tmp_path: Path) -> None:
    (tmp_path / f"out.jsonl.{name}").mkdir()
    with pytest.raises(ValueError, match=rf"out\.jsonl\.{name}' is a folder"):
        OutputFiles(tmp_path / "out.jsonl")
    assert (tmp_path / f"out.jsonl.{name}").is_dir()


def test_files_with_other_names_are_left_alone(files: OutputFiles) -> None:
    append(files.partial(0), 1)
    copy = files.output.with_name("out.jsonl.partial-0.bak")
    copy.write_bytes(files.partial(0).read_bytes())
    assert files.partials() == [files.partial(0)]
    files.finish(["1"], [])
    assert copy.exists() and not files.partial(0).exists()


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder: give the JSON Lines file to write"):
        OutputFiles(tmp_path)


def test_half_a_surrogate_pair_survives(files: OutputFiles) -> None:
    partial = PartialFile(files.partial(0))
    partial.append([{"id": 1, "text": "\ud83d"}])
    partial.close()
    assert json.loads(files.partial(0).read_bytes()) == {"id": 1, "text": "\ud83d"}
