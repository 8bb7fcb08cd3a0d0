"""Numbers of an evaluation where conversations, bins and splits tell mistakes apart."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dspark_lightning.tools.calibrate as tool
from dspark_lightning.evaluation.calibration import fit_temperatures
from dspark_lightning.evaluation.reliability import describe
from dspark_lightning.evaluation.rounds import Rounds, gather_rounds, ratio_interval
from dspark_lightning.evaluation.summary import summarise, threshold_sweep
from schedule_helpers import record


def test_the_interval_of_tau_is_over_conversations() -> None:
    """Two conversations, each of rounds that are all alike: means 5 and 7, whatever their number of rounds."""
    alike = [record([value] * 50, [9] * 50, None, conversation=number) for number, value in enumerate((4, 6))]
    summary = summarise(alike, 9)
    assert summary["tau"] == 6
    low, high = summary["tau_interval"]
    assert (high - low) / 2 == pytest.approx(1.96)  # the standard error of the mean of 5 and 7 is 1


def test_conversations_of_two_datasets_are_not_one() -> None:
    both = [record([value] * 4, [2] * 4, None, dataset=name) for name, value in (("a", 0), ("b", 2))]
    assert summarise(both, 2)["tau_interval"] is not None
    assert gather_rounds(both, 2).conversation.tolist() == [0] * 4 + [1] * 4


def test_conversations_without_rounds_do_not_count_in_an_interval() -> None:
    top, below, which = np.array([0.0, 2.0, 0.0]), np.array([1.0, 1.0, 0.0]), np.array([0, 1, 2])
    low, high = ratio_interval(top, below, which, -9, 9) or (0, 0)
    assert (high - low) / 2 == pytest.approx(1.96 * np.sqrt(2 * 2 / 1) / 2)


def test_the_calibration_error_weighs_twenty_bins_by_their_counts() -> None:
    """Nine predictions of 0.52 that come true, one of 0.58 that does not: two bins of 0.05, one of 0.1."""
    probs, happened = np.array([0.52] * 9 + [0.58]), np.array([True] * 9 + [False])
    assert describe(probs, happened)["ece"] == pytest.approx(0.9 * 0.48 + 0.1 * 0.58, abs=1e-6)


def test_thresholds_verify_no_more_than_was_proposed() -> None:
    short = record([1, 1], [2, 1], [[0.9, 0.9], [0.9, 0.9]])
    sweep = threshold_sweep(gather_rounds([short], 2))
    assert sweep is not None and sweep[0]["verified_per_round"] == 1.5


def test_of_equally_good_temperatures_the_nearest_to_one_is_taken() -> None:
    """A logit of 0 is a half whatever it is divided by."""
    rounds = Rounds(np.arange(4), *(np.array([1] * 4), np.array([1] * 4), np.array([0, 1, 0, 1])), np.zeros((4, 1)), 1)
    assert fit_temperatures(rounds).tolist() == [1.0]


def test_what_is_fitted_on_and_measured_on_are_other_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each conversation has a confidence of its own, which tells where its rounds went."""
    marks = [0.1 + 0.08 * i for i in range(10)]
    path = tmp_path / "records.jsonl"
    rows = [vars(record([1] * 6, [1] * 6, [[mark]] * 6, conversation=i)) for i, mark in enumerate(marks)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen: dict[str, Any] = {}
    real = tool.fit_and_measure

    def spy(fit: Rounds, test: Rounds, names: str) -> dict[str, Any]:
        seen.update(fit=fit, test=test)
        return real(fit, test, names)

    monkeypatch.setattr(tool, "fit_and_measure", spy)
    tool.calibrate(path, holdout=0.3)
    fit, test = (set(np.asarray(seen[name].confidence)[:, 0].tolist()) for name in ("fit", "test"))
    assert len(fit) == 7 and len(test) == 3 and not fit & test
    assert len(seen["fit"].accepted) == 42 and len(seen["test"].accepted) == 18
