"""Targets that a `device_map` spreads over devices.

While such a target is not running, accelerate keeps weights off their modules, in memory or on disk, and leaves meta
tensors in their place.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_accelerate_available


def check_device_map(device_map: str | dict[str, int | str]) -> None:
    """Refuse what would leave the target without weights, and what cannot be done here.

    Raises:
        ValueError: names the value and what would be right.
    """
    if not is_accelerate_available():
        raise ValueError(f"device_map {device_map!r} needs the package accelerate: pip install accelerate")
    if not device_map or device_map == "meta":
        raise ValueError(
            f"device_map {device_map!r} gives the target no device: must be 'auto', a device such as 'cuda:0', "
            "or a mapping from module names to devices"
        )


@contextmanager
def onloaded(module: nn.Module) -> Iterator[None]:
    """Bring the weights of `module` itself, not those of its children, back for the body."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        yield
        return
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


def with_weights(module: nn.Module) -> nn.Module:
    """`module` itself, or where its weights are offloaded a shallow copy that holds them."""
    if not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        return module
    with onloaded(module):
        held = copy.copy(module)
        held._parameters = dict(module._parameters)
    return held


def input_device(embedding: nn.Module) -> torch.device:
    """Where the input of `embedding` belongs: an offloaded weight is on the meta device until it is needed."""
    hook = getattr(embedding, "_hf_hook", None)
    device = cast(Tensor, embedding.weight).device if hook is None else hook.execution_device
    return torch.device(device)
