"""A run from a feature cache that is resumed in the middle of an epoch ends where an unbroken one ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule

from dspark_lightning.datamodules import CachedFeatureDataModule, HybridFeatureDataModule
from dspark_lightning.datamodules.resume import hand_over_position
from feature_helpers import fill, new_module, new_source, new_trainer
from helpers import seeded

SAVED, STOPPED = 8, 10  # batches trained; six in an epoch, which leaves four rows out


class Watch(Callback):
    def __init__(self, save: Path | None) -> None:
        self.rows: list[list[int]] = []
        self.save = save

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        self.rows.append(batch["row_id"].tolist())
        if self.save is not None and len(self.rows) == SAVED:
            trainer.save_checkpoint(self.save)
        if self.save is not None and len(self.rows) == STOPPED:
            raise RuntimeError("stopped")


def train(
    datamodule: LightningDataModule, save: Path | None = None, ckpt_path: Path | None = None
) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    watch, module = Watch(save), new_module()
    with seeded(0):
        new_trainer(max_epochs=3, callbacks=[watch], limit_val_batches=0).fit(
            module, datamodule=datamodule, ckpt_path=ckpt_path
        )
    assert module.draft is not None
    return watch.rows, module.draft.state_dict()


def datamodule(kind: str, cache: Path) -> LightningDataModule:
    if kind == "cached":
        return CachedFeatureDataModule(str(cache), batch_size=6)
    return HybridFeatureDataModule(new_source(batch_size=6), str(cache))


@pytest.mark.parametrize("kind", ["cached", "hybrid"])
def test_a_resumed_run_ends_in_the_same_weights(tmp_path: Path, kind: str) -> None:
    caches = [tmp_path / name for name in ("unbroken", "resumed")]
    if kind == "cached":
        caches = [fill(tmp_path / "cache", new_source(batch_size=6))] * 2
    rows, weights = train(datamodule(kind, caches[0]))
    with pytest.raises(RuntimeError, match="stopped"):
        train(datamodule(kind, caches[1]), save=tmp_path / "saved.ckpt")
    resumed_rows, resumed_weights = train(datamodule(kind, caches[1]), ckpt_path=tmp_path / "saved.ckpt")

    assert resumed_rows == rows[SAVED:]
    torch.testing.assert_close(resumed_weights, weights, atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["cached", "hybrid"])
def test_a_run_with_the_target_goes_on_from_a_cache(tmp_path: Path, kind: str) -> None:
    cache = fill(tmp_path / "cache", new_source(batch_size=6))
    rows, _ = train(new_source(batch_size=6))
    with pytest.raises(RuntimeError, match="stopped"):
        train(new_source(batch_size=6), save=tmp_path / "saved.ckpt")

    assert train(datamodule(kind, cache), ckpt_path=tmp_path / "saved.ckpt")[0] == rows[SAVED:]


def test_a_datamodule_of_another_kind_is_given_no_position() -> None:
    checkpoint = {"ChatDataModule": {"epoch": 1, "batches": 2, "pending": 0}}
    hand_over_position(checkpoint, LightningDataModule())

    assert list(checkpoint) == ["ChatDataModule"]
