"""The rounds of many answers as arrays. Shapes: R rounds, K tokens drafted a block."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dspark_lightning.decoding.records import AnswerRecord

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_COUNTS = ("proposed", "judged", "accepted")


class Rounds(NamedTuple):
    """Rounds, and which conversation each belongs to."""

    conversation: Counts  # [R], from 0
    proposed: Counts  # [R], see `AnswerRecord`
    judged: Counts  # [R]
    accepted: Counts  # [R]
    confidence: Floats | None  # [R, K], logits
    size: int  # K

    @property
    def survived(self) -> Flags:
        """[R, K]: the tokens up to position k were accepted."""
        return self.accepted[:, None] >= self.positions

    @property
    def reached(self) -> Flags:
        """[R, K]: the target had its say on position k, or on one before that it rejected."""
        return self.judged[:, None] >= self.positions

    @property
    def tried(self) -> Flags:
        """[R, K]: whether position k was accepted hung on itself alone: all before it were."""
        return self.reached & (self.accepted[:, None] >= self.positions - 1)

    @property
    def positions(self) -> Counts:
        """[K]: 1..K."""
        return np.arange(1, self.size + 1)

    def select(self, keep: Flags) -> "Rounds":
        """The rounds [R] that are to be kept."""
        confidence = None if self.confidence is None else self.confidence[keep]
        parts = {name: getattr(self, name)[keep] for name in ("conversation", *_COUNTS)}
        return Rounds(**parts, confidence=confidence, size=self.size)


def gather_rounds(records: Sequence[AnswerRecord], size: int) -> Rounds:
    """Put the rounds of answers into arrays.

    Args:
        records: of the answers.
        size: K.

    Raises:
        ValueError: an answer has confidences of another number of tokens, or none while others do.
    """
    conversations: dict[tuple[str, int], int] = {}
    numbers = [conversations.setdefault((each.dataset, each.conversation), len(conversations)) for each in records]
    known = [each.confidence for each in records if each.proposed]
    if None in known and any(known):
        raise ValueError("some of the decode records hold confidences and some do not: they are not of one draft")
    confidence = [row for rows in known for row in rows or ()]
    lengths = {len(row) for row in confidence}
    if lengths - {size}:
        raise ValueError(f"the decode records hold confidences of {sorted(lengths)} tokens a round, expected {size}")
    return Rounds(
        conversation=np.repeat(np.array(numbers, np.int64), [len(each.proposed) for each in records]),
        **{name: _join([getattr(each, name) for each in records]) for name in _COUNTS},
        confidence=np.array(confidence, np.float64) if confidence else None,
        size=size,
    )


def _join(lists: Sequence[Any]) -> Counts:
    return np.array([value for each in lists for value in each], np.int64)


def shares(numerator: npt.NDArray[Any], denominator: npt.NDArray[Any]) -> list[float | None]:
    """Divide sums [K]; None where there is nothing to divide by."""
    return [float(n / d) if d else None for n, d in zip(numerator, denominator, strict=True)]


def ratio_interval(
    numerator: npt.NDArray[Any],  # [R]
    denominator: npt.NDArray[Any],  # [R]
    conversation: Counts,  # [R]
    least: float = 0.0,
    most: float = 1.0,
) -> list[float] | None:
    """The 95 % interval of sum(numerator) / sum(denominator), with conversations as what was sampled.

    It is cut off at `least` and `most`, which the ratio cannot leave.

    Rounds of one conversation are alike, so their number alone would make the interval too narrow: the variance is that
    of the residuals summed within each (the linearised ratio estimator).

    Returns:
        low and high; None for fewer than two conversations.
    """
    count = int(conversation.max()) + 1 if len(conversation) else 0
    top, below = (np.bincount(conversation, each, minlength=count) for each in (numerator, denominator))
    groups = int((below > 0).sum())
    if groups < 2:
        return None
    ratio = top.sum() / below.sum()
    variance = ((top - ratio * below) ** 2).sum() * groups / (groups - 1) / below.sum() ** 2
    half = 1.96 * float(np.sqrt(variance))
    return [max(float(least), float(ratio - half)), min(float(most), float(ratio + half))]
