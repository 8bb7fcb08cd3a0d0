"""Whether the bytes of a checkpoint are those that were written.

torch puts a CRC-32 of all it writes into its files, which are zip archives, and does not look at it when it reads. A
sharded folder holds one such archive for every piece of a tensor.
"""

import io
import zipfile
from pathlib import Path
from typing import NamedTuple

from dspark_lightning.sharded_checkpoint import META, stored_pieces


class _Archive(NamedTuple):
    file: Path
    start: int = 0  # first byte in the file
    length: int | None = None  # None for all of it


def check_content(path: Path, share: int = 0, shares: int = 1) -> None:
    """Read a checkpoint from end to end.

    Args:
        path: of a file or a sharded folder, which `read_checkpoint` takes.
        share: of the work, from 0.
        shares: in how many the work is split.

    Raises:
        ValueError: a byte has changed; names the file.
    """
    for archive in _archives(path)[share::shares]:
        problem = _problem(archive)
        if problem is not None:
            raise ValueError(f"the checkpoint {str(path)!r} is damaged: {problem}; take another one")


def _archives(path: Path) -> list[_Archive]:
    if not path.is_dir():
        return [_Archive(path)]
    pieces = sorted({(piece.relative_path, piece.offset, piece.length) for piece in stored_pieces(path)})
    return [_Archive(path / META), *(_Archive(path / name, start, length) for name, start, length in pieces)]


def _problem(archive: _Archive) -> str | None:
    try:
        with archive.file.open("rb") as file:
            file.seek(archive.start)
            view = file if archive.length is None else io.BytesIO(file.read(archive.length))
            with zipfile.ZipFile(view) as records:
                broken = records.testzip()
    except Exception as error:  # zipfile raises half a dozen kinds, some with a message of several lines
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return f"{archive.file.name!r} cannot be read ({reason})"
    return None if broken is None else f"{broken!r} in {archive.file.name!r} is not what was written"
