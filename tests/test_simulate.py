"""Simulated serving: small cases worked out by hand, and the ends of the scale."""

import re
from typing import Any

import numpy as np
import pytest

from dspark_lightning.decoding.records import AnswerRecord
from dspark_lightning.decoding.simulate import ServingResult, simulate_serving
from dspark_lightning.decoding.sps import SpsCurve
from dspark_lightning.decoding.traces import build_traces
from schedule_helpers import calibrated_records, curve, record

FLAT = SpsCurve([1], [10.0], 4096)


def simulated(records: list[AnswerRecord], sps: SpsCurve, users: int, **options: Any) -> dict[str, ServingResult]:
    """The results at so many users, by policy."""
    results = simulate_serving(build_traces(records), sps, users, **options)
    return {result.policy: result for result in results if result.concurrency == users}


def test_one_kind_of_round_by_hand() -> None:
    """Of three drafted tokens two are accepted, with confidences 0.9, 0.6, 0.4; B tokens take B / 10 seconds."""
    sps = SpsCurve([1, 100], [10.0, 0.1], 100)
    found = simulated([record([2] * 5, [3] * 5, [[0.9, 0.6, 0.4]] * 5)], sps, users=2)
    speed = {name: result.tokens_per_second for name, result in found.items()}
    assert speed == pytest.approx(
        {
            "no draft": 2 * 1 / 0.2,
            "fixed 1": 2 * 2 / 0.4,
            "fixed 2": 2 * 3 / 0.6,
            "fixed 3": 2 * 3 / 0.8,
            "threshold 0.3": 2 * 3 / 0.8,
            "threshold 0.5": 2 * 3 / 0.6,
            "threshold 0.7": 2 * 2 / 0.4,
            "scheduler": 2 * 1 / 0.2,  # theta: (2 + 0.9) / 0.3 < 2 / 0.2
            "scheduler, asynchronous": 2 * 1 / 0.2,
        }
    )
    assert found["fixed 3"] == ServingResult(2, "fixed 3", pytest.approx(7.5), pytest.approx(3.75), 3.0, 2.0)


@pytest.mark.parametrize(
    ("third", "length"),
    [(0.4, 3), (0.2, 2)],  # theta with three tokens: 2.656 / 1.4 = 1.897 or 2.548 / 1.4 = 1.820
)
def test_the_scheduler_stops_where_throughput_falls_by_hand(third: float, length: int) -> None:
    """B tokens take 1 + B / 10 seconds, so theta goes 1 / 1.1 = 0.909, 1.9 / 1.2 = 1.583, 2.44 / 1.3 = 1.877, ..."""
    sps = SpsCurve([1, 11], [1 / 1.1, 1 / 2.1], 100)
    found = simulated([record([2] * 5, [3] * 5, [[0.9, 0.6, third]] * 5)], sps, users=1)
    assert found["scheduler"].verified_per_request == length
    assert found["scheduler"].tokens_per_second == pytest.approx(3 / (1.1 + length / 10))


def test_answers_end_where_they_ended() -> None:
    """An accepted stop token has nothing behind it; where a block was short, no policy verifies more."""
    stopped = record([3, 2], [3, 3], None, new_tokens=1 + 4 + 2, judged=[3, 2])
    found = simulated([stopped], FLAT, users=1)
    assert found["no draft"].tokens_per_second == pytest.approx(10)
    assert found["fixed 1"].tokens_per_second == pytest.approx(10 * 2)  # the stop token comes second
    assert found["fixed 3"].tokens_per_second == pytest.approx(10 * (4 + 2) / 2, rel=1e-3)
    short = record([3, 1], [3, 1], None)
    found = simulated([short], FLAT, users=1)
    assert found["fixed 3"].verified_per_request == pytest.approx(2, rel=1e-3)


def test_the_asynchronous_limit_is_two_steps_old() -> None:
    """Rounds are sure and unsure in turns of two: with what it knew two steps before it is wrong at every one."""
    sure, unsure = [0.999] * 2, [0.001] * 2
    rounds = [sure, sure, unsure, unsure] * 500
    accepted = [2, 2, 0, 0] * 500
    sps = SpsCurve([1, 2, 3], [1.0, 0.8, 0.7], 3)
    found = simulated([record(accepted, [2] * 2000, rounds)], sps, users=1)
    exact, late = found["scheduler"], found["scheduler, asynchronous"]
    assert (exact.accepted_per_request, exact.verified_per_request) == pytest.approx((1.0, 1.0), abs=0.01)
    assert (late.accepted_per_request, late.verified_per_request) == pytest.approx((0.0, 1.0), abs=0.01)


def test_where_tokens_are_free_the_scheduler_verifies_whole_blocks() -> None:
    found = simulated(calibrated_records(answers=20), FLAT, users=16)
    assert found["scheduler"].verified_per_request == 7
    for name in ("scheduler", "scheduler, asynchronous"):
        assert found[name].tokens_per_second == pytest.approx(found["fixed 7"].tokens_per_second)


def test_where_tokens_are_dear_the_scheduler_verifies_none() -> None:
    sps = SpsCurve([1, 2048], [1.0, 1 / 2048], 2048)  # as many seconds as tokens
    found = simulated(calibrated_records(answers=20), sps, users=16)
    assert found["scheduler"].verified_per_request == 0
    assert found["scheduler"].tokens_per_second == pytest.approx(found["no draft"].tokens_per_second)


def test_with_calibrated_confidences_no_fixed_length_is_better_at_any_load() -> None:
    traces = build_traces(calibrated_records())
    results = simulate_serving(traces, curve(), 256)
    levels = {result.concurrency for result in results}
    assert sorted(levels) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    best_lengths = set()
    for users in levels:
        speed = {result.policy: result.tokens_per_second for result in results if result.concurrency == users}
        fixed = {name: value for name, value in speed.items() if name.startswith(("fixed", "no draft"))}
        best_lengths.add(max(fixed, key=lambda name: fixed[name]))
        assert speed["scheduler"] >= 0.99 * max(fixed.values())
        assert speed["scheduler, asynchronous"] >= 0.9 * max(fixed.values())
    assert len(best_lengths) > 2  # no single length is right for all loads


def test_the_same_seed_gives_the_same_results() -> None:
    traces = build_traces(calibrated_records(answers=3, rounds=5))
    first, again, other = (simulate_serving(traces, curve(), 2, seed=seed) for seed in (3, 3, 4))
    assert first == again and first != other


def test_steps_are_cut_to_the_largest_batch() -> None:
    """Four users with room for six drafted tokens: two of them verify two tokens, two of them one."""
    found = simulated([record([3] * 5, [3] * 5, None)], SpsCurve([1], [10.0], 10), users=4)
    assert found["fixed 1"].verified_per_request == 1
    assert found["fixed 3"].verified_per_request == 1.5
    assert found["fixed 3"].tokens_per_second == pytest.approx(10 * (4 + 6))


def test_levels_end_at_the_largest_batch() -> None:
    results = simulate_serving(build_traces([record([1], [1], None)]), SpsCurve([1], [1.0], 5), 256)
    assert sorted({result.concurrency for result in results}) == [1, 2, 4, 5]


def test_temperatures_divide_the_logits() -> None:
    traces = build_traces([record([1], [2], [[0.9, 0.5]])], temperatures=[2.0, 3.0])
    assert traces.confidence is not None
    assert traces.confidence[0] == pytest.approx([0.75, 0.5])  # odds of 9, then of their root


def test_without_confidences_only_fixed_lengths_are_tried() -> None:
    assert set(simulated([record([1], [2], None)], FLAT, users=1)) == {"no draft", "fixed 1", "fixed 2"}


@pytest.mark.parametrize(
    ("records", "error"),
    [
        ([record([], [], [])], "the decode records hold no drafted token"),
        ([record([0, 1, 0], [3, 1, 3], None)], "conversation 0, turn 0 of 'made_up' has blocks that were cut: decode"),
        ([record([0, 0, 1], [3, 1, 1], None)], "has blocks that were cut: decode with whole blocks"),
        ([record([1], [3], None, new_tokens=9)], "has 9 new tokens, but its rounds gave 3"),
        ([record([1], [2], [[0.5] * 2]), record([1], [3], [[0.5] * 3])], "confidences of 2 and of 3 tokens"),
    ],
)
def test_records_that_cannot_be_replayed_are_refused(records: list[AnswerRecord], error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        build_traces(records)


def test_blocks_that_shorten_towards_the_end_are_whole() -> None:
    traces = build_traces([record([3, 0, 0, 0], [3, 2, 1, 0], None)])
    assert traces.proposed.tolist() == [3, 2, 1, 0] and traces.gained.tolist() == [4, 1, 1, 1]
    assert [each.tolist() for each in traces.answers] == [[0, 1, 2, 3]]


def test_temperatures_of_another_draft_are_refused() -> None:
    with pytest.raises(ValueError, match="3 temperatures do not fit blocks of 2 tokens"):
        build_traces([record([1], [2], [[0.5, 0.5]])], temperatures=[1.0] * 3)


def test_no_users_are_refused() -> None:
    with pytest.raises(ValueError, match="max_concurrency must be 1 or more, got 0"):
        simulate_serving(build_traces([record([1], [2], None)]), FLAT, 0)


def test_confidence_is_exact_for_large_logits() -> None:
    sure = record([1], [2], None)
    traces = build_traces([AnswerRecord(**{**vars(sure), "confidence": [[800.0, -800.0]]})])
    assert traces.confidence is not None and np.array_equal(traces.confidence[0], [1.0, 0.0])
