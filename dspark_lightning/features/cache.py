"""A feature cache on disk.

    manifest.json    what it was made from
    target/          the target's config, embedding and head
    rows/SPLIT/      ids and masks of all rows, a data set that is read in place
    features/SPLIT/  shards: the same rows with their features, in whatever order they were computed

A row counts as there when a sound shard holds it, so any number of processes may fill a cache, be killed, and go on.
Shapes: S tokens of a row, F feature layers, H hidden size.
"""

import shutil
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset, load_from_disk
from torch import Tensor

from dspark_lightning.datamodules.rowset import RowSet
from dspark_lightning.features.fingerprint import rows_digest
from dspark_lightning.features.manifest import Manifest, has_manifest, read_manifest, write_manifest
from dspark_lightning.features.shard import DamagedShard, FeatureRow, ShardIndex, is_abandoned, read_index, read_row
from dspark_lightning.features.stored_target import StoredTarget, load_target_parts
from dspark_lightning.replace import discard

_BEGUN = (
    "target/config.json",
    "target/*.py",
    "target/embedding_and_head.safetensors",
    "rows/*/*.arrow",
    "rows/*/dataset_info.json",
    "rows/*/state.json",
    "features/*/*.safetensors",
    "features/*/.*.writing",
    ".manifest.json.writing",
)
"""Files of a cache whose manifest is not written yet; the first two come before all others."""


class FeatureCache:
    """Rows with their features.

    Args:
        folder: of the cache.

    Raises:
        ValueError: it is no cache, or its manifest cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.damaged: dict[Path, str] = {}
        """Shards that hold nothing that can be used, and why."""
        self._splits: dict[str, _Places] = {}
        self.refresh()

    @property
    def splits(self) -> list[str]:
        """Their names: "train", "val"."""
        return list(self.manifest.splits)

    def refresh(self) -> None:
        """Look for shards again: other processes may have written some."""
        self.damaged = {}
        for split in self.splits:
            found: dict[Path, ShardIndex] = {}
            for path in sorted(self.shard_folder(split).glob("*.safetensors")):
                try:
                    found[path] = read_index(path, self.manifest.owner)
                except DamagedShard as error:
                    self.damaged[path] = str(error)
            self._splits[split] = _Places(found)

    def verify(self, share: int = 0, shares: int = 1) -> dict[Path, str]:
        """Read every row of every n-th shard.

        Args:
            share: of the work, from 0.
            shares: in how many the work is split.

        Returns:
            the shards in which a row is damaged, and how.
        """
        damaged: dict[Path, str] = {}
        for places in self._splits.values():
            for number, path in list(enumerate(places.paths))[share::shares]:
                try:
                    for place in places.rows_of(number):
                        read_row(*places.at(place))
                except DamagedShard as error:
                    damaged[path] = str(error)
        return damaged

    def holds(self, split: str, row_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of some rows are there: bool, one for each."""
        return self._splits[split].hold(row_ids)

    def rows(self, split: str) -> RowSet:
        """All rows of a split, without features.

        Raises:
            ValueError: they cannot be read.
        """
        folder = self.folder / "rows" / split
        try:
            table = load_from_disk(str(folder))
        except Exception as error:  # datasets and pyarrow raise a dozen kinds
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"the feature cache {str(self.folder)!r} is damaged: {str(folder)!r}: {reason}") from error
        if len(table) != self.manifest.splits[split].rows:
            raise ValueError(
                f"the feature cache {str(self.folder)!r} is damaged: {str(folder)!r} holds {len(table)} rows, the "
                f"manifest says {self.manifest.splits[split].rows}"
            )
        return RowSet(f"{split} rows of {self.folder}", table, np.arange(len(table)))

    def check_rows(self) -> None:
        """Refuse rows that are not those the features were made of.

        Raises:
            ValueError: names the split, with both hashes.
        """
        made = self.manifest.fingerprint.data or {}
        for split in self.splits:
            if (found := rows_digest(self.rows(split))) != made.get(split):
                raise ValueError(
                    f"the feature cache {str(self.folder)!r} is damaged: its {split} rows have the hash {found}, the "
                    f"manifest says {made.get(split)}: precompute into another folder"
                )

    def missing(self, split: str) -> npt.NDArray[np.int64]:
        """Places in `rows(split)` of the rows that no sound shard holds."""
        return np.flatnonzero(~self.holds(split, self.rows(split).column("row_id")))

    @property
    def complete(self) -> bool:
        """Whether all rows of all splits are there."""
        return not self.lacks()

    def lacks(self) -> str:
        """How many rows are missing, for people: "19 train rows"; empty where none is."""
        missing = {split: len(self.missing(split)) for split in self.splits}
        return " and ".join(f"{count} {split} rows" for split, count in missing.items() if count)

    def read(self, split: str, row_id: int, input_ids: Tensor, loss_mask: Tensor) -> FeatureRow:
        """A row with its features, every byte of it checked.

        Args:
            split: where it belongs.
            row_id: that `holds` is true for.
            input_ids: [S], those that the features are wanted for.
            loss_mask: [S], likewise; all zero for a row that only fills up a batch.

        Raises:
            ValueError: the shard is damaged, or holds the row with other tokens or another mask.
        """
        path, start, stop, checksum = self._splits[split].find(row_id)
        try:
            row = read_row(path, start, stop, checksum)
            if not torch.equal(row.input_ids, input_ids.to(torch.int32)):
                raise DamagedShard(f"its row {row_id + 1} has other tokens than the data")
            if loss_mask.any() and not torch.equal(row.loss_mask, loss_mask.to(torch.uint8)):
                raise DamagedShard(f"its row {row_id + 1} has another loss mask than the data")
        except DamagedShard as error:
            raise ValueError(
                f"the shard {str(path)!r} of the feature cache is damaged: {error}; dspark precompute rebuilds it"
            ) from error
        return row

    def stored_target(self, trust_remote_code: bool = False) -> StoredTarget:
        """What training needs of the target.

        Raises:
            ValueError: it cannot be read.
        """
        made = self.manifest.fingerprint
        layer_ids, weights = made.target_layer_ids or [], made.target_weights or ""
        return load_target_parts(self.folder, self.manifest.owner, layer_ids, weights, trust_remote_code)

    def shard_folder(self, split: str) -> Path:
        """Where the shards of a split are."""
        return self.folder / "features" / split

    def discard(self, damaged: Iterable[Path]) -> None:
        """Delete shards, and what processes that were killed left half-written."""
        abandoned = filter(is_abandoned, self.folder.glob("features/*/.*.writing"))
        for path in [*damaged, *abandoned]:
            discard(path)


class _Places:
    """Where each row of a split is; rows in the order of the shards, and sorted by row id for looking them up."""

    def __init__(self, shards: Mapping[Path, ShardIndex]) -> None:
        def joined(parts: Iterable[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
            return np.concatenate([np.empty(0, np.int64), *parts])

        indices = list(shards.values())
        self.paths = list(shards)
        self.ends = joined(np.array([len(index.row_ids)]) for index in indices).cumsum()  # behind each shard
        self.starts = joined(index.offsets[:-1] for index in indices)
        self.stops = joined(index.offsets[1:] for index in indices)
        self.checksums = joined(index.checksums for index in indices)
        row_ids = joined(index.row_ids for index in indices)
        self.order = np.argsort(row_ids, kind="stable")
        self.row_ids = row_ids[self.order]

    def hold(self, row_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of some rows are in a shard."""
        if not len(self.row_ids):
            return np.zeros(len(row_ids), dtype=bool)
        found = np.searchsorted(self.row_ids, row_ids).clip(max=len(self.row_ids) - 1)
        held: npt.NDArray[np.bool_] = self.row_ids[found] == row_ids
        return held

    def find(self, row_id: int) -> tuple[Path, int, int, int]:
        """`at` of a row that is in a shard."""
        return self.at(int(self.order[np.searchsorted(self.row_ids, row_id)]))

    def rows_of(self, number: int) -> range:
        """The places of the rows of the shard `paths[number]`."""
        return range(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))

    def at(self, place: int) -> tuple[Path, int, int, int]:
        """Shard, first token, the one behind the last, and checksum of a row."""
        path = self.paths[int(np.searchsorted(self.ends, place, side="right"))]
        return path, int(self.starts[place]), int(self.stops[place]), int(self.checksums[place])


def create_cache(folder: Path, manifest: Manifest, rows: Mapping[str, RowSet]) -> None:
    """Begin a cache without features; `target/` must be there already.

    The manifest comes last: without it the folder is no cache, and is begun anew.

    Raises:
        ValueError: it cannot be written.
    """
    for split, row_set in rows.items():
        table: Dataset = row_set.table.select(row_set.kept).flatten_indices()
        place = folder / "rows" / split
        shutil.rmtree(place, ignore_errors=True)
        try:
            table.save_to_disk(str(place))
        except OSError as error:
            raise ValueError(f"cannot write {str(place)!r}: {error.strerror or error}") from error
    write_manifest(folder, manifest)


def check_cache_folder(folder: Path) -> None:
    """Refuse a folder that holds something else.

    Raises:
        ValueError: names what is in it.
    """
    if has_manifest(folder) or not folder.is_dir():
        return
    begun = _BEGUN if (folder / "target" / "embedding_and_head.safetensors").is_file() else _BEGUN[:2]
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if not path.is_dir() and not any(fnmatch(name, known) for known in begun):
            raise ValueError(
                f"{str(folder)!r} holds {name!r} and no manifest.json: give a folder for the feature cache"
            )
