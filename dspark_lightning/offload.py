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
    if not device_map or "meta" in (device_map.values() if isinstance(device_map, dict) else (device_map,)):
        raise ValueError(
            f"device_map {device_map!r} gives the target no device: must be 'auto', a device such as 'cuda:0', "
            "or a mapping from module names to devices"
        )


def check_placed_modules(device_map: object, model: nn.Module) -> None:
    """Refuse a mapping that names modules the target does not have: accelerate would pass over them.

    Raises:
        ValueError: names the module, and those there are at the top.
    """
    names = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    for name in device_map if isinstance(device_map, dict) else ():
        if name not in names:
            tops = ", ".join(name for name, _ in model.named_children())
            raise ValueError(f"device_map places {name!r}, which {type(model).__name__} does not have: it has {tops}")


@contextmanager
def onloaded(module: nn.Module) -> Iterator[None]:
    """Bring the weights of `module` itself, not those of its children, back for the body."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        yield
        return
    try:
        hook.pre_forward(module)
    except KeyError as error:
        raise ValueError(
            f"device_map offloads {error.args[0]!r}, which shares its memory with another weight and is not stored by "
            "itself: place both on one device"
        ) from error
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
