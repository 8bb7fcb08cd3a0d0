"""The order in which rows are trained: set by (seed, epoch) alone, cut into global batches, resumable at any batch.

Row `i` of an epoch's order belongs to global batch `i // (batch_size * num_replicas)`, and rank r takes the r-th
slice of that batch. So two ranks with batch 2 see in every step exactly what one rank with batch 4 sees.
"""

import hashlib
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

FILLER = -1
"""Index given to a rank that has no row left; the data set answers it with a row without supervision."""

_MEANINGS = {"global_batch_size": " (batch_size x ranks)", "pack_tokens": " (0: rows are not packed)"}


class ResumableSampler(DistributedSampler[int]):
    """Row indices of one rank, epoch by epoch, from any batch on.

    It is a `DistributedSampler`, so that Lightning keeps it instead of putting its own in its place.

    Args:
        dataset: What is sampled; only its length is read.
        batch_size: Rows of a batch on one rank.
        shuffle: True (training): a permutation drawn from (seed, epoch), without the last incomplete global batch.
            False (validation): the rows as they stand, each of them once; the last global batch is shared out evenly,
            and `FILLER` rows even out the ranks, so that all of them make the same number of steps.
        seed: Seed of the permutations.
        num_replicas: Ranks that share the rows.
        rank: This rank.
        progress: Returns the trainer's epoch and the batches trained (not merely fetched) since the run began; asked
            when an epoch starts and when state is saved. Without it the epoch is that of `set_epoch`, and nothing
            counts as trained. (Lightning's own number of batches in this epoch, and the epoch it hands to
            `set_epoch`, can be wrong after a resume at the end of an epoch.)

    Raises:
        ValueError: With shuffle, when the rows do not fill one global batch.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
        progress: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last=shuffle)  # type: ignore[arg-type]
        self.num_rows = len(dataset)
        self._pack_tokens: int = getattr(dataset, "capacity", 0)  # packs of other documents can be as many
        self.global_batch_size = batch_size * num_replicas
        self._progress = progress or (lambda: (self.epoch, 0))
        self._resume = (0, 0)  # epoch and batch to go on from
        self._started: tuple[int, int, int] | None = None  # epoch, its first batch, batches trained before it
        if shuffle and self.num_rows < self.global_batch_size:
            kind = getattr(dataset, "kind", "rows")
            raise ValueError(
                f"{self.num_rows} training {kind} do not fill one global batch of {self.global_batch_size} "
                f"(batch_size {batch_size} x {num_replicas} ranks): give more rows or a smaller batch_size"
            )

    def order(self) -> list[int]:
        """Rows of the epoch for all ranks together, in order, without the incomplete tail or with its fillers."""
        if not self.shuffle:
            return [*range(self.num_rows), *[FILLER] * (-self.num_rows % self.num_replicas)]
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        kept = self.num_rows - self.num_rows % self.global_batch_size
        order: list[int] = torch.randperm(self.num_rows, generator=generator)[:kept].tolist()
        return order

    def __iter__(self) -> Iterator[int]:
        self.epoch, trained = self._progress()
        rows = self.order()
        epoch, first = self._resume
        if self.epoch < epoch:  # trained to its end before the resume, whatever Lightning thinks
            first = -(-len(rows) // self.global_batch_size)
        elif self.epoch > epoch:
            first = 0
        self._started = self.epoch, first, trained
        for start in range(first * self.global_batch_size, len(rows), self.global_batch_size):
            block = rows[start : start + self.global_batch_size]
            share = len(block) // self.num_replicas
            yield from block[self.rank * share : (self.rank + 1) * share]

    def __len__(self) -> int:
        """Rows of this rank in a whole epoch, also when it is resumed: Lightning counts the skipped batches itself."""
        unit = self.global_batch_size if self.shuffle else self.num_replicas
        rows = self.num_rows - self.num_rows % unit if self.shuffle else self.num_rows + -self.num_rows % unit
        return rows // self.num_replicas

    def state_dict(self, batches_per_epoch: int | float, accumulate_grad_batches: int = 1) -> dict[str, int]:
        """State from which `load_state_dict` goes on.

        Args:
            batches_per_epoch: After so many batches an epoch is over.
            accumulate_grad_batches: Batches between two optimizer steps.

        Returns:
            `epoch`, `batches` trained in it, how many of these are `pending` (since the last optimizer step), and what
            the order depends on.
        """
        epoch, batches = self._resume
        if self._started is not None:
            epoch, first, before = self._started
            batches = first + self._progress()[1] - before
        if batches >= batches_per_epoch:
            epoch, batches = epoch + 1, 0
        return {"epoch": epoch, "batches": batches, "pending": batches % accumulate_grad_batches, **self._layout()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at the first batch of `state["epoch"]` that was not trained.

        Raises:
            ValueError: In the middle of an epoch, when seed, packs, rows or global batch size are not those of
                the state: the order would be another one, and rows would be lost or repeated.
        """
        for name, now in self._layout().items():
            then = state.get(name, 0)
            if state["batches"] and then != now:
                raise ValueError(
                    f"the checkpoint was written in the middle of epoch {state['epoch']} with {name} {then}"
                    f"{_MEANINGS.get(name, '')}, this run has {now}: resume with {then}, or from a checkpoint at the "
                    "end of an epoch"
                )
        self._resume, self._started = (state["epoch"], state["batches"]), None

    def _layout(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "pack_tokens": self._pack_tokens,
            "num_rows": self.num_rows,
            "global_batch_size": self.global_batch_size,
        }


class ResumedByDatamodule:
    """A loader whose position lies in the state of the datamodule.

    The two methods tell Lightning that it can resume, for it warns about loaders that lack them.
    """

    def state_dict(self) -> dict[str, Any]:
        """Nothing: see the class."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: see the class."""


class RowLoader(ResumedByDatamodule, DataLoader[Any]):
    """A `DataLoader` that reads the sampler (and starts its workers) at the first `next`, not at `iter`.

    Lightning calls `iter` before it knows the epoch, and under some strategies before it restores the datamodule;
    workers would then fetch the rows of another epoch.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


def mix(*numbers: int) -> int:
    """A seed that depends on all the numbers: a sum would give (0, 1) and (1, 0) the same order."""
    text = "/".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
