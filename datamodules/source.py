"""Where rows come from: JSON Lines, JSON or parquet files, the embedded rows, or a data set of the Hugging Face hub.

JSON Lines are read as lines of text and decoded row by row: a schema guessed from the first rows would refuse, or
fill up, rows that differ, and a malformed line could not be named.
"""

import glob
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import Dataset, ReadInstruction, load_dataset

from dspark_lightning.datamodules.rows import BadRow
from dspark_lightning.embedded import embedded_data

_SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Source:
    """The rows of one data argument.

    Attributes:
        name: As given, with the split.
        table: One line of JSON a row (column `text`), or the columns of the rows.
        row_ids: [len(table)] int64, index of each row in its whole, unsliced source.
        place: Names a row for people, from its row id.
    """

    name: str
    table: Dataset
    row_ids: np.ndarray[Any, np.dtype[np.int64]]
    place: Callable[[int], str]
    is_json: bool

    def record(self, batch: dict[str, list[Any]], i: int) -> object:
        """Row i of a batch of the table; None for a blank line.

        Raises:
            BadRow: The line is not JSON.
        """
        if not self.is_json:
            return {column: values[i] for column, values in batch.items()}
        line = batch["text"][i].strip("\ufeff \t\r\n")
        try:
            return json.loads(line) if line else None
        except json.JSONDecodeError as error:
            raise BadRow(f"not JSON: {error.msg} (column {error.colno})") from error
        except RecursionError as error:
            raise BadRow("not a row: JSON nested too deeply") from error


def load_source(argument: str, data: str, split: str, embedded_split: Literal["train", "heldout"] = "train") -> Source:
    """Open the rows that `data` names.

    Args:
        argument: Name of the argument that `data` was given as, for errors.
        data: Path or glob of .jsonl, .json or .parquet files, "embedded", or a hub id, `org/name` or `org/name:config`.
        split: Split with an optional slice, such as "train[:370]" or "train[:10%]"; files have the one split "train".
        embedded_split: What "embedded" stands for.

    Raises:
        ValueError: Nothing can be read there, there are no rows, or the split is not there; one line.
    """
    path = os.path.expanduser(str(embedded_data(embedded_split)) if data == "embedded" else data)
    if os.path.isfile(path):  # also one whose name holds characters that a glob reads
        files = [path]
    else:
        files = sorted(glob.glob(path, recursive=True)) if not os.path.isdir(path) else []
    split_name = split.split("[")[0]
    try:
        if files:
            table, place = _load_files(files, split_name)
        else:
            _refuse_missing_file(path)
            table, place = _load_hub(path, split_name), lambda row: f"{data}, {split_name} row {row + 1}"
        slices = ReadInstruction.from_spec(split).to_absolute({split_name: len(table)})
    except Exception as error:  # datasets raises a dozen kinds, down to OSError and pyarrow's
        raise ValueError(f"{argument} {data!r}, split {split!r}: {_reason(error)}") from error
    row_ids = np.concatenate([np.arange(s.from_ or 0, len(table) if s.to is None else s.to) for s in slices])
    if not len(row_ids):
        raise ValueError(f"{argument} {data!r}: split {split!r} holds no row of {len(table)}")
    if len(row_ids) < len(table):
        table = table.select(row_ids)
    name = f"embedded {embedded_split}" if data == "embedded" else data
    is_json = bool(files) and not files[0].endswith(".parquet")
    return Source(f"{name} [{split}]", table, row_ids, place, is_json)


def _load_files(files: list[str], split: str) -> tuple[Dataset, Callable[[int], str]]:
    if split != "train":
        raise ValueError("files have the one split 'train'")
    suffixes = {Path(file).suffix for file in files}
    if len(suffixes) > 1 or not suffixes <= set(_SUFFIXES):
        raise ValueError(f"expected files of one kind, {', '.join(_SUFFIXES)}, got {files[0]} ... ({sorted(suffixes)})")
    for file in files:
        if os.path.getsize(file) == 0:
            raise ValueError(f"the file {file} is empty")
    if suffixes == {".parquet"}:
        return load_dataset("parquet", data_files=files, split=split), lambda row: _place(
            files, row, _parquet_rows, ", row "
        )
    if suffixes == {".json"} and all(_is_array(file) for file in files):
        arrays = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
        lines = [json.dumps(row) for rows in arrays for row in rows]
        return Dataset.from_dict({"text": lines}), lambda row: _place(files, row, _array_rows, ", row ")
    return load_dataset("text", data_files=files, split=split), lambda row: _place(files, row, _line_count, ":")


def _load_hub(name: str, split: str) -> Dataset:
    path, _, config = name.partition(":")
    return load_dataset(path, config or None, split=split)


def _refuse_missing_file(path: str) -> None:
    looks_like_path = path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(_SUFFIXES)
    if (looks_like_path or glob.has_magic(path)) and not os.path.isdir(path):
        raise ValueError(
            "no such file: expected .jsonl, .json or .parquet files, a hub id such as org/name, or 'embedded'"
        )


def _is_array(file: str) -> bool:
    with open(file, encoding="utf-8") as stream:
        return stream.read(4096).lstrip("\ufeff \t\r\n").startswith("[")


def _place(files: list[str], row: int, count: Callable[[str], int], separator: str) -> str:
    """Name the file and the row in it (from 1). Counting waits until a row has to be named."""
    for file in files[:-1]:
        rows = count(file)
        if row < rows:
            return f"{file}{separator}{row + 1}"
        row -= rows
    return f"{files[-1]}{separator}{row + 1}"


def _line_count(file: str) -> int:
    with open(file, encoding="utf-8") as stream:
        return sum(1 for _ in stream)


def _array_rows(file: str) -> int:
    return len(json.loads(Path(file).read_text(encoding="utf-8")))


def _parquet_rows(file: str) -> int:
    return len(load_dataset("parquet", data_files=[file], split="train"))


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:  # datasets wraps what went wrong in "An error occurred ..."
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
