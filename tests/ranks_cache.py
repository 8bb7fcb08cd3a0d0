"""Two ranks fill a feature cache and train from it; each writes down its losses as JSON.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/ranks_cache.py FOLDER STRATEGY
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningDataModule

from dspark_lightning.datamodules import CachedFeatureDataModule, HybridFeatureDataModule
from feature_helpers import new_module, new_source
from ranks_helpers import quiet_trainer


class Losses(Callback):
    """Sums of the loss over all ranks, step by step."""

    def __init__(self) -> None:
        self.sums: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        terms = outputs["terms"]
        sums = trainer.strategy.reduce(terms["loss"] * terms["loss_den"], reduce_op="sum")
        self.sums.append([float(sums), float(trainer.strategy.reduce(terms["loss_den"], reduce_op="sum"))])

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.on_train_batch_end(trainer, module, outputs)


def train(strategy: str, datamodule: LightningDataModule, folder: Path) -> list[list[float]]:
    """Two epochs."""
    losses = Losses()
    quiet_trainer(strategy, folder, max_epochs=2, callbacks=[losses]).fit(new_module(), datamodule=datamodule)
    return losses.sums


def main(folder: Path, strategy: str) -> None:
    cache = folder / "cache"
    filling = HybridFeatureDataModule(new_source(batch_size=2), str(cache))
    trainer = quiet_trainer(strategy, folder)
    trainer.predict(new_module(), datamodule=filling, return_predictions=False)
    trainer.strategy.barrier()
    hybrid = HybridFeatureDataModule(new_source(batch_size=2), str(folder / "hybrid"))
    losses = {
        "cached": train(strategy, CachedFeatureDataModule(str(cache), batch_size=2), folder),
        "hybrid": train(strategy, hybrid, folder),
    }
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
