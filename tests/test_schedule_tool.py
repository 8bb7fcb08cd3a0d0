"""`dspark schedule`, as a user types it."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from dspark_lightning.cli import main
from dspark_lightning.decoding.records import write_records
from dspark_lightning.decoding.schedule_figure import schedule_figure
from dspark_lightning.decoding.simulate import ServingResult
from dspark_lightning.decoding.sps import read_sps, write_sps
from schedule_helpers import calibrated_records, curve, record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With records.jsonl, sps.json and temperatures.json."""
    write_records(tmp_path / "records.jsonl", calibrated_records(answers=10, size=2))
    write_sps(tmp_path / "curve.json", curve())
    (tmp_path / "temperatures.json").write_text(
        json.dumps({"temperatures": [1.0, 2.0], "dataset": "x", "num_samples": 9, "ece_before": 0.1, "ece_after": 0.0})
    )
    return tmp_path


def command(folder: Path, **options: Any) -> list[str]:
    given = {"records": folder / "records.jsonl", "sps": folder / "curve.json", "max_concurrency": 4, **options}
    return ["schedule", *(f"--{name}={value}" for name, value in given.items() if value is not None)]


def failure(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command which must fail ends with."""
    with pytest.raises(SystemExit) as exit_:
        main(args)
    assert exit_.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dspark: error: ")]
    assert len(lines) == 1
    return lines[0].removeprefix("dspark: error: ")


def test_results_table_and_figure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(command(folder, temperatures=folder / "temperatures.json", output=folder / "new"))
    assert sorted(path.name for path in (folder / "new").iterdir()) == ["schedule.json", "schedule.png"]
    assert (folder / "new" / "schedule.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((folder / "new" / "schedule.json").read_text())
    assert written["curve"] == json.loads((folder / "curve.json").read_text())
    assert written["records"] == str(folder / "records.jsonl")
    assert written["temperatures"] == [1.0, 2.0] and written["max_batch_tokens"] == 4096
    results = [ServingResult(**result) for result in written["results"]]
    names = ["no draft", "fixed 1", "fixed 2", "threshold 0.3", "threshold 0.5", "threshold 0.7"]
    names += ["scheduler", "scheduler, asynchronous"]
    assert [(r.concurrency, r.policy) for r in results] == [(users, name) for users in (1, 2, 4) for name in names]
    printed = capsys.readouterr().out
    assert str(folder / "new" / "schedule.json") in printed and "not calibrated" not in printed
    for users in (1, 2, 4):
        best = max((r for r in results if r.concurrency == users), key=lambda r: r.tokens_per_second)
        (line,) = (line for line in printed.splitlines() if line.split()[1:2] == [str(users)])
        assert line.count("*") == 1 and f"*{best.tokens_per_second:,.0f}" in line


def test_without_temperatures_the_output_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(command(folder))
    assert json.loads((folder / "schedule.json").read_text())["temperatures"] is None
    assert "The confidences are not calibrated" in capsys.readouterr().out


def test_without_confidences_the_output_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_records(folder / "records.jsonl", [record([1], [2], None)])
    main(command(folder))
    assert "No thresholds and no schedulers: there are no confidences in the records" in capsys.readouterr().out
    names = {result["policy"] for result in json.loads((folder / "schedule.json").read_text())["results"]}
    assert names == {"no draft", "fixed 1", "fixed 2"}


def test_a_curve_that_ends_early_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sps(folder / "curve.json", curve(limit=3))
    main(command(folder))
    assert "Up to 3 users only, the curve's max_batch_tokens" in capsys.readouterr().out


def test_profile_measures_the_target(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(command(folder, sps=None, profile="embedded", max_concurrency=2))
    measured = read_sps(folder / "sps.json")
    assert measured.sample_batch_tokens == [1, 2, 4, 6] and measured.max_batch_tokens == 6
    assert json.loads((folder / "schedule.json").read_text())["curve"] == json.loads((folder / "sps.json").read_text())
    assert str(folder / "sps.json") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"sps": None}, "give either --sps FILE or --profile TARGET for the steps per second, got none"),
        ({"profile": "embedded"}, "give either --sps FILE or --profile TARGET for the steps per second, got both"),
        ({"sps": "missing.json"}, "cannot read the SPS curve 'missing.json': "),
        ({"records": "missing.jsonl"}, "cannot read the decode records 'missing.jsonl': "),
        ({"temperatures": "missing.json"}, "'missing.json' holds no temperatures as dspark calibrate writes them: "),
        ({"max_concurrency": 0}, "max_concurrency must be 1 or more, got 0"),
        ({"sps": None, "profile": "./nowhere"}, "target './nowhere' does not exist: "),
    ],
)
def test_wrong_options_end_in_one_line(
    options: dict[str, Any], error: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name for path in folder.iterdir()}
    assert failure(command(folder, **options), capsys).startswith(error)
    assert {path.name for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ({"temperatures": [1.0]}, "1 temperatures do not fit blocks of 2 tokens: take those of this draft"),
        ({"temperatures": [1.0, 0]}, "must all be positive, got [1.0, 0]"),
        ({"temperatures": None}, "holds no temperatures as dspark calibrate writes them: "),
        ([1.0, 1.0], "holds no temperatures as dspark calibrate writes them: "),
    ],
)
def test_wrong_temperatures(content: Any, error: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "temperatures.json").write_text(json.dumps(content))
    assert error in failure(command(folder, temperatures=folder / "temperatures.json"), capsys)


def test_a_folder_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder / "records.jsonl" / "inside"
    assert failure(command(folder, output=output), capsys).startswith(f"cannot write to '{output}': ")


def test_a_crash_leaves_the_last_results(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(command(folder))
    before = {path: path.read_bytes() for path in folder.iterdir()}

    def half_written(self: Figure, path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("power cut")

    monkeypatch.setattr(Figure, "savefig", half_written)
    with pytest.raises(RuntimeError, match="power cut"):
        main(command(folder))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_the_figure_has_a_line_for_each_policy() -> None:
    results = [
        ServingResult(users, name, speed * users, speed, 1.0, 0.5)
        for users in (1, 2, 8)
        for name, speed in (("no draft", 5.0), ("fixed 1", 6.0), ("fixed 2", 7.0), ("scheduler", 8.0))
    ]
    load, trade = schedule_figure(results).axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in load.get_lines()}
    assert lines["fixed 2"] == ([1, 2, 8], [7, 14, 56])
    assert list(lines) == [
        "no draft",
        "fixed 1",
        "fixed 2",
        "scheduler",
    ]
    assert [list(line.get_xdata()) for line in trade.get_lines()] == [[5] * 3, [6] * 3, [7] * 3, [8] * 3]
