"""Sequential temperature scaling of confidences (STS, as in the paper).

The temperature T_k of position k divides its confidence logit. Position after position it is chosen from a grid so
that the predicted survival, the product of sigmoid(z_j / T_j) up to k, has the least calibration error.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from dspark_lightning.evaluation.reliability import expected_calibration_error, reliability_bins, sigmoid
from dspark_lightning.evaluation.rounds import Flags, Floats, Rounds
from dspark_lightning.typed_json import build, parse

GRID: Floats = np.unique(np.append(np.geomspace(0.1, 10, 100), 1.0))


def fit_temperatures(rounds: Rounds) -> Floats:
    """Choose the temperatures [K].

    Of equally good ones the nearest to 1 is taken; a position that no round reached keeps 1.

    Raises:
        ValueError: the rounds have no confidences.
    """
    logits = _logits(rounds)
    temperatures = np.ones(rounds.size)
    before = np.ones(len(logits))  # predicted survival up to the position before
    order = GRID[np.argsort(np.abs(np.log(GRID)), kind="stable")]
    for k in range(rounds.size):
        reached = rounds.reached[:, k]
        if not reached.any():
            continue
        happened = rounds.survived[reached, k]
        errors = [expected_calibration_error((before * sigmoid(logits[:, k] / t))[reached], happened) for t in order]
        temperatures[k] = order[int(np.argmin(errors))]
        before = before * sigmoid(logits[:, k] / temperatures[k])
    return temperatures


def predicted_survival(rounds: Rounds, temperatures: Floats | None = None) -> Floats:
    """The predicted probability [R, K] that all tokens up to each position are accepted."""
    logits = _logits(rounds)
    probs = sigmoid(logits if temperatures is None else logits / temperatures)
    return np.cumprod(probs, axis=1, dtype=np.float64)


def survival_errors(rounds: Rounds, temperatures: Floats | None = None) -> list[float | None]:
    """The calibration error of the predicted survival at each position; None where no round reached it."""
    return [
        expected_calibration_error(probs, happened) if len(probs) else None
        for probs, happened in _outcomes(rounds, temperatures)
    ]


def survival_bins(rounds: Rounds, temperatures: Floats | None = None) -> list[list[dict[str, float]]]:
    """The reliability of the predicted survival at each position."""
    return [reliability_bins(probs, happened) for probs, happened in _outcomes(rounds, temperatures)]


def calibrate(fit: Rounds, test: Rounds, dataset: str) -> dict[str, Any]:
    """Fit temperatures on some rounds, measure them on others.

    Args:
        fit: rounds to fit on.
        test: rounds of other conversations.
        dataset: what to call the source of both.

    Returns:
        the content of the temperatures file, whose `ece_before` and `ece_after` are means over positions.
    """
    temperatures = fit_temperatures(fit)
    before, after = survival_errors(test), survival_errors(test, temperatures)
    return {
        "temperatures": temperatures.tolist(),
        "dataset": dataset,
        "num_samples": len(fit.accepted),
        "ece_before": _mean(before),
        "ece_after": _mean(after),
        "ece_before_by_position": before,
        "ece_after_by_position": after,
        "survival_bins_before": survival_bins(test),
        "survival_bins_after": survival_bins(test, temperatures),
    }


def read_temperatures(path: Path) -> list[float]:
    """Read the temperatures of a file that `dspark calibrate` wrote, or another tool in its format.

    Raises:
        ValueError: it cannot be read, or holds none that are positive.
    """
    try:
        values = parse(path.read_text(encoding="utf-8"))["temperatures"]
        temperatures = build(list[float], values, "temperatures")
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{str(path)!r} holds no temperatures as dspark calibrate writes them: {reason}") from error
    if not all(0 < value < math.inf for value in temperatures):
        raise ValueError(f"the temperatures of {str(path)!r} must all be positive, got {temperatures}")
    return temperatures


def _outcomes(rounds: Rounds, temperatures: Floats | None) -> list[tuple[Floats, Flags]]:
    survival, reached, survived = predicted_survival(rounds, temperatures), rounds.reached, rounds.survived
    return [(survival[reached[:, k], k], survived[reached[:, k], k]) for k in range(rounds.size)]


def _logits(rounds: Rounds) -> Floats:
    if rounds.confidence is None:
        raise ValueError("the decode records hold no confidences: the draft has no confidence head to calibrate")
    return rounds.confidence


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
