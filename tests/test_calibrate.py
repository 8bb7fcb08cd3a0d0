"""`dspark calibrate`: temperatures from decode records, and records that cannot give any."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from chat_helpers import datasets_cache, write_jsonl  # noqa: F401
from dspark_lightning.cli import main
from evaluation_helpers import decoded_record, evaluate, export_untrained


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_untrained(tmp_path_factory.mktemp("run"))


def test_calibrate_writes_temperatures(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(exported, "--data", "embedded", "--limit", "8", "--compare", "false", "--output", str(tmp_path))
    main(["calibrate", "--records", str(tmp_path / "records.jsonl")])
    result = json.loads((tmp_path / "calibration.json").read_text())
    assert {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"} <= result.keys()
    assert len(result["temperatures"]) == 4 and result["dataset"] == "embedded"
    printed = capsys.readouterr().out
    assert f"mean ECE {result['ece_before']:.4f} before, {result['ece_after']:.4f} after" in printed
    if result["ece_after"] < result["ece_before"]:
        assert f"Next: dspark schedule --records {tmp_path / 'records.jsonl'} --temperatures" in printed
    else:
        assert "They do not help on the other conversations" in printed


@pytest.mark.parametrize(
    ("lines", "options", "error"),
    [
        (None, [], "cannot read the decode records"),
        ([], [], "holds no decode records"),
        (["{"], [], "rows.jsonl:1 is no decode record"),
        ([{"dataset": "d"}], [], "rows.jsonl:1 is no decode record"),
        ([asdict(decoded_record(0, [5]))], [], "a round proposed 4 tokens, of which 4 were judged and 5 accepted"),
        ([asdict(decoded_record(0, [1]))], [], "holds no confidences: the draft has no confidence head"),
        (
            [asdict(decoded_record(0, [1, 1])) | {"proposed": [2, 4], "judged": [2, 4]}],
            [],
            "blocks that were cut: decode with whole blocks",
        ),
        ([asdict(decoded_record(0, [1]))], ["--holdout", "1.5"], "holdout must lie between 0 and 1, got 1.5"),
    ],
)
def test_records_that_cannot_be_calibrated(
    lines: list[Any] | None, options: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    if lines is not None:
        write_jsonl(path, lines)
    with pytest.raises(SystemExit):
        main(["calibrate", "--records", str(path), *options])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert error in line
    assert not (tmp_path / "calibration.json").exists()


def test_a_folder_is_never_replaced_by_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_text("mine")
    row = asdict(decoded_record(0, [1])) | {"confidence": [[0.0] * 4]}
    path = write_jsonl(tmp_path / "rows.jsonl", [row, row | {"conversation": 1}])
    with pytest.raises(SystemExit):
        main(["calibrate", "--records", path, "--output", str(tmp_path / "kept")])
    assert f"{str(tmp_path / 'kept')!r} is a folder: give the file to write" in capsys.readouterr().err
    assert (tmp_path / "kept/file").read_text() == "mine"


@pytest.mark.parametrize(
    ("confidence", "error"),
    [
        ("[[NaN, 0, 0, 0]]", "has confidence[0][0] nan, must be a finite number"),
        ("[[null, 0, 0, 0]]", "has confidence[0][0] None, must be a number"),
        ("[null]", "has confidence[0] None, must be a list"),
        ("[[0, 0]]", "confidence is not one list of K numbers for each round"),
    ],
)
def test_confidences_that_are_none(
    confidence: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps(asdict(decoded_record(0, [1]))).replace('"confidence": null', f'"confidence": {confidence}')
    with pytest.raises(SystemExit):
        main(["calibrate", "--records", write_jsonl(tmp_path / "rows.jsonl", [line])])
    (message,) = capsys.readouterr().err.strip().splitlines()
    assert message.endswith(f"rows.jsonl:1 is no decode record as dspark evaluate writes them: {error}")


def test_one_conversation_cannot_be_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = asdict(decoded_record(0, [1])) | {"confidence": [[0.0] * 4]}
    with pytest.raises(SystemExit):
        main(["calibrate", "--records", write_jsonl(tmp_path / "rows.jsonl", [record])])
    assert "holds 1 conversation(s), which holdout 0.5 cannot split: evaluate more" in capsys.readouterr().err
