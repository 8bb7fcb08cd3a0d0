"""Whether confidences can be believed: calibration error, ranking and reliability, by torchmetrics.

Shapes: n predictions, R rounds, K tokens drafted a block.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

from dspark_lightning.evaluation.rounds import Flags, Floats, Rounds

BINS = 20  # of equal width, for the calibration error and the reliability curves


def sigmoid(logits: npt.NDArray[Any]) -> Floats:
    """In double precision."""
    return torch.from_numpy(np.asarray(logits, np.float64)).sigmoid().numpy()


def expected_calibration_error(probs: Floats, happened: Flags) -> float:
    """The mean distance between predicted and observed shares over 20 bins, weighted by their counts (ECE)."""
    return float(binary_calibration_error(*_tensors(probs, happened), n_bins=BINS, norm="l1"))


def confidence_summary(rounds: Rounds) -> dict[str, Any] | None:
    """The confidence of each token against its own acceptance, where all tokens before it were accepted.

    Returns:
        of all positions together and of each; None without confidences.
    """
    if rounds.confidence is None or not rounds.tried.any():
        return None
    probs, tried, survived = sigmoid(rounds.confidence), rounds.tried, rounds.survived
    by_position = [describe(probs[tried[:, k], k], survived[tried[:, k], k]) for k in range(rounds.size)]
    return {"pooled": describe(probs[tried], survived[tried]), "by_position": by_position}


def describe(probs: Floats, happened: Flags) -> dict[str, Any]:
    """ECE, AUC, Brier score and reliability of predictions [n].

    Args:
        probs: predicted.
        happened: what came of it.

    Returns:
        plain data; AUC is None unless both outcomes occur, all are None without predictions.
    """
    count = len(probs)
    if not count:
        return {"count": 0, "ece": None, "auc": None, "brier": None, "bins": []}
    mixed = bool(happened.any() and not happened.all())
    return {
        "count": count,
        "ece": expected_calibration_error(probs, happened),
        "auc": float(binary_auroc(*_tensors(probs, happened))) if mixed else None,
        "brier": float(((probs - happened) ** 2).mean()),
        "bins": reliability_bins(probs, happened),
    }


def reliability_bins(probs: Floats, happened: Flags) -> list[dict[str, float]]:
    """Predicted and observed shares of the bins that are not empty."""
    which = np.minimum((probs * BINS).astype(int), BINS - 1)
    return [
        {
            "low": each / BINS,
            "high": (each + 1) / BINS,
            "count": int((which == each).sum()),
            "confidence": float(probs[which == each].mean()),
            "acceptance": float(happened[which == each].mean()),
        }
        for each in np.unique(which).tolist()
    ]


def _tensors(probs: Floats, happened: Flags) -> tuple[Tensor, Tensor]:
    # torchmetrics takes everything outside 0..1 for logits; a sigmoid never is.
    return torch.from_numpy(probs), torch.from_numpy(happened).long()
