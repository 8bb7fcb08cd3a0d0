"""The tiny target that ships with the package, and chats that it answered.

A Qwen3 of 1.4 million parameters with its own tokenizer (1,024 tokens, among them an unused `<|mask|>`), trained on
generated chats. It is what `target: embedded` and a data path of `embedded` stand for. It is made by
`scripts/build_embedded_target.py` of the source repository.
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
    if split not in ("train", "heldout"):
        raise ValueError(f"the embedded data has the splits 'train' and 'heldout', got {split!r}")
    return _ASSETS / f"{split}.jsonl"
