"""Rows that no run can be made of: the whole line that each ends with."""

import json
from pathlib import Path

import pytest

from bad_input_helpers import chat_rows, refusal, small_fit, write_files

FORMATS = "expected .jsonl, .json or .parquet files, a hub id such as org/name, or 'embedded'"
UNSUPERVISED = json.dumps({"input_ids": [7, 8, 9], "loss_mask": [0, 0, 0]}) + "\n"
NONE_LEFT = "1 rows read, 0 kept (dropped: 1 under 14 supervised tokens), 0 of them cut to max_length"

# File, its content, further settings, and the line.
CASES: dict[str, tuple[str, str | bytes | None, dict[str, object], str]] = {
    "missing": ("rows.jsonl", None, {}, f"train_data 'rows.jsonl', split 'train': no such file: {FORMATS}"),
    "empty": ("rows.jsonl", "", {}, "train_data 'rows.jsonl', split 'train': the file rows.jsonl is empty"),
    "other columns": (
        "rows.jsonl",
        '{"text": "hi"}\n',
        {},
        "rows.jsonl:1: expected messages, conversations, prompt and response, or input_ids and loss_mask; the fields "
        "are ['text'] (1 bad rows, max_bad_rows 0: 1 unknown fields)",
    ),
    "not UTF-8": (
        "rows.jsonl",
        b"\xff\xfe\n",
        {},
        "rows.jsonl:1: not UTF-8: byte 0xff (column 1): invalid start byte (1 bad rows, max_bad_rows 0: 1 not UTF-8)",
    ),
    "no JSON": (
        "rows.jsonl",
        chat_rows(1) + "{nope\n",
        {},
        "rows.jsonl:2: not JSON: Expecting property name enclosed in double quotes (column 2) (1 bad rows, "
        "max_bad_rows 0: 1 not JSON)",
    ),
    "nested too deeply": (
        "rows.jsonl",
        "[" * 100_000 + "\n",
        {},
        "rows.jsonl:1: not a row: JSON nested too deeply (1 bad rows, max_bad_rows 0: 1 not JSON)",
    ),
    "NaN among the ids": (
        "rows.jsonl",
        '{"input_ids": [NaN], "loss_mask": [1]}\n',
        {},
        "rows.jsonl:1: input_ids must be integers and loss_mask 0 or 1 (1 bad rows, max_bad_rows 0: 1 unusable "
        "input_ids)",
    ),
    "a number of 5000 digits": (
        "rows.jsonl",
        '{"input_ids": [' + "9" * 5000 + '], "loss_mask": [1]}\n',
        {},
        "rows.jsonl:1: not JSON that can be read: Exceeds the limit (4300 digits) for integer string conversion: value "
        "has 5000 digits; use sys.set_int_max_str_digits() to increase the limit (1 bad rows, max_bad_rows 0: 1 not "
        "JSON)",
    ),
    "tools nested too deeply": (
        "rows.jsonl",
        json.dumps({"prompt": "a", "response": "b", "tools": "[" * 100_000}) + "\n",
        {},
        "rows.jsonl:1: tools is text that is not JSON: holds JSON that is nested too deeply (1 bad rows, max_bad_rows "
        "0: 1 unusable tools)",
    ),
    "nothing supervised": (
        "rows.jsonl",
        UNSUPERVISED,
        {},
        f"no row is left of train_data rows.jsonl [train]: {NONE_LEFT}; 0 supervised tokens",
    ),
    "no parquet": (
        "rows.parquet",
        b"PAR1junk",
        {"data.init_args.train_data": "rows.parquet"},
        "train_data 'rows.parquet', split 'train': Parquet magic bytes not found in footer. Either the file is "
        "corrupted or this is not a parquet file.",
    ),
    "a text file": (
        "rows.txt",
        "hi",
        {"data.init_args.train_data": "rows.txt"},
        "train_data 'rows.txt', split 'train': expected files of one kind, .jsonl, .json, .parquet, got rows.txt ... "
        "(['.txt'])",
    ),
    "another split": (
        "rows.jsonl",
        chat_rows(),
        {"data.init_args.train_split": "test"},
        "train_data 'rows.jsonl', split 'test': files have the one split 'train'",
    ),
    "a slice behind the end": (
        "rows.jsonl",
        chat_rows(),
        {"data.init_args.train_split": "train[99:]"},
        "train_data 'rows.jsonl': split 'train[99:]' holds no row of 8",
    ),
    "rows of one token": (
        "rows.jsonl",
        chat_rows(),
        {"data.init_args.max_length": 1},
        "max_length must be at least 2, got 1",
    ),
    "batches of nothing": (
        "rows.jsonl",
        chat_rows(),
        {"data.init_args.batch_size": 0},
        "batch_size must be at least 1, got 0",
    ),
    "all rows held out": (
        "rows.jsonl",
        chat_rows(),
        {"data.init_args.val_fraction": 1.0},
        "val_fraction must be at least 0 and below 1, got 1.0",
    ),
    "no template": (
        "rows.jsonl",
        chat_rows(),
        {"data.init_args.chat_template": "no.jinja"},
        "chat_template 'no.jinja': no such file",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_refused_in_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name, content, changes, line = CASES[case]
    write_files({} if content is None else {name: content})
    assert refusal(small_fit(**changes), capsys) == line


def test_a_folder_without_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files({"rows/notes.md": "none"})
    line = refusal(small_fit(data__init_args__train_data="./rows"), capsys)
    assert line.startswith("train_data './rows', split 'train': ") and "rows" in line
