"""Putting something finished in the place of its predecessor."""

import shutil
from pathlib import Path


def replace_path(finished: Path, path: Path) -> None:
    """Move a file or folder to `path`. A folder there is moved away first, since a rename cannot overwrite it."""
    outdated = path.with_name(f".{path.name}.outdated")
    shutil.rmtree(outdated, ignore_errors=True)
    if path.is_dir():
        path.rename(outdated)
    finished.rename(path)
    shutil.rmtree(outdated, ignore_errors=True)
