"""What a layout of draft folders has to say about itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Config = dict[str, Any]
"""A config.json as `json.load` gives it; "own" ones have the fields of `shared_draft_fields` and of the backbone."""
Weights = dict[str, Tensor]
"""Tensors by their names in the file."""


def _as_they_are(weights: Weights) -> Weights:
    return weights


@dataclass(frozen=True)
class Layout:
    """A layout that can be read. What its functions raise goes on behind the name of the file: "has no block_size"."""

    mark: str
    """How its config.json is told, for the error over one that is none."""
    recognises: Callable[[Config], bool]
    own_config: Callable[[Config], Config]
    """From its config to the own one; raises a ValueError over what cannot be used."""
    own_weights: Callable[[Weights], Weights] = _as_they_are
    """From its tensors to those under the names of the draft; raises a ValueError likewise."""
