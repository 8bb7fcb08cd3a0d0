"""What the tests of vision-language targets share: families, pictures, rows. Use `from vlm_helpers import ...`."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers import BatchFeature, PreTrainedModel, ProcessorMixin

from tiny_vlm import TINY_VLMS, build_tiny_vlm


def _importable(name: str) -> bool:
    try:
        return hasattr(transformers, name)
    except ModuleNotFoundError:
        return False


NEEDS_TORCHVISION = pytest.mark.skip(reason="this version of transformers imports the processor with torchvision only")
WITHOUT_TORCHVISION = pytest.mark.skipif(
    find_spec("torchvision") is not None, reason="torchvision resizes images in a slightly different way"
)
FAMILIES = [
    pytest.param(name, marks=() if _importable(vlm.processor) else NEEDS_TORCHVISION) for name, vlm in TINY_VLMS.items()
]
SOME_SIZES = [(56, 56), (84, 28), (28, 28), (200, 100)]


@cache
def tiny_vlm(family: str) -> tuple[PreTrainedModel, ProcessorMixin]:
    """The tiny target and its processor, built once; not to be changed."""
    return build_tiny_vlm(family)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise, the same for the same seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def chat(*parts: str | Image.Image, answer: str | None = None) -> list[dict[str, Any]]:
    """Messages: a question of text and pictures in this order, and perhaps an answer."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    return messages if answer is None else [*messages, {"role": "assistant", "content": answer}]


def process(processor: ProcessorMixin, *rows: list[str | Image.Image]) -> BatchFeature:
    """The tensors of a batch of such questions, padded on the right."""
    texts = [processor.apply_chat_template(chat(*row), tokenize=False) for row in rows]
    images = [[part for part in row if isinstance(part, Image.Image)] for row in rows]
    return processor(images=images if any(images) else None, text=texts, padding=True, return_tensors="pt")
