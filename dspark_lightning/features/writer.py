"""Writing features behind the target's back: copying, checking and storing happen while it runs the next batch."""

import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark_lightning.features.cache import FeatureCache
from dspark_lightning.features.shard import FeatureRow, write_shard
from dspark_lightning.host import boxes_of
from dspark_lightning.target import DSparkTargetBatch

SHARD_BYTES = 256 * 2**20
"""A shard is written once its rows have so many bytes: few files, and little lost when a process is killed."""

_BATCHES_AHEAD = 4  # waiting to be written; the target waits when it is further ahead


class _Captured(NamedTuple):
    split: str
    batch: Mapping[str, Any]
    features: DSparkTargetBatch


class FeatureWriter:
    """Stores what a target made of batches, in a thread.

    Args:
        cache: to be filled; rows that it holds, or that were added before, are not stored again.

    Raises:
        ValueError: from any method, for what went wrong in the thread: a row with NaN or infinite features, or a shard
            that cannot be written.
    """

    def __init__(self, cache: FeatureCache) -> None:
        self._cache = cache
        self._stored: dict[str, set[int]] = {split: set() for split in cache.splits}
        self._rows: dict[str, dict[int, FeatureRow]] = {split: {} for split in cache.splits}  # of the next shard
        self._queue: queue.Queue[_Captured | str] = queue.Queue(_BATCHES_AHEAD)
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="feature-writer", daemon=True)
        self._thread.start()

    def add(self, split: str, batch: Mapping[str, Any], features: DSparkTargetBatch) -> None:
        """Store the rows of a batch. Returns at once, unless the disk is slower than the target.

        Args:
            split: of the rows.
            batch: input_ids, attention_mask, loss_mask [B, S] and row_id [B]; packed rows also seq_lens and doc_row_ids
                [B, M]. Rows without supervision only fill up a batch and are not stored.
            features: of the batch.
        """
        self._raise()
        self._queue.put(_Captured(split, batch, features))

    def flush(self, split: str | None = None) -> None:
        """Return once everything added is on disk.

        Args:
            split: only what belongs to this one; None takes all.
        """
        for name in self._rows if split is None else [split]:
            self._queue.put(name)
        self._queue.join()
        self._raise()

    def _raise(self) -> None:
        if self._problem is not None:
            raise ValueError(str(self._problem)) from self._problem

    def _run(self) -> None:
        while True:
            work = self._queue.get()
            try:
                if self._problem is None:  # else only emptied, so that nobody waits for a place in it
                    self._write(work) if isinstance(work, str) else self._take(work)
            except Exception as error:  # reaches the user through `_raise`, in the thread that trains
                self._problem = error
            finally:
                self._queue.task_done()

    def _take(self, captured: _Captured) -> None:
        split, rows = captured.split, self._rows[captured.split]
        for row_id, row in feature_rows(captured.batch, captured.features):
            new = row_id not in self._stored[split] and not self._cache.holds(split, _one(row_id))[0]
            if new and row.loss_mask.any():
                _check_finite(split, row_id, row)
                rows[row_id] = row
                self._stored[split].add(row_id)
        if sum(_size(row) for row in rows.values()) >= SHARD_BYTES:
            self._write(split)

    def _write(self, split: str) -> None:
        rows, self._rows[split] = self._rows[split], {}
        if not rows:
            return
        folder = self._cache.shard_folder(split)
        try:
            write_shard(folder, self._cache.manifest.owner, list(rows), list(rows.values()))
        except OSError as error:
            raise ValueError(f"cannot write a shard to {str(folder)!r}: {error.strerror or error}") from error


def feature_rows(batch: Mapping[str, Any], features: DSparkTargetBatch) -> Iterator[tuple[int, FeatureRow]]:
    """The rows of a batch with their features, at their true length, on the CPU.

    Args:
        batch: see `FeatureWriter.add`.
        features: of the batch.

    Yields:
        row id and row.
    """
    host = {name: box.tensor for name, box in boxes_of(batch).items()}
    hidden, last = (
        x.to("cpu", torch.bfloat16) for x in (features.target_hidden_states, features.target_last_hidden_states)
    )
    ids, mask = batch["input_ids"].cpu().to(torch.int32), host["loss_mask"].to(torch.uint8)
    for i, start, stop, row_id in documents(host, batch.get("doc_row_ids")):
        # Copies: a view would keep the whole batch until the shard is written.
        yield row_id, FeatureRow(*(x[i, start:stop].clone() for x in (ids, mask, hidden, last)))


def documents(host: Mapping[str, Tensor], doc_row_ids: Tensor | None) -> list[tuple[int, int, int, int]]:
    """Where the rows of a batch are in it: place in the batch, first token, the one behind the last, and row id.

    Args:
        host: attention_mask [B, S] and row_id [B]; of packed rows seq_lens [B, M].
        doc_row_ids: [B, M] of packed rows; None where each row is one document.
    """
    if doc_row_ids is None:
        lengths = host["attention_mask"].sum(-1).tolist()
        return [(i, 0, n, row) for i, (n, row) in enumerate(zip(lengths, host["row_id"].tolist(), strict=True))]
    found = []
    for i, (lengths, rows) in enumerate(zip(host["seq_lens"].tolist(), doc_row_ids.tolist(), strict=True)):
        start = 0
        for length, row in zip(lengths, rows, strict=True):
            if row >= 0:
                found.append((i, start, start + length, row))
            start += length
    return found


def _check_finite(split: str, row_id: int, row: FeatureRow) -> None:
    for name in ("target_hidden_states", "target_last_hidden_states"):
        bad = (~getattr(row, name).isfinite()).any(-1).nonzero()
        if len(bad):
            raise ValueError(
                f"the target makes NaN or infinite {name} of {split} row {row_id + 1}, from token {int(bad[0]) + 1} of "
                f"{len(row.input_ids)} on: leave that row out, or run the target in another precision"
            )


def _size(row: FeatureRow) -> int:
    return sum(tensor.nbytes for tensor in row)


def _one(row_id: int) -> Any:
    return torch.tensor([row_id]).numpy()
