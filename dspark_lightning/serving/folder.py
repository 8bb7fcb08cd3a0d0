"""An exported draft as it lies on disk, for the checks: nothing of its weights but names, shapes and dtypes is read."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.layouts.files import CONFIG, WEIGHTS
from dspark_lightning.layouts.saved import read_draft_config
from dspark_lightning.pretrained import build_draft_from_config
from dspark_lightning.serving.card import CARD_FILE
from dspark_lightning.serving.record import RECORD_FILE
from dspark_lightning.typed_json import build

EXPORT_FILES = (WEIGHTS, CONFIG, CARD_FILE, RECORD_FILE)
"""All that an export writes; engines read the first two."""

_KINDS: dict[str, Any] = {
    "architectures": list[str],
    "target_layer_ids": list[int],
    "enable_confidence_head": bool,
    "confidence_head_with_markov": bool | None,  # a check of its own misses it
    **dict.fromkeys(("block_size", "markov_rank", "mask_token_id", "num_anchors"), int),
    "num_target_layers": int | None,  # not known of every draft that another tool trained
}
_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


class Stored(NamedTuple):
    """A tensor of the file."""

    shape: tuple[int, ...]
    dtype: str  # as torch names it


@dataclass(frozen=True)
class DraftFolder:
    """What the checks look at."""

    path: Path
    config: dict[str, Any]  # of config.json
    tensors: dict[str, Stored]  # of model.safetensors
    draft: DSparkDraft  # as the config asks for it, on the meta device


def read_folder(path: Path) -> DraftFolder:
    """Read a folder's config and the names, shapes and dtypes of its tensors.

    Raises:
        ValueError: a file that is missing or cannot be read, or a config that describes no draft; names it.
    """
    config = read_draft_config(path)
    tensors = _read_header(path / WEIGHTS)
    for name, kind in _KINDS.items():
        build(kind, config.get(name), f"{name} in {CONFIG}:")
    if config["block_size"] < 1:
        raise ValueError(f"block_size in {CONFIG} is {config['block_size']}, must be 1 or more")
    with torch.device("meta"):
        draft = build_draft_from_config({"confidence_head_with_markov": False, **config})
    return DraftFolder(path, config, tensors, draft)


def stored_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder's weights, one at a time."""
    with safe_open(path / WEIGHTS, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            yield name, file.get_tensor(name)


def stored_tensor(path: Path, name: str) -> Tensor:
    """One of them."""
    with safe_open(path / WEIGHTS, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _read_header(path: Path) -> dict[str, Stored]:
    try:
        with safe_open(path, "pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            return {
                name: Stored(tuple(part.get_shape()), _NAMES.get(part.get_dtype(), part.get_dtype()))
                for name, part in parts.items()
            }
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {str(path)!r}: {error}") from error
