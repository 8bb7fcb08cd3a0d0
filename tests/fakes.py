"""A module that returns given loss terms, and a logger that keeps what it is given: what the callback tests share."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader

ALPHAS = {"ce_loss_alpha": 0.1, "l1_loss_alpha": 0.9, "confidence_head_alpha": 1.0}


class FakeDSpark(LightningModule):
    """Stands for DSparkModule with block_size 2: its steps return the loss terms that the batch brings."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"target": "a target", "block_size": 2, **ALPHAS})
        self.draft = nn.Linear(1, 1)
        self.target = None

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        return {"loss": self.draft(torch.ones(1, 1)).sum(), "terms": batch["terms"]}

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        return {"terms": batch["terms"]}

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        return {"terms": batch["terms"]}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class RecordingLogger(Logger):
    """Keeps (step, values) of every call that brings more than the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int, dict[str, float]]] = []

    name = "recording"
    version = 0

    def log_hyperparams(self, params: object) -> None:
        del params

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        values = {name: value for name, value in metrics.items() if name != "epoch"}
        if values:
            self.records.append((step, values))

    def of(self, prefix: str) -> list[tuple[int, dict[str, float]]]:
        """The records of one stage, such as "train"."""
        return [(step, values) for step, values in self.records if all(x.startswith(f"{prefix}/") for x in values)]


def fake_terms(i: int) -> dict[str, Tensor]:
    """Terms whose ratios differ from batch to batch, and whose denominators do too."""
    den = i + 2
    return {
        "accept_rate_per_pos_num": torch.tensor([0.5 * den, 0.25 * (i + 1)]),
        "accept_rate_per_pos_den": torch.tensor([den, i + 1.0]),
        "tau_num": torch.tensor(den + 0.5 * i),
        "tau_den": torch.tensor(float(den)),
        "ce_loss_num": torch.tensor(3.0 * i),
        "l1_loss_num": torch.tensor(1.0 * i),
        "loss_den": torch.tensor(float(den)),
        "supervised_tokens": torch.tensor(2.0 * i + 3),
        "kept_anchors": torch.tensor(float(den)),
    }


def fake_loader(*indices: int) -> DataLoader[Any]:
    """One batch of 3 rows of 4 places for each index, 9 - index of them padding, with the terms of that index."""
    batches = [
        {
            "input_ids": torch.zeros(3, 4, dtype=torch.int64),
            "attention_mask": (torch.arange(12) < 3 + i).long().view(3, 4),
            "terms": fake_terms(i),
        }
        for i in indices
    ]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def fake_tau(*indices: int) -> float:
    """What tau over several of these batches must be."""
    return sum(i + 2 + 0.5 * i for i in indices) / sum(i + 2 for i in indices)


def tiny_trainer(tmp_path: Path, **arguments: Any) -> Trainer:
    """A quiet trainer on the CPU that writes below tmp_path."""
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, logger=False)
    return Trainer(**(quiet | dict(default_root_dir=tmp_path, accelerator="cpu", devices=1) | arguments))
