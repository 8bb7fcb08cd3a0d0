"""The tiny targets that ship with the package, and rows that they answered.

A Qwen3 of 1.4 million parameters with its own tokenizer (1,024 tokens, among them an unused `<|mask|>`), trained on
generated chats. It is what `target: embedded` and a data path of `embedded` stand for. It is made by
`scripts/build_embedded_target.py` of the source repository.

A Qwen3-VL of 1.0 million parameters with its own tokenizer (430 tokens, among them an unused `<|mask|>`), trained to
tell what generated pictures show. It is made by `scripts/build_picture_target.py`.
"""

from pathlib import Path
from typing import Literal

_ASSETS = Path(__file__).parent / "assets"


def embedded_path() -> Path:
    """Folder of the tiny target, in Hugging Face layout: weights in bf16, tokenizer with chat template, configs."""
    return _ASSETS / "target"


def embedded_data(split: Literal["train", "heldout"]) -> Path:
    """JSONL file of chat rows whose answers the tiny target wrote; the two splits share no question.

    Args:
        split: "train" (2,400 rows) or "heldout" (200 rows).

    Raises:
        ValueError: another split.
    """
    return _rows(_ASSETS, split)


def embedded_pictures_path() -> Path:
    """Folder of the tiny target that reads pictures: as `embedded_path`, with the files of its processor."""
    return _ASSETS / "pictures" / "target"


def embedded_pictures_data(split: Literal["train", "heldout"]) -> Path:
    """JSONL file of rows with a picture and a question each, which the tiny target that reads pictures answered.

    Args:
        split: "train" (1,200 rows) or "heldout" (150 rows), with other pictures.

    Raises:
        ValueError: another split.
    """
    return _rows(_ASSETS / "pictures", split)


def _rows(folder: Path, split: str) -> Path:
    if split not in ("train", "heldout"):
        raise ValueError(f"the embedded data has the splits 'train' and 'heldout', got {split!r}")
    return folder / f"{split}.jsonl"
