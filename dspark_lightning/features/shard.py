"""One file of a feature cache: whole rows, one behind the other, each with a checksum of its own.

A row can be read and checked by itself, so training in random order never trusts what it has not checked. The content
hash of a shard covers which rows it holds, where, and their checksums, and through these every byte of them.
Shapes: R rows, T tokens of all rows, S tokens of a row, F feature layers, H hidden size.
"""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark_lightning.features.hashing import checksum, content_hash
from dspark_lightning.replace import discard, replace_path
from dspark_lightning.tensor_files import write_tensors

_ROW_TENSORS = ("input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states")
_INDEX = ("row_ids", "offsets", "checksums")


class DamagedShard(Exception):
    """A shard that cannot be used; the message says why, without the file, which the caller knows."""


class FeatureRow(NamedTuple):
    """A row at its true length, nothing padded."""

    input_ids: Tensor  # int32 [S]
    loss_mask: Tensor  # uint8 [S]
    target_hidden_states: Tensor  # bf16 [S, F*H]
    target_last_hidden_states: Tensor  # bf16 [S, H]

    def checksum(self) -> int:
        """64 bits over every byte."""
        return checksum(self)


class ShardIndex(NamedTuple):
    """What a shard holds, and where."""

    row_ids: npt.NDArray[np.int64]  # [R]
    offsets: npt.NDArray[np.int64]  # [R + 1], in tokens
    checksums: npt.NDArray[np.int64]  # [R]

    def content_hash(self, owner: str) -> str:
        """Of the shard, as part of the cache `owner`."""
        return content_hash([owner, *self])

    @classmethod
    def of(cls, row_ids: Sequence[int], rows: Sequence[FeatureRow]) -> Self:
        """Index rows that are about to be written in this order."""
        lengths = [len(row.input_ids) for row in rows]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return cls(np.array(row_ids, np.int64), offsets, np.array([row.checksum() for row in rows], np.int64))


def write_shard(folder: Path, owner: str, row_ids: Sequence[int], rows: Sequence[FeatureRow]) -> Path:
    """Write rows as one file, which is there as a whole or not at all; its name follows from which rows it holds.

    Where another process has just written the same rows, its file stays: others may have read its index.

    Args:
        folder: of the split.
        owner: identifies the cache, so that a file strayed from another one is noticed.
        row_ids: [R].
        rows: [R].

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    index = ShardIndex.of(row_ids, rows)
    name = f"{index.row_ids.min():09d}-{content_hash([index.row_ids])[:16]}.safetensors"
    tensors = {name: torch.cat([getattr(row, name) for row in rows]) for name in _ROW_TENSORS}
    tensors |= {name: torch.from_numpy(getattr(index, name)) for name in _INDEX}
    path = folder / name
    scratch = path.with_name(
        f".{path.name}.{socket.gethostname()}.{os.getpid()}.writing"
    )  # several may write it at once
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(tensors, scratch, {"content_hash": index.content_hash(owner)})
        if not _is_sound(path, owner):
            replace_path(scratch, path)
    finally:
        discard(scratch)
    return path


def is_abandoned(scratch: Path) -> bool:
    """Whether nobody goes on with a half-written shard: its process is gone, or has not touched it for an hour."""
    *_, host, process, _ = scratch.name.split(".")
    try:
        if time.time() - scratch.stat().st_mtime > 3600:
            return True
        if host == socket.gethostname():
            os.kill(int(process), 0)
    except PermissionError:  # another user's
        return False
    except (OSError, ValueError):
        return True
    return False


def _is_sound(path: Path, owner: str) -> bool:
    try:
        read_index(path, owner)
    except DamagedShard:
        return False
    return True


def read_index(path: Path, owner: str) -> ShardIndex:
    """Read what a shard holds.

    Raises:
        DamagedShard: the file is cut off or changed, or belongs to another cache.
    """
    try:
        with safe_open(path, "pt") as file:
            written = (file.metadata() or {}).get("content_hash")
            index = ShardIndex(*(file.get_tensor(name).numpy() for name in _INDEX))
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise DamagedShard(f"it cannot be read ({str(error).splitlines()[0]})") from error
    if (found := index.content_hash(owner)) != written:
        raise DamagedShard(f"its content hash is {written}, its index gives {found}")
    return index


def read_row(path: Path, start: int, stop: int, checksum: int) -> FeatureRow:
    """Read one row and check it.

    Args:
        path: of the shard.
        start: first token of the row in the shard.
        stop: the one behind its last.
        checksum: from the index.

    Raises:
        DamagedShard: the file is gone or cut off, or the row is not what was written.
    """
    try:
        with safe_open(path, "pt") as file:
            row = FeatureRow(*(file.get_slice(name)[start:stop] for name in _ROW_TENSORS))
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise DamagedShard(f"it cannot be read ({str(error).splitlines()[0]})") from error
    if row.checksum() != checksum:
        raise DamagedShard(f"tokens {start} to {stop - 1} do not give the checksum they were written with")
    return row
