"""The rows that a feature cache lacks, in batches that waste little."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset

from dspark_lightning.datamodules.chat import ChatDataModule
from dspark_lightning.datamodules.rowset import RowSet
from dspark_lightning.datamodules.sampler import FILLER
from dspark_lightning.delivery import process_rank, world_size


def missing_loader(source: ChatDataModule, split: str, places: npt.NDArray[np.int64]) -> DataLoader[Any]:
    """This rank's share of some rows.

    A batch has at most batch_size x max_length tokens, padding included. All ranks get the same number of batches, for
    a target that is split over them has to be run together; what evens them out is without supervision and not stored.

    Args:
        source: set up.
        split: "train" or "val".
        places: of the rows, among those of the split.
    """
    rows = source.row_sets[split]
    batches = length_batches(places, rows.lengths()[places], source.batch_size * source.max_length)
    batches += [[FILLER]] * (-len(batches) % world_size())
    own = _Batches(rows, batches[process_rank() :: world_size()])
    return DataLoader(own, batch_size=None, collate_fn=source.collate_for(split), num_workers=source.num_workers)


def length_batches(places: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], max_tokens: int) -> list[list[int]]:
    """Cut rows, the longest first, into batches of at most max_tokens tokens with their padding.

    Args:
        places: [R].
        lengths: [R], in tokens; a row that is longer than max_tokens is a batch by itself.
        max_tokens: of a batch.
    """
    batches: list[list[int]] = []
    longest = 0
    for i in np.argsort(-lengths, kind="stable").tolist():
        if not batches or (len(batches[-1]) + 1) * longest > max_tokens:
            batches.append([])
            longest = int(lengths[i])
        batches[-1].append(int(places[i]))
    return batches


@dataclass(frozen=True)
class _Batches(Dataset[list[Any]]):
    """Rows, a batch at a time; Lightning's predict takes no plain list as a batch sampler."""

    rows: RowSet
    batches: list[list[int]]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> list[Any]:
        return [self.rows[i] for i in self.batches[index]]
