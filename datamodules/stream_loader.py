"""A stream's batches for the trainer, and the position from which a resumed run goes on."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from dspark_lightning.datamodules.rowset import RowSet
from dspark_lightning.datamodules.sampler import ResumedByDatamodule
from dspark_lightning.datamodules.stream import BlockStart, StreamReader
from dspark_lightning.delivery import gather_values


class StreamLoader(ResumedByDatamodule):
    """The batches of a `StreamReader`, from the first that was not trained.

    A position is the start of a block and how many of its batches were trained, so a resumed run reads at most one
    block again. Batches that were fetched ahead do not count.

    Args:
        reader: Gives the batches of this rank.
        layout: What the order of the batches depends on, by name.
        num_batches: Length of what the trainer takes for an epoch: a run. Of a loader without a length (None) Lightning
            would fetch a batch before it has restored the position.
        num_workers: 0 reads in the main process, 1 in one beside it.
        progress: Returns the batches trained (not merely fetched) since the run began, and how many of them make an
            optimizer step. Without it nothing counts as trained.
    """

    def __init__(
        self,
        reader: StreamReader,
        layout: dict[str, Any],
        *,
        num_batches: int | None = None,
        num_workers: int = 0,
        progress: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._reader, self._layout, self._num_batches, self._num_workers = reader, layout, num_batches, num_workers
        self._progress = progress or (lambda: (0, 1))
        self._batches = 0  # of the epoch, trained before this iteration
        self._before: int | None = None  # batches trained when this iteration began; None before the first
        self._starts: list[tuple[int, BlockStart]] = [(0, reader.first)]  # with the number of their first batch

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError("a stream has no length")
        return self._num_batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if self._before is not None:  # the next epoch of a run whose epochs are limited
            start, done = self._position(self._trained())
            self._starts, self._batches = [(-done, start)], 0
        self._before = self._progress()[0]
        first, start = self._starts[0]
        reader = replace(self._reader, start=start, skip=-first)
        loader = DataLoader(
            reader, batch_size=None, num_workers=self._num_workers, pin_memory=torch.cuda.is_available()
        )
        for number, item in enumerate(loader):
            if isinstance(item, ValueError):
                raise item
            begins, batch = item
            if begins is not None:
                self._forget()
                self._starts.append((number, begins))
            yield batch

    def position(self, batches_per_epoch: int | float) -> dict[str, Any]:
        """State from which `go_on` goes on. All ranks take part.

        Args:
            batches_per_epoch: After so many batches an epoch is over.

        Returns:
            `batches` trained in the epoch, how many of these are `pending` (since the last optimizer step), what the
            order depends on, and the `positions` of all ranks after the last optimizer step.
        """
        trained, accumulate = self._trained(), self._progress()[1]
        batches = self._batches + trained
        if batches >= batches_per_epoch:
            batches = 0
        pending = batches % accumulate
        start, done = self._position(trained - pending)
        positions = gather_values({"start": start.state(), "batches": done})
        return {"batches": batches, "pending": pending, **self._layout, "positions": positions}

    def go_on(self, state: dict[str, Any]) -> None:
        """Go on after the last optimizer step before `state` was taken.

        Raises:
            ValueError: What the order depends on is not what it was; both values are named.
        """
        for name, now in self._layout.items():
            if state.get(name) != now:
                if name == "first_block":
                    raise ValueError(
                        "the checkpoint was written in a stream that began with other rows or had other files: rows "
                        "would be lost or repeated, so resume with the same train_data, val_data and tokenizer"
                    )
                raise ValueError(
                    f"the checkpoint was written in a stream with {name} {state.get(name)}, this run has {now}: rows "
                    f"would be lost or repeated, so resume with {state.get(name)}"
                )
        mine = state["positions"][self._reader.rank]
        self._batches, self._before = state["batches"] - state["pending"], None
        self._starts = [(-mine["batches"], BlockStart.of(mine["start"]))]

    def _trained(self) -> int:
        """Batches trained since this iteration began."""
        return 0 if self._before is None else self._progress()[0] - self._before

    def _position(self, trained: int) -> tuple[BlockStart, int]:
        """The block that holds the first batch not trained, or its last trained one, and the batches of it before."""
        first, start = next((first, start) for first, start in reversed(self._starts) if first <= trained)
        return start, trained - first

    def _forget(self) -> None:
        """Drop the blocks that no checkpoint will go back to."""
        kept = self._trained() - self._progress()[1]
        while len(self._starts) > 1 and self._starts[1][0] <= kept:
            del self._starts[0]


def new_stream_loader(reader: StreamReader, first: RowSet, num_workers: int, trainer: Trainer | None) -> StreamLoader:
    """The loader of a trainer's run, which must have a number of steps; without a trainer one without a length.

    All ranks take part. `first` holds the rows of the first block.
    """
    layout = {
        "seed": reader.seed,
        "stream_rows": reader.stream_rows,
        "batch_size": reader.batch_size,
        "packing": reader.pack_to is not None,
        "max_length": reader.pack_to,
        "min_supervised_tokens": reader.filter.min_supervised_tokens,
        "ranks": reader.ranks,
        "first_block": gather_values(reader.fingerprint(first)),
    }
    if trainer is None:
        return StreamLoader(reader, layout, num_workers=num_workers)

    def progress() -> tuple[int, int]:
        processed: int = trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]
        return processed, trainer.accumulate_grad_batches

    num_batches = trainer.max_steps * trainer.accumulate_grad_batches
    return StreamLoader(reader, layout, num_batches=num_batches, num_workers=num_workers, progress=progress)
