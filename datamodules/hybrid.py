"""The datamodule that fills a feature cache on the way: the first epoch computes, the later ones read."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from dspark_lightning.capture import FEATURES, capture
from dspark_lightning.datamodules.begin_cache import fingerprint_of, known_of_target, open_or_begin
from dspark_lightning.datamodules.chat import ChatDataModule
from dspark_lightning.datamodules.feature_batches import FeatureCollator
from dspark_lightning.datamodules.loss_mask import ChatRenderer
from dspark_lightning.datamodules.missing_rows import missing_loader
from dspark_lightning.datamodules.sampler import RowLoader
from dspark_lightning.delivery import from_rank_0, gather_values, process_rank, world_size
from dspark_lightning.features.cache import FeatureCache
from dspark_lightning.features.fingerprint import check_fingerprint
from dspark_lightning.features.manifest import has_manifest
from dspark_lightning.features.stored_target import StoredTarget
from dspark_lightning.features.writer import FeatureWriter
from dspark_lightning.sharding import is_sharded


class HybridFeatureDataModule(LightningDataModule):
    """Batches of another datamodule, with the target's features from a cache that is filled on the way.

    A batch whose rows are all in the cache is read from it; for any other the target runs, and what it makes is
    stored. So the first epoch costs what it costs without a cache, and later ones run no target. Once every row is
    there, a run does not load the target at all. `dspark precompute` fills the cache in advance.

    Order, batches and resuming are those of the source.

    Args:
        source: Gives the rows.
        cache: Folder of the cache; begun where there is none.
        limit_gb: What the whole cache may take, in 10^9 bytes. Default: what is free.

    Raises:
        ValueError: When set up or when the first batch is asked for: a cache made for another target, other layers,
            rows or settings (names both values), or one that has no room.
    """

    def __init__(self, source: ChatDataModule, cache: str, limit_gb: float | None = None) -> None:
        super().__init__()
        if source.stream_rows is not None:
            raise ValueError(
                f"a feature cache holds a known number of rows, but stream_rows {source.stream_rows} of the source "
                "reads a stream without end: leave it out"
            )
        if limit_gb is not None and not limit_gb > 0:  # NaN is not either
            raise ValueError(f"limit_gb must be above 0, got {limit_gb}")
        self.source, self.cache, self.limit_gb = source, cache, limit_gb
        self.stored_target: StoredTarget | None = None
        """What the module takes in place of the target; None where the cache has to be filled."""
        self.features: FeatureCache | None = None
        """The cache, once a batch was asked for."""
        self._writer: FeatureWriter | None = None
        self._predicted: list[str] = []  # the split of each of the loaders of `predict_dataloader`
        self._together = False  # whether ranks have to run the target together

    @property
    def renderer(self) -> ChatRenderer:
        """Renders conversations as they are trained. Needs `setup`."""
        return self.source.renderer

    def prepare_data(self) -> None:
        """Encode the rows on one process of each node, so that the others find them in the cache of `datasets`."""
        self._load_source()

    def setup(self, stage: str) -> None:
        """Load all rows, whatever the stage, and look what the cache has of them."""
        self._load_source()
        if stage == "fit":
            self.source.setup(stage)
        folder = Path(self.cache)
        if self.stored_target is None and has_manifest(folder):
            hparams = self.trainer.lightning_module.hparams  # type: ignore[union-attr]
            cache = FeatureCache(folder)
            current = fingerprint_of(self.source, known_of_target(hparams))
            check_fingerprint(current, cache.manifest.fingerprint, folder)
            if from_rank_0(lambda: cache.complete and stage != "predict"):
                self.stored_target = cache.stored_target(hparams.get("trust_remote_code", False))
                rank_zero_info(f"Features come from {self.cache}; the target is not loaded")

    def train_dataloader(self) -> RowLoader:
        """The source's batches of training rows."""
        return self._with_features("train", cast(RowLoader, self.source.train_dataloader()))

    def val_dataloader(self) -> RowLoader | list[RowLoader]:
        """The source's batches of validation rows; an empty list when there are none."""
        loader = self.source.val_dataloader()
        return self._with_features("val", loader) if isinstance(loader, RowLoader) else loader

    def test_dataloader(self) -> RowLoader | list[RowLoader]:
        """The batches of `val_dataloader`."""
        return self.val_dataloader()

    def predict_dataloader(self) -> list[Any]:
        """What the cache lacks, split by split, sorted by length. Damaged shards are named and deleted first."""
        cache = self._open()
        found = gather_values(cache.verify(process_rank(), world_size()))
        _discard_damaged(cache, {path: why for each in found for path, why in each.items()})
        missing = {split: cache.missing(split) for split in cache.splits}
        self._predicted = [split for split, places in missing.items() if len(places)]
        return [missing_loader(self.source, split, missing[split]) for split in self._predicted]

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        """Run the target for a batch without features, and have them stored."""
        assert self.trainer is not None
        if self._writer is None or (self._agreed(FEATURES[0] in batch)):
            return batch
        batch = {name: values for name, values in batch.items() if name not in FEATURES}
        module: Any = self.trainer.lightning_module
        captured = capture(module.target, batch)
        # What is trained on is what is stored, so that a resumed run, which reads it, ends where an unbroken one does.
        features = {name: getattr(captured, name).to(torch.bfloat16) for name in FEATURES}
        self._writer.add(self._split(dataloader_idx), batch, replace(captured, **features))
        return batch | features

    def teardown(self, stage: str) -> None:
        """Wait until everything is stored."""
        del stage
        if self._writer is not None:
            self._writer.flush()

    def on_exception(self, exception: BaseException) -> None:
        """Keep what was computed."""
        if self._writer is not None:
            try:
                self._writer.flush()
            except ValueError as error:
                if str(error) != str(exception):
                    rank_zero_warn(str(error))

    def state_dict(self) -> dict[str, Any]:
        """The source's."""
        return self.source.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The source's."""
        self.source.load_state_dict(state_dict)

    def _load_source(self) -> None:
        self.source.trainer = self.trainer
        self.source.load("fit")

    def _open(self) -> FeatureCache:
        """The cache, begun or checked once the target is there. Every rank has to call this."""
        if self.features is None:
            module: Any = self.trainer.lightning_module  # type: ignore[union-attr]
            self.features = open_or_begin(Path(self.cache), self.source, module, self.limit_gb)
            _discard_damaged(self.features, self.features.damaged)
            if module.target is not None:
                self._writer = FeatureWriter(self.features)
                self._together = is_sharded(cast(nn.Module, module.target.model))
        return self.features

    def _with_features(self, split: str, loader: RowLoader) -> RowLoader:
        cache = self._open()
        return _FeatureLoader(
            lambda: self._catch_up(split),
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=loader.sampler,
            collate_fn=FeatureCollator(loader.collate_fn, cache, split, required=self._writer is None),
            num_workers=loader.num_workers,  # started anew each epoch, so that they know of new shards
            pin_memory=loader.pin_memory,
        )

    def _catch_up(self, split: str) -> None:
        """Know of all that was stored until now, on any rank."""
        if self._writer is not None and self.features is not None:
            self._writer.flush(split)
            gather_values(None)  # wait for the others
            self.features.refresh()

    def _agreed(self, has_features: bool) -> bool:
        """Whether the batch needs no target, here or on a rank that cannot run it alone."""
        if not self._together:
            return has_features
        share = self.trainer.strategy.reduce(  # type: ignore[union-attr]
            torch.tensor(float(has_features), device=self.trainer.strategy.root_device),  # type: ignore[union-attr]
            reduce_op="mean",
        )
        return bool(share == 1)

    def _split(self, dataloader_idx: int) -> str:
        assert self.trainer is not None and self.features is not None
        if self.trainer.predicting:
            return self._predicted[dataloader_idx]
        return "train" if self.trainer.training else "val"


def _discard_damaged(cache: FeatureCache, damaged: Mapping[Path, str]) -> None:
    """Name and delete shards, and look at the cache again. Every rank has to call this."""
    for path, reason in damaged.items():
        rank_zero_warn(f"the shard {str(path)!r} is damaged and will be computed again: {reason}")
    if process_rank() == 0:
        cache.discard(damaged)
    gather_values(None)  # wait for that
    cache.refresh()


class _FeatureLoader(RowLoader):
    """A `RowLoader` that calls `begin` before each epoch."""

    def __init__(self, begin: Callable[[], None], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._begin()
        yield from super().__iter__()
