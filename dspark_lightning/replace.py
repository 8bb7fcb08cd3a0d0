"""Putting something finished in the place of its predecessor."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def scratch_path(path: Path) -> Path:
    """Where something is written before it is moved to `path`."""
    return path.with_name(f".{path.name}.writing")


def outdated_path(path: Path) -> Path:
    """Where the folder at `path` lies for the moment in which its successor takes its place.

    Lightning's ckpt_path="last" takes every `last*.ckpt`, so it finds this one too if a run dies at that moment.
    """
    return path.with_name(f"{path.stem}.outdated{path.suffix}")


def replace_path(finished: Path, path: Path) -> None:
    """Move a file or folder to `path`, whatever is there; a link goes, not what it points to.

    A file takes the place of a file at once. Where one of the two is a folder, a rename cannot overwrite, so what is
    there is moved away first: at every moment `path` or `outdated_path(path)` is complete.
    """
    outdated = outdated_path(path)
    if path.is_symlink():
        if finished.is_dir():
            path.unlink()
    elif path.exists() and (path.is_dir() or finished.is_dir()):
        _discard_at_once(outdated)
        path.rename(outdated)
    finished.rename(path)
    _discard_at_once(outdated)


def check_folder(path: Path) -> None:
    """Refuse a folder that could not be written to, before hours of work for it.

    Raises:
        ValueError: a file is in its place or on the way to it, or the place is read-only.
    """
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise ValueError(f"cannot write to {str(path)!r}: {str(there)!r} is a file, give a folder")
    if not os.access(there, os.W_OK):
        raise ValueError(f"cannot write to {str(path)!r}: {str(there)!r} is read-only")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a folder, and have other processes that ask for it wait; not where its file system knows no locks.

    Raises:
        ValueError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ValueError(f"cannot write to {str(folder)!r}: {error.strerror or error}") from error
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_finished(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` write a file, which takes its place at `path` once it is whole.

    Raises:
        ValueError: it cannot be written; names it.
    """
    if path.is_dir():  # it would be replaced, and what is in it lost
        raise ValueError(f"{str(path)!r} is a folder: give the file to write")
    scratch = scratch_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(scratch)
        replace_path(scratch, path)
    except OSError as error:
        raise ValueError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:
        discard(scratch)


def write_text(path: Path, text: str) -> None:
    """`write_finished` for text.

    Raises:
        ValueError: it cannot be written; names it.
    """
    write_finished(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))


def discard(path: Path) -> None:
    """Delete a file or folder, if there is one."""
    shutil.rmtree(path, ignore_errors=True)
    if path.is_file():
        path.unlink()


def _discard_at_once(path: Path) -> None:
    """Delete what nobody must find half deleted."""
    doomed = path.with_name(f".{path.name}.deleting")
    discard(doomed)
    if path.exists():
        path.rename(doomed)
    discard(doomed)
