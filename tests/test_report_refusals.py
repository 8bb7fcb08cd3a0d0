"""`dspark report`: what it refuses, in one line, and what then stays."""

import copy
from pathlib import Path
from typing import Any

import pytest

from dspark_lightning.cli import main
from report_helpers import FILES, write_events, write_json


def failure(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail with one line and exit code 2; returns the line."""
    with pytest.raises(SystemExit) as exit_:
        main(args)
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("dspark: error: ")


BAD = [
    ("evaluation", ("overall", "rounds"), ..., "has no overall.rounds"),
    ("evaluation", ("datasets", "chat", "rounds"), ..., "has no datasets.chat.rounds"),
    ("evaluation", ("seed",), "three", "has seed 'three', must be a whole number"),
    ("evaluation", ("overall", "tau"), True, "has overall.tau True, must be a number"),
    ("evaluation", ("overall", "tau_interval"), [1.0], "has overall.tau_interval [1.0], must be a list of 2 numbers"),
    (
        "evaluation",
        ("overall", "survival"),
        [0.5],
        "has overall.survival of 1 entries, must be 2 as accepted_lengths less one says",
    ),
    ("evaluation", ("block_size",), 3, "has accepted_lengths of 3 entries, must be 4 as block_size plus one says"),
    (
        "calibration",
        ("survival_bins_after",),
        [],
        "has survival_bins_after of 0 entries, must be 2 as temperatures says",
    ),
    ("schedule", ("results", 1, "policy"), ..., "has no results[1].policy"),
]


@pytest.mark.parametrize(("name", "place", "value", "problem"), BAD, ids=[case[3] for case in BAD])
def test_a_file_that_does_not_fit_is_one_line(
    name: str, place: tuple[Any, ...], value: Any, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = copy.deepcopy(FILES)
    node: Any = files[name]
    for key in place[:-1]:
        node = node[key]
    if value is ...:
        del node[place[-1]]
    else:
        node[place[-1]] = value
    write_json(tmp_path, files)
    (tmp_path / "report.html").write_text("the earlier page")
    path = str(tmp_path / "evaluation" / f"{name}.json")
    assert (
        failure(["report", str(tmp_path)], capsys)
        == f"{path!r} {problem}: write it again with `dspark {command(name)}`"
    )
    assert (tmp_path / "report.html").read_text() == "the earlier page"


def command(name: str) -> str:
    return {"evaluation": "evaluate", "calibration": "calibrate", "schedule": "schedule"}[name]


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none")
    assert failure(["report", missing], capsys) == (
        f"there is no folder {missing!r}: give that of a run, such as runs/quickstart/version_0"
    )
    assert failure(["report", str(tmp_path)], capsys) == (
        f"{str(tmp_path)!r} is no folder of a run: it has neither TensorBoard events (events.out.tfevents.*) nor "
        "evaluation/evaluation.json; give one such as runs/quickstart/version_0"
    )
    (tmp_path / "evaluation").mkdir()
    broken = tmp_path / "evaluation/evaluation.json"
    broken.write_text('{"tau": ')
    assert failure(["report", str(tmp_path)], capsys) == (
        f"{str(broken)!r} is not JSON (Expecting value: line 1 column 9 (char 8)): "
        "write it again with `dspark evaluate`"
    )
    broken.write_text("[]")
    assert failure(["report", str(tmp_path)], capsys) == (
        f"{str(broken)!r} has as its content [], must be an object: write it again with `dspark evaluate`"
    )


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(tmp_path, [0], {"val/epoch": 1.0})
    (tmp_path / "mine").mkdir()
    assert failure(["report", str(tmp_path), "--output", str(tmp_path / "mine")], capsys) == (
        f"output {str(tmp_path / 'mine')!r} is a folder: give the file to write, such as "
        f"{str(tmp_path / 'mine/report.html')!r}"
    )
    (tmp_path / "file").touch()
    below = str(tmp_path / "file/page.html")
    assert failure(["report", str(tmp_path), "--output", below], capsys).startswith(f"cannot write {below!r}: ")


def test_a_page_is_replaced_only_when_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_events(tmp_path, [0], {"val/epoch": 1.0})
    (tmp_path / "report.html").write_text("the earlier page")
    before = sorted(tmp_path.iterdir())
    write_text = Path.write_text

    def half(path: Path, text: str, **options: Any) -> int:
        write_text(path, text[: len(text) // 2], **options)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        error = failure(["report", str(tmp_path)], capsys)
    assert error == f"cannot write {str(tmp_path / 'report.html')!r}: No space left on device"
    assert (tmp_path / "report.html").read_text() == "the earlier page" and sorted(tmp_path.iterdir()) == before
    main(["report", str(tmp_path)])
    assert (tmp_path / "report.html").read_text().endswith("</html>\n") and sorted(tmp_path.iterdir()) == before


def test_the_evaluation_of_a_run_is_not_taken_for_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(tmp_path, FILES)
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "evaluation")])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.endswith(f"is the evaluation of a run: give the run's own folder, {str(tmp_path)!r}")
