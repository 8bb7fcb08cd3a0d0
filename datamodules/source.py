"""Where rows come from: JSON Lines, JSON or parquet files, the embedded rows, a data set of the hub, or a function.

JSON Lines are read as lines of bytes and decoded row by row: a schema guessed from the first rows would refuse, or
fill up, rows that differ, and a malformed line could not be named. Of a file that grows meanwhile, the rows are taken
that were there when reading began.
"""

import codecs
import errno
import glob
import importlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
from datasets import Dataset, Features, Image, IterableDataset, List, ReadInstruction, Value, load_dataset

from dspark_lightning.datamodules.rows import BadRow
from dspark_lightning.embedded import embedded_data

_SUFFIXES = (".jsonl", ".json", ".parquet")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class _RowCounts:
    """How many rows each file has; a file is counted when first asked for, and not again."""

    count: Callable[[str], int]
    known: dict[str, int] = field(default_factory=dict)

    def __call__(self, file: str) -> int:
        if file not in self.known:
            self.known[file] = self.count(file)
        return self.known[file]


def _no_folder(row: int) -> Path | None:
    del row
    return None


_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@dataclass(frozen=True)
class Source:
    """The rows of one data argument.

    Attributes:
        name: As given, with the split.
        table: One line of JSON a row (column `line`, bytes), or the columns of the rows.
        row_ids: [len(table)] int64, index of each row in its whole, unsliced source.
        place: Names a row for people, from its row id.
    """

    name: str
    table: Dataset
    row_ids: np.ndarray[Any, np.dtype[np.int64]]
    place: Callable[[int], str]
    is_json: bool = False
    folder_of: Callable[[int], Path | None] = _no_folder  # where relative paths in a row start, by its row id
    rows: Sequence[Any] | None = None  # of a function; the table then only counts them

    @property
    def fingerprint(self) -> str:
        """The same for the same rows; new each time for what a function returns."""
        return uuid.uuid4().hex if self.rows is not None else str(self.table._fingerprint)

    def record(self, batch: dict[str, list[Any]], i: int) -> object:
        """Row i of a batch of the table; None for a blank line.

        Raises:
            BadRow: The line is not JSON, or the row is null.
        """
        if self.is_json:
            line = batch["line"][i].removeprefix(codecs.BOM_UTF8).strip(b" \t\r\n")
            if not line:
                return None
            record = _decode(line)
        elif self.rows is not None:
            record = self.rows[batch["index"][i]]
        else:
            record = {column: values[i] for column, values in batch.items()}
        if record is None:
            raise BadRow("the row is null", "null row")
        return record


def load_source(argument: str, data: str, split: str, embedded: Path | None = None) -> Source:
    """Open the rows that `data` names.

    Args:
        argument: Name of the argument that `data` was given as, for errors.
        data: Path or glob of .jsonl, .json or .parquet files, "embedded", a hub id, `org/name` or `org/name:config`, or
            the import path of a function without arguments that returns a sequence of rows, `package.module:function`.
        split: Split with an optional slice, such as "train[:370]" or "train[:10%]"; files and functions have the one
            split "train".
        embedded: What "embedded" stands for. Default: the training chats of the embedded target.

    Raises:
        ValueError: Nothing can be read there, there are no rows, or the split is not there; one line.
    """
    embedded = embedded or embedded_data("train")
    path, files = _find_files(data, embedded)
    rows: Sequence[Any] | None = None
    place: Callable[[int], str]
    folder_of: Callable[[int], Path | None] = _no_folder
    split_name = split.split("[")[0]
    try:
        if files:
            table, count, separator = _load_files(files, split_name)
            counts = _RowCounts(count)
            place, folder_of = partial(_place, files, counts, separator), _folders(files, counts)
        elif _FUNCTION.fullmatch(data):
            rows = _call_function(data, split_name)
            table, place = Dataset.from_dict({"index": range(len(rows))}), partial(_numbered, f"{data} row ")
        else:
            _refuse_missing_file(path)
            table, place = _load_hub(path, split_name), partial(_numbered, f"{data}, {split_name} row ")
        slices = ReadInstruction.from_spec(split).to_absolute({split_name: len(table)})
    except Exception as error:  # datasets raises a dozen kinds, down to OSError and pyarrow's
        raise ValueError(f"{argument} {data!r}, split {split!r}: {reason(error)}") from error
    row_ids = np.concatenate([np.arange(s.from_ or 0, len(table) if s.to is None else s.to) for s in slices])
    if not len(row_ids):
        raise ValueError(f"{argument} {data!r}: split {split!r} holds no row of {len(table)}")
    if len(row_ids) < len(table):
        table = table.select(row_ids)
    name = f"embedded {embedded.stem}" if data == "embedded" else data
    is_json = bool(files) and not files[0].endswith(".parquet")
    return Source(f"{name} [{split}]", _undecoded(table), row_ids, place, is_json, folder_of, rows)


@dataclass(frozen=True)
class Stream:
    """The rows of one data argument, read from the first to the last and never held together.

    Attributes:
        name: As given, with the split.
        rows: As those of `Source.table`.
        place: Names a row for people, from its index.
        is_json: Whether a row is one line of JSON.
    """

    name: str
    rows: IterableDataset
    place: Callable[[int], str]
    is_json: bool


def open_stream(argument: str, data: str, split: str, embedded: Path) -> Stream:
    """Open the rows that `data` names for reading as a stream.

    Args:
        argument: Name of the argument that `data` was given as, for errors.
        data: As for `load_source`, but neither a function nor JSON arrays, which are held in memory anyway.
        split: Split, without a slice.
        embedded: What "embedded" stands for.

    Raises:
        ValueError: Nothing can be read there, not as a stream, or the split is not there; one line.
    """
    path, files = _find_files(data, embedded)
    try:
        if files:
            rows, count, separator = _load_files(files, split, streaming=True)
            place = partial(_place, files, _RowCounts(count), separator)
        elif _FUNCTION.fullmatch(data):
            raise ValueError("what a function returns is in memory and cannot be streamed: leave stream_rows out")
        else:
            _refuse_missing_file(path)
            rows, place = _load_hub(path, split, streaming=True), partial(_numbered, f"{data}, {split} row ")
    except Exception as error:
        raise ValueError(f"{argument} {data!r}, split {split!r}: {reason(error)}") from error
    name = f"embedded {embedded.stem}" if data == "embedded" else data
    return Stream(f"{name} [{split}]", rows, place, bool(files) and not files[0].endswith(".parquet"))


def _find_files(data: str, embedded: Path) -> tuple[str, list[str]]:
    """The path that `data` stands for, and the files there; none if it is no path of files."""
    path = os.path.expanduser(str(embedded) if data == "embedded" else data)
    if os.path.isfile(path):  # also one whose name holds characters that a glob reads
        return path, [path]
    return path, sorted(glob.glob(path, recursive=True)) if not os.path.isdir(path) else []


def _folders(files: list[str], count: Callable[[str], int]) -> Callable[[int], Path | None]:
    folders = {Path(file).parent for file in files}
    if len(folders) <= 1:
        return lambda row: next(iter(folders), None)
    return lambda row: Path(_file_and_row(files, row, count)[0]).parent


def _call_function(data: str, split: str) -> Sequence[Any]:
    if split != "train":
        raise ValueError("a function has the one split 'train'")
    module, _, function = data.partition(":")
    rows = getattr(importlib.import_module(module), function)()
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__") or isinstance(rows, Mapping):
        raise ValueError(f"must return a sequence of rows, got {type(rows).__name__}")
    return cast(Sequence[Any], rows)


def _undecoded(table: Dataset) -> Dataset:
    """The table with its pictures as they are stored: whoever needs the pixels decodes them, row by row."""
    for name, feature in table.features.items():
        if isinstance(feature, Image):
            table = table.cast_column(name, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            table = table.cast_column(name, List(Image(decode=False)))
    return table


def _load_files(files: list[str], split: str, streaming: bool = False) -> tuple[Any, Callable[[str], int], str]:
    """The rows of files; what counts the rows of one of them; and what stands between its name and a row's number."""
    if split != "train":
        raise ValueError("files have the one split 'train'")
    stats = [os.stat(file) for file in files]
    suffixes = {Path(file).suffix for file in files}
    if len(suffixes) > 1 or not suffixes <= set(_SUFFIXES):
        raise ValueError(f"expected files of one kind, {', '.join(_SUFFIXES)}, got {files[0]} ... ({sorted(suffixes)})")
    for file, stat in zip(files, stats, strict=True):
        if stat.st_size == 0:
            raise ValueError(f"the file {file} is empty")
    if suffixes == {".parquet"}:
        return load_dataset("parquet", data_files=files, split=split, streaming=streaming), _parquet_rows, ", row "
    is_array = suffixes == {".json"} and all(_is_array(file) for file in files)
    if is_array and streaming:
        raise ValueError(f"{files[0]} is a JSON array, which cannot be streamed: make it JSON Lines")
    # What the generator is given names the cache entry of what it yields.
    now = [(os.path.abspath(file), stat.st_size, stat.st_mtime_ns) for file, stat in zip(files, stats, strict=True)]
    features = Features({"line": Value("large_binary")})
    kind, read = IterableDataset if streaming else Dataset, _array_lines if is_array else _json_lines
    table = kind.from_generator(read, features=features, gen_kwargs={"files": now})
    if is_array:
        return table, _array_rows, ", row "
    sizes = {file: stat.st_size for file, stat in zip(files, stats, strict=True)}
    return table, partial(_line_count, sizes=sizes), ":"


def _json_lines(files: list[tuple[str, int, int]]) -> Iterator[dict[str, bytes]]:
    """The lines of files, each given with its size and the time of its last change."""
    for file, size, _ in files:
        for line in _lines(file, size):
            yield {"line": line}


def _array_lines(files: list[tuple[str, int, int]]) -> Iterator[dict[str, bytes]]:
    """The entries of JSON arrays, a line each; files as for `_json_lines`."""
    for file, *_ in files:
        for row in _array(file):
            yield {"line": json.dumps(row).encode()}


def _lines(file: str, size: int) -> Iterator[bytes]:
    """The lines in the first `size` bytes of a file."""
    with open(file, "rb") as stream:
        while size > 0 and (line := stream.readline(size)):
            size -= len(line)
            yield line


def _decode(line: bytes) -> object:
    try:
        return cast(object, json.loads(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise BadRow(f"not UTF-8: byte 0x{byte:02x} (column {error.start + 1}): {error.reason}", "not UTF-8") from error
    except json.JSONDecodeError as error:
        raise BadRow(f"not JSON: {error.msg} (column {error.colno})", "not JSON") from error
    except RecursionError as error:
        raise BadRow("not a row: JSON nested too deeply", "not JSON") from error
    except ValueError as error:  # an integer of thousands of digits
        raise BadRow(f"not JSON that can be read: {error}", "not JSON") from error


def _load_hub(name: str, split: str, streaming: bool = False) -> Any:
    path, _, config = name.partition(":")
    return load_dataset(path, config or None, split=split, streaming=streaming)


def _refuse_missing_file(path: str) -> None:
    looks_like_path = path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(_SUFFIXES)
    if (looks_like_path or glob.has_magic(path)) and not os.path.isdir(path):
        raise ValueError(
            "no such file: expected .jsonl, .json or .parquet files, a hub id such as org/name, or 'embedded'"
        )


def _is_array(file: str) -> bool:
    with open(file, encoding="utf-8", errors="replace") as stream:
        return stream.read(4096).lstrip("\ufeff \t\r\n").startswith("[")


def _numbered(prefix: str, row: int) -> str:
    return f"{prefix}{row + 1}"


def _place(files: list[str], count: Callable[[str], int], separator: str, row: int) -> str:
    """Name the file and the row in it (from 1). Counting waits until a row has to be named."""
    file, row = _file_and_row(files, row, count)
    return f"{file}{separator}{row + 1}"


def _file_and_row(files: list[str], row: int, count: Callable[[str], int]) -> tuple[str, int]:
    for file in files[:-1]:
        rows = count(file)
        if row < rows:
            return file, row
        row -= rows
    return files[-1], row


def _line_count(file: str, sizes: Mapping[str, int]) -> int:
    return sum(1 for _ in _lines(file, sizes[file]))


def _array_rows(file: str) -> int:
    return len(_array(file))


def _array(file: str) -> list[Any]:
    return cast(list[Any], json.loads(Path(file).read_text(encoding="utf-8-sig")))


def _parquet_rows(file: str) -> int:
    return len(load_dataset("parquet", data_files=[file], split="train"))


def reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    while error.__cause__ is not None:  # datasets wraps what went wrong in "An error occurred ..."
        error = error.__cause__
    if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:  # nothing but the cache is written while reading
        return f"cannot cache its rows in {str(datasets.config.HF_DATASETS_CACHE)!r}: {error.strerror}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
