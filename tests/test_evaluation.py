"""The numbers of an evaluation, worked out by hand from made-up records."""

import math
from typing import Any

import numpy as np
import pytest

from dspark_lightning.decoding.records import AnswerRecord
from dspark_lightning.evaluation.calibration import GRID, calibrate, fit_temperatures, predicted_survival
from dspark_lightning.evaluation.evaluate import evaluation_results, scalars
from dspark_lightning.evaluation.reliability import describe
from dspark_lightning.evaluation.rounds import Rounds, gather_rounds, ratio_interval
from dspark_lightning.evaluation.summary import summarise, threshold_sweep

SURE, UNSURE = math.log(9), -math.log(9)  # confidences 0.9 and 0.1


def record(conversation: int = 0, dataset: str = "d", **changes: Any) -> AnswerRecord:
    """Three rounds with K = 3: all accepted, one accepted, and the stop token accepted at position 2."""
    fields: dict[str, Any] = {
        "dataset": dataset,
        "conversation": conversation,
        "turn": 0,
        "prompt_tokens": 5,
        "new_tokens": 9,
        "proposed": [3, 3, 3],
        "judged": [3, 3, 2],
        "accepted": [3, 1, 2],
        "confidence": [[SURE, SURE, SURE], [SURE, UNSURE, UNSURE], [SURE, SURE, UNSURE]],
        "seconds": 3.0,
        "plain_seconds": 4.5,
        "plain_tokens": 9,
        "same_as_plain": True,
    }
    return AnswerRecord(**(fields | changes))


def test_counts_and_acceptance() -> None:
    summary = summarise([record()], 3)
    assert summary["tau"] == pytest.approx((4 + 2 + 3) / 3)
    assert summary["accepted_lengths"] == [0, 1, 1, 1]
    assert summary["survival"] == pytest.approx([1, 2 / 3, 1 / 3])
    assert summary["tau"] == pytest.approx(1 + sum(summary["survival"]))
    # The third round never came to position 3: it does not count as tried there.
    assert summary["conditional_acceptance"] == pytest.approx([1, 2 / 3, 1])
    assert summary["conditional_counts"] == [3, 3, 1]
    names = ("conversations", "answers", "rounds", "new_tokens", "tokens_drafted", "tokens_verified", "tokens_accepted")
    assert [summary[name] for name in names] == [1, 1, 3, 9, 9, 9, 6]


def test_what_the_records_cannot_tell_is_none() -> None:
    empty = record(proposed=[], judged=[], accepted=[], confidence=None, plain_seconds=None, plain_tokens=None)
    summary = summarise([empty], 3)
    for name in ("tau", "tau_interval", "speedup", "thresholds", "confidence"):
        assert summary[name] is None
    assert summary["survival"] == [None, None, None]
    assert scalars(summary) == {}


def test_speed_is_a_ratio_of_tokens_per_second() -> None:
    slow = record(1, seconds=6.0, plain_seconds=3.0, new_tokens=6, plain_tokens=3)
    speed = summarise([record(), slow], 3)["speedup"]
    assert speed["tokens_per_second"] == pytest.approx((9 + 6) / (3 + 6))
    assert speed["plain_tokens_per_second"] == pytest.approx((9 + 3) / (4.5 + 3))
    assert speed["ratio"] == pytest.approx((15 / 9) / (12 / 7.5))
    assert (speed["low"], speed["high"]) == (pytest.approx(1.05), pytest.approx(1.45))  # of 1.0 and 1.5


def test_thresholds_cut_before_the_first_unsure_token() -> None:
    sweep = threshold_sweep(gather_rounds([record()], 3))
    assert sweep is not None
    by_threshold = {round(row["threshold"] or 0, 2): row for row in sweep}
    whole, cut, none = by_threshold[0.0], by_threshold[0.5], by_threshold[0.95]
    assert (whole["tau"], whole["verified_per_round"], whole["accepted_share"]) == (3, 3, pytest.approx(6 / 9))
    # Kept are 3, 1 and 2 tokens: exactly those that are accepted.
    assert (cut["tau"], cut["verified_per_round"], cut["accepted_share"]) == (3, 2, 1)
    assert (none["tau"], none["verified_per_round"], none["accepted_share"]) == (1, 0, None)
    assert [row["threshold"] for row in threshold_sweep(gather_rounds([record()], 3), 0.9) or []] == [0.9, 0.95]


def test_confidence_against_what_happened() -> None:
    confidence = summarise([record()], 3)["confidence"]
    second = confidence["by_position"][1]  # 0.9 accepted, 0.1 rejected, 0.9 accepted
    assert second["count"] == 3
    assert second["ece"] == pytest.approx(0.1)
    assert second["auc"] == 1
    assert second["brier"] == pytest.approx(0.01)
    assert [(b["count"], b["acceptance"]) for b in second["bins"]] == [(1, 0), (2, 1)]
    assert confidence["by_position"][0]["auc"] is None  # every first token was accepted
    assert confidence["pooled"]["count"] == 7


def test_auc_and_brier_of_coins() -> None:
    """Predictions that say nothing: AUC one half, Brier the variance, no calibration error."""
    probs, happened = np.full(1000, 0.3), np.arange(1000) % 10 < 3
    described = describe(probs, happened)
    assert described["auc"] == pytest.approx(0.5)
    assert described["brier"] == pytest.approx(0.3 * 0.7)
    assert described["ece"] == pytest.approx(0, abs=1e-7)


def test_interval_of_equal_conversations_is_that_of_a_mean() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(2, 1, 400)
    low, high = ratio_interval(values, np.ones(400), np.arange(400), most=8) or (0, 0)
    half = 1.96 * values.std(ddof=1) / 20
    assert (low, high) == (pytest.approx(values.mean() - half), pytest.approx(values.mean() + half))


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Rounds that are alike within a conversation: an interval from the number of rounds alone would miss far more."""
    generator, hits, runs = np.random.default_rng(1), 0, 400
    for _ in range(runs):
        lengths = generator.integers(5, 40, 60)
        rates = generator.beta(2, 2, 60)
        which = np.repeat(np.arange(60), lengths)
        low, high = ratio_interval(generator.random(len(which)) < rates[which], np.ones(len(which)), which) or (0, 0)
        hits += low <= 0.5 <= high
    assert 0.91 < hits / runs < 0.98  # 95 % +- three standard errors, and what 60 conversations cost


def test_an_interval_ends_where_the_ratio_must() -> None:
    values, which = np.array([1.0, 4.0]), np.array([0, 1])
    assert ratio_interval(values, np.ones(2), which, 1, 4) == [1, 4]


def test_one_conversation_has_no_interval() -> None:
    assert ratio_interval(np.ones(5), np.ones(5), np.zeros(5, np.int64)) is None


def test_datasets_and_all_together() -> None:
    results = evaluation_results([record(), record(dataset="e", accepted=[0, 0, 0]), record(1)], 3)
    assert list(results["datasets"]) == ["d", "e"]
    assert results["datasets"]["d"]["rounds"] == 6 and results["datasets"]["e"]["tau"] == 1
    assert results["overall"]["conversations"] == 3
    assert scalars(results["datasets"]["e"])["tau_decode"] == 1


def miscalibrated(temperatures: list[float], count: int, seed: int) -> Rounds:
    """Rounds whose logits are the true ones times a temperature for each position."""
    generator, size = np.random.default_rng(seed), len(temperatures)
    logits = generator.normal(0.5, 1.5, (count, size))
    kept = generator.random((count, size)) < 1 / (1 + np.exp(-logits))
    accepted = np.cumprod(kept, axis=1).sum(1)
    whole = np.full(count, size)
    return Rounds(np.arange(count), whole, whole, accepted, logits * temperatures, size)


def test_sequential_temperature_scaling_finds_the_temperatures() -> None:
    true = [3.0, 0.4, 1.0]
    found = fit_temperatures(miscalibrated(true, 40000, 0))
    assert np.abs(np.log(found / true)).max() < 0.25  # a few steps of a grid whose steps are 0.047


def test_calibration_helps_on_rounds_it_has_not_seen() -> None:
    fit, test = (miscalibrated([3.0, 0.4, 2.0], 20000, seed) for seed in (0, 1))
    result = calibrate(fit, test, "made up")
    assert result["ece_after"] < 0.02 < 0.08 < result["ece_before"]
    assert result["num_samples"] == 20000 and len(result["survival_bins_after"]) == 3
    assert np.mean(result["ece_before_by_position"]) == pytest.approx(result["ece_before"])


def test_the_grid_is_that_of_the_method() -> None:
    assert len(GRID) == 101 and 1.0 in GRID
    assert (GRID.min(), GRID.max()) == (pytest.approx(0.1), pytest.approx(10))


def test_survival_is_the_product_of_scaled_confidences() -> None:
    rounds = gather_rounds([record()], 3)
    survival = predicted_survival(rounds, np.array([1.0, 2.0, 1.0]))
    half = 1 / (1 + math.exp(-SURE / 2))
    assert survival[2] == pytest.approx([0.9, 0.9 * half, 0.9 * half * 0.1])


def test_a_position_that_was_never_reached_keeps_temperature_one() -> None:
    short = record(proposed=[2, 2, 2], judged=[2, 2, 2], accepted=[2, 1, 2])
    assert fit_temperatures(gather_rounds([short], 3))[2] == 1
