"""The rows to train or validate on: which of a table are kept, why others are not, and none on both sides."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from torch.utils.data import Dataset as TorchDataset

from dspark_lightning.datamodules.sampler import FILLER


class Dropped(NamedTuple):
    """Rows left out for one reason."""

    rows: int
    first: int  # index in the table of the first of them


@dataclass(frozen=True, eq=False)
class RowSet(TorchDataset[dict[str, Any]]):
    """Kept rows of an encoded table; item i is a dict of `input_ids` [S], `loss_mask` [S] and `row_id` [], all int64.

    Where any kept row has a weight other than 1, every item also has `loss_weights` [S], float32.

    Attributes:
        name: What the rows are, for people.
        table: With the columns of `encode.FEATURES`.
        kept: Index in the table of each kept row.
        place: Names a row for people, from its row id.
        dropped: The rows left out, by reason.
    """

    name: str
    table: Dataset
    kept: npt.NDArray[np.int64]
    place: Callable[[int], str] = str
    dropped: Mapping[str, Dropped] = field(default_factory=dict)

    def usable(self, min_supervised_tokens: int) -> Self:
        """The good rows with at least so many supervised tokens; of those with the same id the first."""
        rows = self
        for fault in dict.fromkeys(self.column("fault")):
            if fault:
                rows = rows.without(rows.column("fault") == fault, fault)
        ids = rows.column("id_digest")
        repeated = np.ones(len(ids), dtype=bool)
        repeated[np.unique(ids, return_index=True)[1]] = False
        rows = rows.without(repeated & (ids != 0), "with the id of an earlier row")
        rows = rows.without(rows.column("weight") == 0, "weight 0")
        return rows.without(
            rows.column("supervised") < min_supervised_tokens, f"under {min_supervised_tokens} supervised tokens"
        )

    def without(self, drop: npt.NDArray[np.bool_], reason: str) -> Self:
        """The rows for which `drop` [len(self)] is False; the others are counted under `reason`."""
        dropped = dict(self.dropped)
        if drop.any():
            dropped[reason] = Dropped(int(drop.sum()), int(self.kept[drop][0]))
        return replace(self, kept=self.kept[~drop], dropped=dropped)

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of scalars, of the kept rows."""
        column: npt.NDArray[Any] = self.table.data.column(name).to_numpy()
        return column[self.kept]

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each kept row."""
        chunks = [chunk.value_lengths().to_numpy() for chunk in self.table.data.column("input_ids").chunks]
        return np.concatenate([np.empty(0, np.int64), *chunks]).astype(np.int64)[self.kept]

    def without_rows_of(self, other: "RowSet") -> Self:
        """The rows whose token ids no row of `other` has."""
        return self.without(np.isin(self.column("digest"), other.column("digest")), "identical to a validation row")

    def split(self, fraction: float) -> tuple[Self, Self]:
        """Training rows and validation rows, about `fraction` of them.

        The side of a row follows from a hash of its token ids: equal rows fall on one side, and neither order nor
        other rows move a row across.
        """
        validation = self.column("digest").view(np.uint64) < np.uint64(fraction * 2**64)
        return self.without(validation, "held out for validation"), self.without(~validation, "kept for training")

    @cached_property
    def weighted(self) -> bool:
        """Whether any kept row has a weight other than 1."""
        return bool((self.column("weight") != 1).any())

    def __len__(self) -> int:
        return len(self.kept)

    def encoded(self, index: int) -> dict[str, torch.Tensor]:
        """The item of a kept row, as it is in the table."""
        row = self.table[int(self.kept[max(index, 0)])]
        item = {name: torch.tensor(row[name], dtype=torch.int64) for name in ("input_ids", "loss_mask", "row_id")}
        if self.weighted:
            item["loss_weights"] = torch.full((len(row["input_ids"]),), row["weight"])
        return item

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.encoded(index)
        if index == FILLER:
            item["loss_mask"].zero_()
        return item

    def losses(self) -> Iterator[tuple[str, bool]]:
        """For each reason how many rows were dropped, with the place of the first; and whether these were bad."""
        for reason, (count, first) in self.dropped.items():
            row = self.table[first]
            yield f"{count} {reason}, the first: {row['error'] or self.place(row['row_id'])}", row["error"] != ""

    def summary(self) -> str:
        """One line of counts."""
        read = len(self.table)
        dropped = ", ".join(f"{count} {reason}" for reason, (count, _) in self.dropped.items())
        lost = f" (dropped: {dropped})" if dropped else ""
        cut, supervised = int(self.column("cut").sum()), int(self.column("supervised").sum())
        kept = f"{len(self)} kept{lost}, {cut} of them cut to max_length"
        return f"{self.name}: {read} rows read, {kept}; {supervised} supervised tokens"
