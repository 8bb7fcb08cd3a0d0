"""The datamodule that trains from a feature cache alone."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from dspark_lightning.datamodules.begin_cache import known_of_target
from dspark_lightning.datamodules.chat import ChatDataModule
from dspark_lightning.datamodules.collate import collate_rows
from dspark_lightning.datamodules.feature_batches import FeatureCollator
from dspark_lightning.datamodules.settings import Settings
from dspark_lightning.features.cache import FeatureCache
from dspark_lightning.features.fingerprint import check_fingerprint
from dspark_lightning.features.stored_target import StoredTarget
from dspark_lightning.target import check_packing


class CachedFeatureDataModule(ChatDataModule):
    """Batches from a feature cache that `dspark precompute` has made: neither target nor tokenizer is loaded.

    Batches are those of `ChatDataModule` with the target's features in bf16: `target_hidden_states` [B, S, F*H] and
    `target_last_hidden_states` [B, S, H]. Which rows are trained and which validated, their templates, masks and
    lengths were settled when the cache was made. Every row is checked against its checksum when it is read. Where the
    files of the target are on this machine, they must be those that the cache was made with.

    Args:
        cache: Folder of the cache.
        batch_size: Rows of a batch on one rank, in training and validation.
        num_workers: Processes that read and pad rows; 0 does it in the main process.
        packing: As for `ChatDataModule`.
        max_length: Of a packed row. Default: that of the rows in the cache.
        seed: Seed of the training order. Default: the module's; without a module 0.

    Raises:
        ValueError: An argument out of range; when set up, a cache that is incomplete, damaged, or made for another
            target, other layers or other settings.
    """

    stored_target: StoredTarget | None = None
    """What the module takes in place of the target; there once the cache is open."""

    def __init__(
        self,
        cache: str,
        batch_size: int = 1,
        num_workers: int = 0,
        packing: bool = False,
        max_length: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            cache,
            batch_size=batch_size,
            num_workers=num_workers,
            packing=packing,
            max_length=max_length or 2,
            seed=seed,
        )
        self.cache, self._given_length = cache, max_length
        self._cache: FeatureCache | None = None

    def preview(self, index: int = 0) -> str:
        """Not to be had: there is no tokenizer.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"the rows of the feature cache {self.cache!r} cannot be shown: it has no tokenizer")

    def load(self, stage: str) -> None:
        """Open the cache, unless that is done."""
        if self._cache is None:
            self._cache = self._open()
        hparams = self._module_hparams
        seed = hparams.get("seed", 0) if self.seed is None else self.seed
        mask_token_id = hparams.get("mask_token_id", -1)
        self._settings = Settings("", None, False, mask_token_id, 2, seed)
        for split in self._cache.splits:
            if split not in self._rows:
                self._keep(split, self._cache.rows(split))
        if stage != "fit" and "val" not in self._rows:
            raise ValueError(f"no rows to {stage} on: the feature cache {self.cache!r} has no validation rows")

    @property
    def _module_hparams(self) -> Mapping[str, Any]:
        """Of the module that is trained; empty without one."""
        return getattr(self.trainer.lightning_module, "hparams", {}) if self.trainer else {}

    def _open(self) -> FeatureCache:
        cache = FeatureCache(Path(self.cache))
        for path, reason in cache.damaged.items():
            raise ValueError(
                f"the shard {str(path)!r} of the feature cache is damaged: {reason}; dspark precompute rebuilds it"
            )
        if lacks := cache.lacks():
            raise ValueError(
                f"the feature cache {self.cache!r} is incomplete, it lacks {lacks}: dspark precompute completes it"
            )
        cache.check_rows()
        longest = cache.manifest.max_length
        if self._given_length is not None and self._given_length < longest:
            raise ValueError(f"max_length {self._given_length} is less than that of the rows in the cache, {longest}")
        self.max_length = self._given_length or longest
        hparams = self._module_hparams
        check_fingerprint(known_of_target(hparams), cache.manifest.fingerprint, cache.folder)
        self.stored_target = cache.stored_target(bool(hparams.get("trust_remote_code", False)))
        if self.packing:
            check_packing(self.stored_target.config)
        rank_zero_info(f"Features come from {self.cache}, made with {cache.manifest.target}; the target is not loaded")
        return cache

    def collate_for(self, split: str = "train") -> Callable[[Any], dict[str, Tensor]]:
        """What makes batches of the rows of a split, features included. Needs `setup`."""
        assert self._cache is not None
        pad = partial(collate_rows, pad_token_id=self._cache.manifest.pad_token_id, max_length=self.max_length)
        return FeatureCollator(pad, self._cache, split, self._settings.mask_token_id)
