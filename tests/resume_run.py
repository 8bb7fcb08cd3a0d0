"""Train a small drafter for the embedded target; test_resume.py also runs it as a process of its own."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from dspark_lightning import Qwen3DSpark
from dspark_lightning.datamodules import ChatDataModule


class KillAt(Callback):
    """Ends the process the hard way after some step, as a power cut would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class RecordRows(Callback):
    """Keeps the row ids that were trained."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: dict[str, torch.Tensor], *args: Any
    ) -> None:
        self.rows += batch["row_id"].tolist()


def train(folder: Path, rows: Path, ckpt_path: str | None = None, kill_at: int | None = None) -> dict[str, Any]:
    """Sixteen steps of four rows, a checkpoint every three. Returns the weights and the rows trained."""
    torch.set_num_threads(1)
    record = RecordRows()
    callbacks = [record, ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)]
    trainer = Trainer(
        accelerator="cpu",
        max_steps=16,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks + ([KillAt(kill_at)] if kill_at else []),
    )
    module = Qwen3DSpark(
        "embedded", mask_token_id=5, num_draft_layers=1, block_size=4, num_anchors=4, markov_rank=8, warmup_ratio=0.2
    )
    trainer.fit(module, ChatDataModule(str(rows), max_length=64, batch_size=4), ckpt_path=ckpt_path)
    return {"weights": module.state_dict(), "rows": record.rows}


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]), kill_at=int(sys.argv[3]))
