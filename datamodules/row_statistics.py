"""Numbers about the rows kept, taken from the encoded table without reading rows one by one."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dspark_lightning.datamodules.rowset import RowSet

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowStatistics:
    """One entry for each row kept, [rows] each."""

    tokens: Counts
    supervised: Counts  # tokens with loss_mask on
    anchors: Counts  # places where a block can start: this token and the next are supervised
    weights: npt.NDArray[np.float32]

    @classmethod
    def of(cls, rows: RowSet) -> Self:
        """Count in a row set."""
        counted = [_count(chunk) for chunk in rows.table.data.column("loss_mask").chunks]
        tokens, anchors = (np.concatenate(parts)[rows.kept] for parts in zip(*counted, strict=True))
        return cls(tokens, rows.column("supervised").astype(np.int64), anchors, rows.column("weight"))


def _count(masks: Any) -> tuple[Counts, Counts]:
    """Tokens and anchors of each row of an arrow array of masks."""
    lengths = np.asarray(masks.value_lengths(), dtype=np.int64)
    values = np.asarray(masks.flatten(), dtype=np.int64)
    ends = lengths.cumsum()
    starts = np.append(values[:-1] & values[1:], 0)
    starts[ends[lengths > 0] - 1] = 0  # what follows is the next row
    total = np.concatenate([[0], starts.cumsum()])
    return lengths, total[ends] - total[ends - lengths]


def histogram(values: Counts, bins: int) -> list[tuple[int, int, int]]:
    """Cut 1 to the largest value into at most so many equal ranges; empty ones at the end are left out.

    Args:
        values: At least one, 0 or more; 0 counts as 1.
        bins: Most ranges.

    Returns:
        first and last value of each range, and how many lie in it.
    """
    values = values.clip(min=1)
    width = -(-int(values.max()) // bins)
    counts = np.bincount((values - 1) // width)
    return [(i * width + 1, (i + 1) * width, int(count)) for i, count in enumerate(counts)]
