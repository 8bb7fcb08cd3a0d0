"""All callbacks with the real module on a tiny random target."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from dspark_lightning.callbacks import AcceptanceMetrics, DraftExport, RopePrecisionCheck, StepTimer
from dspark_lightning.module import DSparkModule
from dspark_lightning.pretrained import load_pretrained_draft
from fakes import RecordingLogger, tiny_trainer
from helpers import TINY, seeded, tiny_qwen3

VOCAB = TINY["vocab_size"]


def loader(first_row: int, rows: int) -> DataLoader[dict[str, Tensor]]:
    with seeded(first_row):
        ids = torch.randint(3, VOCAB - 1, (rows, 24))
    names = ("input_ids", "attention_mask", "loss_mask")
    columns = dict(zip(names, (ids, torch.ones_like(ids), torch.ones_like(ids)), strict=True))
    columns["row_id"] = torch.arange(first_row, first_row + rows)
    items = [{name: column[i] for name, column in columns.items()} for i in range(rows)]
    return DataLoader(items, batch_size=2)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, DSparkModule, RecordingLogger, Path]:
    folder = tmp_path_factory.mktemp("run")
    tiny_qwen3().save_pretrained(folder / "target")
    module = DSparkModule(
        str(folder / "target"), VOCAB - 1, num_draft_layers=1, block_size=3, num_anchors=4, markov_rank=4
    )
    logger = RecordingLogger()
    best = ModelCheckpoint(folder, monitor="val/tau", mode="max", filename="{step}")
    callbacks = [best, DraftExport(str(folder)), StepTimer(), RopePrecisionCheck(), AcceptanceMetrics()]
    options = dict(max_epochs=2, log_every_n_steps=2, logger=logger, callbacks=callbacks, enable_checkpointing=True)
    trainer = tiny_trainer(folder, **options)
    trainer.fit(module, loader(0, 4), loader(100, 3))
    return trainer, module, logger, folder


def test_every_value_is_logged(run: tuple[Trainer, DSparkModule, RecordingLogger, Path]) -> None:
    logger = run[2]
    names = {"loss", "ce_loss", "l1_loss", "confidence_loss", "accept_rate", "accept_rate@1", "accept_rate@2"}
    names |= {"accept_rate@3", "tau", "tau_full", "confidence_abs_error", "confidence_bias", "confidence_cumprod_bias"}
    names |= {"supervised_tokens", "kept_anchors"}
    skipped = [record for record in logger.records if "train/skipped_steps" in record[1]]
    assert skipped == [(1, {"train/skipped_steps": 0}), (3, {"train/skipped_steps": 0})]
    logger.records = [record for record in logger.records if record not in skipped]
    for stage in ("train", "val"):
        assert [step for step, _ in logger.of(stage)] == [1, 3]
        assert {name.partition("/")[2] for name in logger.of(stage)[0][1]} == names
    assert 1 < logger.of("val")[0][1]["val/tau"] < 4
    assert min(logger.of("time")[0][1].values()) > 0


def test_validation_of_the_checkpoint_gives_what_fit_logged(
    run: tuple[Trainer, DSparkModule, RecordingLogger, Path],
) -> None:
    trainer, module, logger, folder = run
    best = max((values["val/tau"], step) for step, values in logger.of("val"))
    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    assert Path(path) == folder / f"step={best[1] + 1}.ckpt"
    values = tiny_trainer(folder).validate(module, loader(100, 3), ckpt_path=path, verbose=False)[0]
    assert values == pytest.approx(dict(logger.of("val"))[best[1]], rel=1e-6)


def test_exported_draft_is_the_trained_one(run: tuple[Trainer, DSparkModule, RecordingLogger, Path]) -> None:
    trainer, _, _, folder = run
    saved = torch.load(trainer.checkpoint_callback.best_model_path)["state_dict"]  # type: ignore[union-attr]
    step = trainer.checkpoint_callback.best_model_path.partition("step=")[2].removesuffix(".ckpt")  # type: ignore[union-attr]
    exported = load_pretrained_draft(folder / f"dspark-step={step}").state_dict()
    assert (folder / "dspark-draft" / "model.safetensors").exists()
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, saved[f"draft.{name}"].bfloat16(), rtol=0, atol=0)
