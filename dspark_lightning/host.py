"""Small tensors that are needed on the CPU stay there, so that no step waits for the accelerator to hand them back."""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

from torch import Tensor

_NEEDED = ("row_id", "loss_mask", "loss_weights", "attention_mask", "seq_lens", "doc_remaining")

T = TypeVar("T")


class OnHost:
    """A tensor in a box: Lightning and FSDP take every tensor they are given to the accelerator, but no other object.

    Args:
        tensor: on the CPU.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def unboxed(value: T) -> T:
    """The tensor in a box; anything else as it is."""
    return cast(T, value.tensor) if isinstance(value, OnHost) else value


def host_copies(batch: Mapping[str, Any]) -> dict[str, OnHost]:
    """What anchors are sampled from and masks are made of, boxed."""
    return {name: OnHost(batch[name].cpu()) for name in _NEEDED if name in batch}


def boxes_of(batch: Mapping[str, Any]) -> dict[str, OnHost]:
    """The boxes that a batch came with, or new ones."""
    return batch["on_host"] if "on_host" in batch else host_copies(batch)
