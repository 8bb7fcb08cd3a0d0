"""The first file to look at in a feature cache: what it was made from, and how big it gets."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark_lightning.features.fingerprint import Fingerprint
from dspark_lightning.replace import write_text
from dspark_lightning.typed_json import build, parse

_FILE = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class SplitSize:
    """Rows of a split, and their tokens."""

    rows: int
    tokens: int


@dataclass(frozen=True)
class Manifest:
    """Written once, before the first features; what it promises, the shards beside it fulfil."""

    format: int
    target: str  # its name, for people
    fingerprint: Fingerprint
    splits: dict[str, SplitSize]
    bytes_per_token: int
    pad_token_id: int

    @property
    def owner(self) -> str:
        """Identifies the cache in its shards."""
        return self.fingerprint.identity()

    @property
    def max_length(self) -> int:
        """Of a row, in tokens."""
        return self.fingerprint.max_length or 0


def new_manifest(
    target: str, fingerprint: Fingerprint, splits: dict[str, SplitSize], bytes_per_token: int, pad_token_id: int
) -> Manifest:
    """A manifest in the format of this version."""
    return Manifest(_FORMAT, target, fingerprint, splits, bytes_per_token, pad_token_id)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it, whole or not at all.

    Raises:
        ValueError: it cannot be written.
    """
    write_text(folder / _FILE, json.dumps(asdict(manifest), indent=2) + "\n")


def has_manifest(folder: Path) -> bool:
    """Whether a folder is a feature cache."""
    return (folder / _FILE).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Read a cache's manifest.

    Raises:
        ValueError: there is none, or it cannot be used; names the file.
    """
    path = folder / _FILE
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} is no feature cache: it has no {_FILE}; make one with dspark precompute")
    try:
        content: Any = parse(path.read_text(encoding="utf-8"))
        manifest = build(Manifest, content)
    except (OSError, ValueError) as error:
        raise ValueError(f"the feature cache's {str(path)!r} cannot be used: {error}") from error
    if manifest.format != _FORMAT:
        raise ValueError(
            f"the feature cache {str(folder)!r} has format {manifest.format}, this version reads {_FORMAT}: precompute "
            "into another folder"
        )
    # A split names a folder, in which damaged files are deleted: it must not lead out of the cache.
    if "train" not in manifest.splits or not manifest.splits.keys() <= {"train", "val"} or manifest.pad_token_id < 0:
        raise ValueError(
            f"the feature cache's {str(path)!r} cannot be used: splits {list(manifest.splits)} must hold train and at "
            f"most val beside it, and pad_token_id {manifest.pad_token_id} must not be negative"
        )
    return manifest
