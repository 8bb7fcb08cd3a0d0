import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets import Dataset

from chat_helpers import chat, write_jsonl
from chat_helpers import datasets_cache as datasets_cache
from dspark_lightning.datamodules import source as source_module
from dspark_lightning.datamodules.rows import BadRow
from dspark_lightning.datamodules.source import Source, load_source

ROWS = [chat(f"q{i}", f"a{i}") for i in range(5)]


def records(source: Source) -> list[object]:
    batch = source.table[:]
    return [source.record(batch, i) for i in range(len(source.table))]


def test_jsonl_with_slices_keeps_the_line_numbers(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS[:2], "", *ROWS[2:]])
    source = load_source("train_data", path, "train[1:4]")
    assert records(source) == [ROWS[1], None, ROWS[2]]
    assert source.row_ids.tolist() == [1, 2, 3]
    assert source.place(3) == f"{path}:4"


def test_slices_may_be_added(tmp_path: Path) -> None:
    source = load_source("train_data", write_jsonl(tmp_path / "a.jsonl", ROWS), "train[:1]+train[80%:]")
    assert records(source) == [ROWS[0], ROWS[4]]
    assert source.row_ids.tolist() == [0, 4]


def test_rows_of_different_fields_and_line_separators_inside_strings(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"b": [1, "x"], "a": "one"}, {"c": "left\u2028right\x85"}]
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert records(load_source("train_data", str(path), "train")) == rows


def test_json_array(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS, indent=1))
    source = load_source("train_data", str(path), "train[3:]")
    assert records(source) == ROWS[3:]
    assert source.place(3) == f"{path}, row 4"
    assert source.table.cache_files  # so that what is made of it is found again


def test_json_array_behind_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("\ufeff" + json.dumps([chat("a", "b")]), encoding="utf-8")
    source = load_source("train_data", str(path), "train")
    assert records(source) == [chat("a", "b")] and source.place(0) == f"{path}, row 1"


def test_a_file_is_counted_once_however_many_rows_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        Dataset.from_dict({"prompt": ["x", "y"]}).to_parquet(tmp_path / f"{name}.parquet")
    counted: list[str] = []

    def count(file: str) -> int:
        counted.append(file)
        return 2

    monkeypatch.setattr(source_module, "_parquet_rows", count)
    source = load_source("train_data", f"{tmp_path}/*.parquet", "train")
    assert [source.place(row) for row in (0, 2, 3)] == [
        f"{tmp_path}/a.parquet, row 1",
        f"{tmp_path}/b.parquet, row 1",
        f"{tmp_path}/b.parquet, row 2",
    ]
    assert counted == [f"{tmp_path}/a.parquet"]


def test_parquet(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    Dataset.from_list(ROWS).to_parquet(path)
    source = load_source("train_data", path, "train[:2]")
    assert records(source) == ROWS[:2]
    assert source.place(1) == f"{path}, row 2"


def test_glob_names_the_file_of_a_row(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", ROWS[2:])
    write_jsonl(tmp_path / "a.jsonl", ROWS[:2])
    source = load_source("train_data", str(tmp_path / "*.jsonl"), "train")
    assert records(source) == ROWS
    assert [source.place(row) for row in (1, 2, 4)] == [
        f"{tmp_path}/a.jsonl:2",
        f"{tmp_path}/b.jsonl:1",
        f"{tmp_path}/b.jsonl:3",
    ]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS[:1])
    load_source("train_data", path, "train")
    write_jsonl(tmp_path / "a.jsonl", ROWS[1:2])  # of the same size
    os.utime(path, (1, 1))
    assert records(load_source("train_data", path, "train")) == ROWS[1:2]


def test_of_a_file_that_grows_only_what_was_there_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(write_jsonl(tmp_path / "a.jsonl", ROWS[:2]))
    read = source_module._lines

    def append_then_read(file: str, size: int) -> Iterator[bytes]:
        with path.open("a") as stream:
            stream.write(json.dumps(ROWS[2]) + "\n")
        return read(file, size)

    monkeypatch.setattr(source_module, "_lines", append_then_read)
    grown = load_source("train_data", str(path), "train")
    monkeypatch.undo()
    assert records(grown) == ROWS[:2]
    assert records(load_source("train_data", str(path), "train")) == ROWS[:3]  # not out of the cache


def test_files_that_grow_keep_their_line_numbers(tmp_path: Path) -> None:
    first = Path(write_jsonl(tmp_path / "a.jsonl", ROWS[:2]))
    write_jsonl(tmp_path / "b.jsonl", ROWS[2:])
    source = load_source("train_data", str(tmp_path / "*.jsonl"), "train")
    with first.open("a") as stream:
        stream.write("{}\n{}\n{}\n")
    assert source.place(2) == f"{tmp_path}/b.jsonl:1"


def test_a_line_that_is_finished_meanwhile_is_read_as_far_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"[1]\n[22]\n")
    assert list(source_module._lines(str(path), 6)) == [b"[1]\n", b"[2"]


def test_a_torn_last_line_is_one_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1])[:20])
    source = load_source("train_data", str(path), "train")
    assert source.record(source.table[:], 0) == ROWS[0]
    with pytest.raises(BadRow, match=r"^not JSON: Unterminated string"):
        source.record(source.table[:], 1)
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1]))  # whole, without the newline
    assert records(load_source("train_data", str(path), "train")) == ROWS[:2]


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        (b'{"messages": [}', "not JSON", r"^not JSON: Expecting value \(column 15\)$"),
        (b'{"a": "\xfc"}', "not UTF-8", r"^not UTF-8: byte 0xfc \(column 8\): invalid start byte$"),
        (b'{"a": "\\\xfc"}', "not UTF-8", "byte 0xfc"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not JSON", "^not JSON that can be read: Exceeds the limit"),
        (b"[" * 100_000, "not JSON", "^not a row: JSON nested too deeply$"),
        (b"null", "null row", "^the row is null$"),
    ],
)
def test_a_line_that_cannot_be_read_leaves_the_others(tmp_path: Path, line: bytes, kind: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(ROWS[0]).encode() + b"\n" + line + b"\n" + json.dumps(ROWS[1]).encode() + b"\n")
    source = load_source("train_data", str(path), "train")
    batch = source.table[:]
    assert [source.record(batch, i) for i in (0, 2)] == ROWS[:2]
    with pytest.raises(BadRow, match=message) as error:
        source.record(batch, 1)
    assert error.value.kind == kind


@pytest.mark.parametrize(
    ("data", "split", "message"),
    [
        ("missing.jsonl", "train", r"^val_data 'missing.jsonl', split 'train': no such file: expected .jsonl"),
        ("{dir}/no/where", "train", "no such file"),
        ("{dir}/*.parq", "train", "no such file"),
        ("{dir}/empty.jsonl", "train", r"the file \S+empty.jsonl is empty$"),
        ("{dir}/a.jsonl", "test", "files have the one split 'train'$"),
        ("{dir}/a.jsonl", "train[", "Unrecognized instruction format"),
        ("{dir}/a.jsonl", "train[5:]", r"split 'train\[5:\]' holds no row of 5$"),
        ("{dir}/a.txt", "train", r"expected files of one kind, .jsonl, .json, .parquet"),
        ("{dir}/latin.json", "train", "'utf-8' codec can't decode byte"),
        ("{dir}/broken.parquet", "train", "Parquet magic bytes not found"),
        ("nobody/nothing", "train", "^val_data 'nobody/nothing', split 'train': .*nobody/nothing"),
    ],
)
def test_unreadable_data_is_named_in_one_line(tmp_path: Path, data: str, split: str, message: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    write_jsonl(tmp_path / "empty.jsonl", [])
    write_jsonl(tmp_path / "a.txt", ROWS)
    (tmp_path / "latin.json").write_bytes('[{"a": "ü"}]'.encode("latin-1"))
    (tmp_path / "broken.parquet").write_bytes(b"not a parquet file")
    with pytest.raises(ValueError, match=message) as error:
        load_source("val_data", data.format(dir=tmp_path), split)
    assert "\n" not in str(error.value)
