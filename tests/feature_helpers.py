"""Small feature caches."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from dspark_lightning import DSparkModule
from dspark_lightning.datamodules import ChatDataModule, HybridFeatureDataModule
from dspark_lightning.features.cache import FeatureCache
from dspark_lightning.features.shard import FeatureRow
from helpers import seeded

MODEL: dict[str, Any] = {
    "target": "embedded",
    "mask_token_id": 5,
    "num_draft_layers": 2,
    "num_anchors": 8,
    "markov_rank": 16,
    "target_layer_ids": [1, 3],
}


def new_module(**changes: Any) -> DSparkModule:
    return DSparkModule(**{**MODEL, **changes})


def new_source(**changes: Any) -> ChatDataModule:
    """40 embedded rows to train on, 8 to validate on."""
    given = {"train_data": "embedded", "val_data": "embedded", "train_split": "train[:40]", "val_split": "train[:8]"}
    return ChatDataModule(**{**given, "max_length": 128, "batch_size": 4, **changes})


def new_trainer(**changes: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **{**quiet, **changes})


def fill(cache: Path, source: ChatDataModule | None = None, module: DSparkModule | None = None) -> Path:
    """What `dspark precompute` does."""
    datamodule = HybridFeatureDataModule(source or new_source(), str(cache))
    trainer = new_trainer(use_distributed_sampler=False)
    trainer.predict(module or new_module(), datamodule=datamodule, return_predictions=False)
    return cache


def random_row(tokens: int, seed: int = 0, hidden: int = 6) -> FeatureRow:
    with seeded(seed):
        return FeatureRow(
            torch.randint(0, 100, (tokens,), dtype=torch.int32),
            torch.ones(tokens, dtype=torch.uint8),
            torch.randn(tokens, 2 * hidden).bfloat16(),
            torch.randn(tokens, hidden).bfloat16(),
        )


def shards(cache: Path, split: str = "train") -> list[Path]:
    return sorted((cache / "features" / split).glob("*.safetensors"))


def assert_same_rows(ours: FeatureCache, theirs: FeatureCache) -> None:
    assert ours.complete and not ours.verify() and ours.manifest == theirs.manifest
    for split in theirs.splits:
        held = sum(len(index) for index in ([*ours._splits[split].row_ids],))
        assert held == theirs.manifest.splits[split].rows  # no row twice
        rows = theirs.rows(split)
        for i in range(len(rows)):
            item = rows.encoded(i)
            asked = (split, int(item["row_id"]), item["input_ids"], item["loss_mask"])
            for mine, other in zip(ours.read(*asked), theirs.read(*asked), strict=True):
                torch.testing.assert_close(mine, other, atol=2e-2, rtol=2e-2)  # other padding, one step of bf16
