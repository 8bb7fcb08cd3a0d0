"""The curve of steps per second: its file, what lies between its samples, and measuring one."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark_lightning.decoding import sps as sps_module
from dspark_lightning.decoding.sps import SpsCurve, measure_sps, read_sps, write_sps
from dspark_lightning.target import HFDSparkTargetModel
from family_helpers import FAMILIES, build_pair
from tiny_target import build_tiny_target

CURVE = SpsCurve([2, 4, 12], [10.0, 5.0, 1.0], 20)  # 0.1, 0.2 and 1 second


def test_seconds_are_linear_between_samples_and_beyond_the_last() -> None:
    tokens = np.array([1, 2, 3, 4, 8, 12, 16])
    assert CURVE.seconds(tokens) == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.6, 1.0, 1.4])
    assert CURVE.steps_per_second(tokens) == pytest.approx([10, 10, 1 / 0.15, 5, 1 / 0.6, 1, 1 / 1.4])


def test_no_step_is_larger_than_the_largest_batch() -> None:
    assert CURVE.steps_per_second(np.array([20, 21, 1000])) == pytest.approx([1 / 1.8, 0, 0])


def test_beyond_the_last_sample_no_step_is_faster() -> None:
    noisy = SpsCurve([1, 2], [5.0, 10.0], 100)
    assert noisy.seconds(np.array([2, 50])) == pytest.approx([0.1, 0.1])
    assert SpsCurve([4], [10.0], 100).seconds(np.array([1, 50])) == pytest.approx([0.1, 0.1])


def test_the_file_has_three_fields_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sps.json"
    write_sps(path, CURVE)
    assert json.loads(path.read_text()) == {
        "sample_batch_tokens": [2, 4, 12],
        "sample_steps_per_sec": [10.0, 5.0, 1.0],
        "max_batch_tokens": 20,
    }
    assert read_sps(path) == CURVE
    assert [each.name for each in path.parent.iterdir()] == ["sps.json"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"sample_steps_per_sec": [1.0]}, "one entry for each sample, got 3 and 1"),
        ({"sample_batch_tokens": [], "sample_steps_per_sec": []}, "one entry for each sample, got 0 and 0"),
        ({"sample_batch_tokens": [2, 2, 3]}, "sample_batch_tokens must increase from 1 or more, got [2, 2, 3]"),
        ({"sample_batch_tokens": [0, 2, 3]}, "sample_batch_tokens must increase from 1 or more, got [0, 2, 3]"),
        ({"sample_steps_per_sec": [3, 0, 1]}, "sample_steps_per_sec must all be positive, got [3, 0, 1]"),
        ({"sample_steps_per_sec": [3, float("nan"), 1]}, "sample_steps_per_sec must all be positive, got [3, nan, 1]"),
        ({"sample_steps_per_sec": [3, "2", 1]}, "sample_steps_per_sec one of numbers, max_batch_tokens an integer"),
        ({"max_batch_tokens": 0}, "max_batch_tokens must be 1 or more, got 0"),
        ({"max_batch_tokens": None}, "max_batch_tokens an integer, got [2, 4, 12], [10.0, 5.0, 1.0], None"),
        ({"extra": 1}, "it must hold max_batch_tokens, sample_batch_tokens, sample_steps_per_sec, found extra, max_"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    path = tmp_path / "sps.json"
    path.write_text(json.dumps({**vars(CURVE), **changes}))
    with pytest.raises(ValueError, match=re.escape(error)) as raised:
        read_sps(path)
    assert str(raised.value).startswith(f"{str(path)!r} is no SPS curve: ") and "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [None, "{", "\xff"])
def test_a_file_that_cannot_be_read_is_named(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "sps.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=f"^cannot read the SPS curve '{path}': "):
        read_sps(path)


def test_a_list_is_no_curve(tmp_path: Path) -> None:
    (tmp_path / "sps.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"found list$"):
        read_sps(tmp_path / "sps.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_measured(family: str) -> None:
    curve = measure_sps(build_tiny_target(family), users=2, block_size=2, context=5)
    assert curve.sample_batch_tokens == [1, 2, 4, 6] and curve.max_batch_tokens == 6
    assert all(rate > 0 for rate in curve.sample_steps_per_sec)


def test_steps_are_timed_behind_a_filled_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts target tokens, so that the rates are known: and what each step was given."""
    target, _ = build_pair("qwen3")
    fed: list[tuple[int, int]] = []
    lengths: list[int] = []
    decode = HFDSparkTargetModel.decode

    def counted(self: HFDSparkTargetModel, ids: Tensor, cache: dict[str, Any]) -> tuple[Tensor, Tensor]:
        fed.append((ids.shape[0], ids.shape[1]))
        lengths.append(next(iter(cache.values())).get_seq_length())
        return decode(self, ids, cache)

    monkeypatch.setattr(HFDSparkTargetModel, "decode", counted)
    monkeypatch.setattr(sps_module, "_now", lambda device: float(sum(rows * each for rows, each in fed)))
    monkeypatch.setattr(sps_module, "_PREFILL_TOKENS", 12)
    curve = measure_sps(target.model, users=3, block_size=3, context=10)
    assert curve.sample_batch_tokens == [1, 2, 3, 6, 12]
    assert curve.sample_steps_per_sec == pytest.approx([1, 1 / 2, 1 / 3, 1 / 6, 1 / 12])
    # The largest: a context of 10 in pieces of 4, then 9 steps of 4 tokens for each of 3 users.
    assert fed[-12:] == [(3, 4), (3, 4), (3, 2), *[(3, 4)] * 9]
    assert lengths[-12:-9] == [0, 4, 8] and lengths[-9:] == [10 + 4 * step for step in range(9)]


def test_a_smaller_step_is_never_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {1: 2.0, 2: 5.0, 4: 4.0, 8: 8.0}
    monkeypatch.setattr(sps_module, "_median_seconds", lambda model, rows, each, context: times[rows * each])
    curve = measure_sps(build_tiny_target("qwen3"), users=2, block_size=3, context=5)
    assert curve.sample_steps_per_sec == [1 / 2, 1 / 4, 1 / 4, 1 / 8]


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: HFDSparkTargetModel, ids: Tensor, cache: dict[str, Any]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(HFDSparkTargetModel, "decode", fail)
    with pytest.raises(ValueError, match="cpu ran out of memory measuring 1 sequences of 5 tokens: take fewer users"):
        measure_sps(build_tiny_target("qwen3"), users=2, block_size=2, context=5)


def test_nothing_to_measure_is_said() -> None:
    with pytest.raises(ValueError, match="at least 1 user, drafted token and token before, got 0, 2, 5"):
        measure_sps(build_tiny_target("qwen3"), users=0, block_size=2, context=5)


def test_measuring_leaves_the_weights_alone() -> None:
    model = build_tiny_target("qwen3")
    before = copy.deepcopy(model.state_dict())
    measure_sps(model, users=1, block_size=1, context=3)
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)
