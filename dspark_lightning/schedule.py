"""Learning-rate schedule: linear warmup, then a cosine down to a fraction of the peak."""

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine_factor(step: int, total_steps: int, warmup_ratio: float, min_lr_ratio: float) -> float:
    """Factor on the peak learning rate for optimizer step `step` (0-based).

    Args:
        step: steps taken so far.
        total_steps: steps of the whole run.
        warmup_ratio: share of the steps spent on the linear rise; its first step already has a rate above 0.
        min_lr_ratio: factor that the cosine reaches at `total_steps`.
    """
    warmup_steps = round(warmup_ratio * total_steps)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def warmup_cosine(optimizer: Optimizer, total_steps: int, warmup_ratio: float, min_lr_ratio: float) -> LambdaLR:
    """Scheduler over `warmup_cosine_factor`, stepped once per optimizer step."""
    return LambdaLR(optimizer, lambda step: warmup_cosine_factor(step, total_steps, warmup_ratio, min_lr_ratio))


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each group of parameters, as they are now."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def restore_settings(optimizer: Optimizer, scheduler: LambdaLR, settings: list[dict[str, Any]]) -> None:
    """Give an optimizer that a checkpoint has changed its own settings back, at the scheduler's place in the schedule.

    Args:
        optimizer: whose groups are changed.
        scheduler: of its learning rates.
        settings: what `group_settings` returned before the checkpoint was loaded.
    """
    scheduler.base_lrs = [group["initial_lr"] for group in settings]
    factor = scheduler.lr_lambdas[0](scheduler.last_epoch)
    for group, configured in zip(optimizer.param_groups, settings, strict=True):
        group.update(configured)
        group["lr"] = configured["initial_lr"] * factor
