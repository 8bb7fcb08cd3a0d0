"""Putting something finished in the place of its predecessor."""

import shutil
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
    """Move a file or folder to `path`. A folder there is moved away first, since a rename cannot overwrite it.

    At every moment one of `path` and `outdated_path(path)` is complete, and the newest that exists is.
    """
    outdated = outdated_path(path)
    if path.is_symlink():
        path.unlink()  # what it points to stays
    elif path.is_dir():
        _delete(outdated)
        path.rename(outdated)
    finished.rename(path)
    _delete(outdated)


def _delete(folder: Path) -> None:
    """Delete a folder, which nobody must find half deleted."""
    doomed = folder.with_name(f".{folder.name}.deleting")
    shutil.rmtree(doomed, ignore_errors=True)
    if folder.exists():
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
