"""Warmup, then cosine."""

import math
from itertools import pairwise

import pytest
import torch

from dspark_lightning.schedule import warmup_cosine, warmup_cosine_factor


def factors(total: int, warmup_ratio: float, min_lr_ratio: float) -> list[float]:
    return [warmup_cosine_factor(step, total, warmup_ratio, min_lr_ratio) for step in range(total + 1)]


def test_warmup_is_linear_and_starts_above_zero() -> None:
    assert factors(100, 0.04, 0.1)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_the_cosine_ends_at_its_floor() -> None:
    run = factors(240, 0.04, 0.1)
    assert max(run) == run[10] == 1.0
    assert run[10 + 115] == pytest.approx(0.55)
    assert run[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(run[10:]))


def test_the_cosine_by_formula() -> None:
    expected = [0.2 + 0.8 * (1 + math.cos(math.pi * step / 50)) / 2 for step in range(51)]
    assert factors(50, 0.0, 0.2) == pytest.approx(expected)


@pytest.mark.parametrize(("total", "warmup_ratio"), [(1, 0.04), (1, 1.0), (2, 0.5), (10, 1.0), (10, 0.0)])
def test_short_runs_have_a_usable_rate(total: int, warmup_ratio: float) -> None:
    assert all(0 < factor <= 1 for factor in factors(total, warmup_ratio, 0.1))


def test_steps_past_the_end_stay_at_the_floor() -> None:
    assert warmup_cosine_factor(150, 100, 0.04, 0.1) == pytest.approx(0.1)


def test_the_scheduler_scales_the_peak() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=5.0)
    scheduler = warmup_cosine(optimizer, total_steps=4, warmup_ratio=0.25, min_lr_ratio=0.5)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([2.5, 5.0, 5.0 * 0.875, 5.0 * 0.625, 2.5])
