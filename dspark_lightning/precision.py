"""Leaving autocast, where a device has it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from lightning.pytorch import Trainer


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off: what happens inside keeps the dtypes it is given. Some devices (meta) have no autocast."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast gives matrix products here and now; None when it is off."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def target_dtype(trainer: Trainer | None) -> torch.dtype:
    """What a target is loaded in: the half precision of a trainer that has one, else fp32."""
    kind = "32" if trainer is None else trainer.precision.partition("-")[0]
    return {"16": torch.float16, "bf16": torch.bfloat16, "64": torch.float64}.get(kind, torch.float32)
