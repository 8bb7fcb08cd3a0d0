"""The files of a run: rows as they are answered, the finished file, its settings, and the rows that failed.

    OUTPUT                 the answered rows, in the order of the data; there once all were tried
    OUTPUT.partial-N       what process N has answered so far: appended in whole lines and flushed to disk
    OUTPUT.settings.json   what the answers depend on; a run with others is refused
    OUTPUT.failures.jsonl  the rows without an answer, and why

A run takes for done what it finds in OUTPUT and in the partial files, however it ended before. A line that a kill has
cut in the middle counts for nothing.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from dspark_lightning.regeneration.scripts import Failure
from dspark_lightning.replace import check_folder, discard, write_finished, write_text
from dspark_lightning.typed_json import parse


class _Line(NamedTuple):
    path: Path
    start: int  # byte in the file


class OutputFiles:
    """The files of one output.

    Args:
        output: JSON Lines file to write.

    Raises:
        ValueError: it cannot be written there.
    """

    def __init__(self, output: Path) -> None:
        if output.is_dir():
            raise ValueError(f"output {str(output)!r} is a folder: give the JSON Lines file to write")
        check_folder(output.parent)
        self.output = output
        self.settings = output.with_name(f"{output.name}.settings.json")
        self.failures = output.with_name(f"{output.name}.failures.jsonl")
        for path in (self.settings, self.failures, *self.partials()):
            if path.is_dir():
                raise ValueError(f"{str(path)!r} is a folder, but a file of that name is to be written: move it")

    def partial(self, rank: int) -> Path:
        """Where process `rank` puts its rows."""
        return self.output.with_name(f"{self.output.name}.partial-{rank}")

    def partials(self) -> list[Path]:
        """Those there are, also of processes of earlier runs."""
        name = re.compile(re.escape(self.output.name) + r"\.partial-[0-9]+")
        folder = self.output.parent
        return sorted(path for path in folder.iterdir() if name.fullmatch(path.name)) if folder.exists() else []

    def begin(self, settings: Mapping[str, Any], about: Mapping[str, Any]) -> set[str]:
        """Find what has been answered, and note the settings.

        Args:
            settings: what the answers depend on, as plain data.
            about: what else is worth knowing of the run.

        Returns:
            the keys of the rows answered before.

        Raises:
            ValueError: they were answered with other settings, or nobody knows with which; or another run is under
                way.
        """
        for path in self.partials():
            PartialFile(path).close()
        return self.claim(settings, about)

    def claim(self, settings: Mapping[str, Any], about: Mapping[str, Any]) -> set[str]:
        """`begin` once this run writes: another may have begun, or even ended, since it looked."""
        done = set(self._index())
        if done or self.output.exists():
            check_same(self._read_settings(), json.loads(json.dumps(settings)), self.output)
        write_text(self.settings, json.dumps({"settings": settings, **about}, indent=2) + "\n")
        return done

    def finish(self, keys: Iterable[str], failures: Sequence[Failure]) -> int:
        """Put all answered rows into the output, in order, and list those that failed.

        Args:
            keys: of all rows, in the order of the data.
            failures: of all processes.

        Returns:
            how many rows the output holds.
        """
        index = self._index()
        lines = [index[key] for key in keys if key in index]
        if lines and (self.partials() or not self.output.exists()):
            write_finished(self.output, lambda path: _copy_lines(lines, path))
        self.list_failures(failures)
        for path in self.partials():
            discard(path)
        return len(lines)

    def list_failures(self, failures: Sequence[Failure]) -> None:
        """Write the rows without an answer to a file of their own; without any there is no file."""
        if failures:
            text = "".join(json.dumps(asdict(failure), ensure_ascii=False) + "\n" for failure in failures)
            write_text(self.failures, text)
        else:
            discard(self.failures)

    def _index(self) -> dict[str, _Line]:
        """Where each answered row lies, by its key."""
        index: dict[str, _Line] = {}
        for path in (self.output, *self.partials()):
            if path.is_file():
                index |= {key: _Line(path, start) for key, start in _keys(path)}
        return index

    def _read_settings(self) -> dict[str, Any]:
        try:
            settings = parse(self.settings.read_text(encoding="utf-8"))["settings"]
            if not isinstance(settings, dict):
                raise TypeError("no object")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{str(self.output)!r} is there, but {self.settings.name!r} does not tell how it was made: "
                "give another output, or remove it"
            ) from error
        return settings


class PartialFile:
    """Rows as they are answered, each in a line of its own; what is added is on the disk when `append` returns.

    Args:
        path: file to append to; a line that was never finished is removed.

    Raises:
        ValueError: another process is writing it, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, however that ends
        except OSError as error:
            self._file.close()
            raise ValueError(f"{str(path)!r} is being written by another run: wait for it, or end it") from error
        with self._writing():
            self._file.truncate(_whole_lines(path))

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows.

        Raises:
            ValueError: they cannot be written.
        """
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        with self._writing():
            self._file.write(text.encode("utf-8", "backslashreplace"))  # half a surrogate pair becomes JSON's escape
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let others write."""
        with suppress(OSError):  # of rows that `append` could not write, and has said so
            self._file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(f"cannot write {str(self.path)!r}: {error.strerror or error}") from error


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], output: Path) -> None:
    """Refuse to go on with other settings.

    Args:
        before: settings of the answers there are.
        now: settings of this run.
        output: where the answers are.

    Raises:
        ValueError: names the first field that differs, with both values.
    """
    for name in [*now, *(name for name in before if name not in now)]:
        theirs, ours = before.get(name), now.get(name)
        if theirs != ours:
            raise ValueError(
                f"the answers in {str(output)!r} were begun with {name} {theirs!r}, this run has {ours!r}: "
                "give the same, or another output"
            )


def _whole_lines(path: Path) -> int:
    """How many bytes of a file are whole lines."""
    end = path.stat().st_size
    with path.open("rb") as file:
        while end:  # a block at a time, from the back
            start = max(0, end - 65536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def _keys(path: Path) -> Iterable[tuple[str, int]]:
    """Key and first byte of each row; what a kill or a lost disk has left of others is passed over."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            try:
                row = parse(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if isinstance(row, dict) and "id" in row:
                yield str(row["id"]), start
            start += len(line)


def _copy_lines(lines: Sequence[_Line], path: Path) -> None:
    files = {each: each.open("rb") for each in {line.path for line in lines}}
    try:
        with path.open("wb") as output:
            for line in lines:
                files[line.path].seek(line.start)
                output.write(files[line.path].readline())
            output.flush()
            os.fsync(output.fileno())
    finally:
        for file in files.values():
            file.close()
