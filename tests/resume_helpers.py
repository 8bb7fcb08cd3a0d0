"""A module that notes what it is trained on, and callbacks that save: what the tests of resuming share."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from dspark_lightning.datamodules.resume import settle_progress


class Recorder(LightningModule):
    """Notes the epoch and the rows of every batch it is trained on; its weight depends on all of them."""

    def __init__(self, stop_in_batch: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.seen: list[tuple[int, list[int]]] = []
        self.stop_in_batch = stop_in_batch

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if len(self.seen) == self.stop_in_batch:
            raise ArithmeticError("stopped")
        self.seen.append((self.current_epoch, batch["row_id"].tolist()))
        return (self.weight - batch["row_id"].double().mean()) ** 2

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        pass

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        settle_progress(checkpoint)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Lightning fetches the first batches for this number, before it has restored anything.
        assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.AdamW(self.parameters(), 0.01)


class SaveMore(Callback):
    """Saves where a second ModelCheckpoint, or one at the same step, would not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.folder / f"val_{trainer.global_step}.ckpt")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        trainer.save_checkpoint(self.folder / "failed.ckpt")


def saver(folder: Path, name: str, **when: Any) -> ModelCheckpoint:
    """Saves all its checkpoints as name_step.ckpt."""
    return ModelCheckpoint(folder, name + "_{step}", save_top_k=-1, auto_insert_metric_name=False, **when)
