"""The tiny target that ships with the package, and its chat data."""

from pathlib import Path
from typing import Literal

_ASSETS = Path(__file__).parent / "assets"


def embedded_path() -> Path:
    """Folder of the tiny target, in Hugging Face layout."""
    return _ASSETS / "target"


def embedded_data(split: Literal["train", "heldout"]) -> Path:
    """JSONL file of chat rows whose answers the tiny target wrote.

    Raises:
        ValueError: an unknown split.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', got {split!r}")
    return _ASSETS / f"{split}.jsonl"
