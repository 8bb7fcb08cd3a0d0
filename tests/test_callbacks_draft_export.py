"""DraftExport in real fits: which folders there are, with which weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import dspark_lightning.callbacks.draft_export as draft_export
from dspark_lightning.callbacks import DraftExport
from dspark_lightning.serving.record import ExportRecord
from fakes import FakeDSpark, fake_loader, tiny_trainer


@pytest.fixture(autouse=True)
def exported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the exporter by one that writes the draft's weights alone; lists the folders it wrote."""
    written: list[str] = []

    def write(draft: nn.Module, path: Path, weights: dict[str, torch.Tensor], record: ExportRecord) -> Path:
        del draft, record
        path.mkdir(parents=True, exist_ok=True)
        torch.save(weights, path / "weights.pt")
        written.append(path.name)
        return path

    monkeypatch.setattr(draft_export, "export_draft", write)
    return written


def fit(tmp_path: Path, *callbacks: Callback, dirpath: Path | None = None, **arguments: Any) -> Trainer:
    options = {"max_epochs": 4, "enable_checkpointing": True} | arguments
    trainer = tiny_trainer(tmp_path, callbacks=[DraftExport(dirpath and str(dirpath)), *callbacks], **options)
    trainer.fit(FakeDSpark(), fake_loader(0, 1))
    return trainer


def folders(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir() if entry.name.startswith("dspark")}


def test_a_folder_for_every_checkpoint_with_its_weights(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", filename="{step}", save_top_k=-1), dirpath=tmp_path / "d")
    assert folders(tmp_path / "d") == {"dspark-draft", *(f"dspark-step={step}" for step in (2, 4, 6, 8))}
    for step in (2, 4, 6, 8):
        saved = torch.load(tmp_path / "c" / f"step={step}.ckpt")["state_dict"]
        weights = torch.load(tmp_path / "d" / f"dspark-step={step}" / "weights.pt")
        assert {f"draft.{name}": value for name, value in weights.items()} == saved


def test_a_folder_goes_with_its_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", filename="{step}", save_last=True))
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"step=8.ckpt", "last.ckpt"}
    assert folders(tmp_path) == {"dspark-draft", "dspark-step=8"}


def test_the_best_checkpoint_keeps_its_folder(tmp_path: Path) -> None:
    class Score(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            pl_module.log("score", [1.0, 3.0, 2.0, 0.0][trainer.current_epoch])

    best = ModelCheckpoint(tmp_path / "c", monitor="score", mode="max", filename="{step}")
    fit(tmp_path, Score(), best, ModelCheckpoint(tmp_path / "e", filename="{step}"))
    assert folders(tmp_path) == {"dspark-draft", "dspark-step=4", "dspark-step=8"}


def test_two_checkpoints_of_one_step_are_one_export(tmp_path: Path, exported: list[str]) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", save_last=True), max_epochs=1)
    assert exported == ["dspark-step=2", "dspark-draft"]


def test_the_end_of_a_fit_without_checkpoint_exports(tmp_path: Path) -> None:
    fit(tmp_path, enable_checkpointing=False)
    assert folders(tmp_path) == {"dspark-draft"}


def test_log_dir_is_the_default(tmp_path: Path) -> None:
    trainer = fit(tmp_path, enable_checkpointing=False, logger=True)
    assert trainer.log_dir is not None
    assert folders(Path(trainer.log_dir)) == {"dspark-draft"}


def test_fast_dev_run_writes_nothing(tmp_path: Path, exported: list[str]) -> None:
    fit(tmp_path, fast_dev_run=True)
    assert exported == []


def test_ctrl_c_exports_what_was_learned(tmp_path: Path) -> None:
    class Interrupt(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        fit(tmp_path, Interrupt(), enable_checkpointing=False)
    assert folders(tmp_path) == {"dspark-draft"}


@pytest.mark.parametrize("saves", [True, False])
def test_ctrl_c_gathers_no_draft_that_is_split(
    tmp_path: Path, saves: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other ranks may be anywhere by then, and would not join in."""
    gathered: list[nn.Module] = []
    monkeypatch.setattr(draft_export, "is_sharded", lambda draft: True)
    monkeypatch.setattr(draft_export, "full_state_dict", lambda draft: gathered.append(draft) or draft.state_dict())

    class Interrupt(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.current_epoch == 2:
                gathered.clear()
                raise KeyboardInterrupt

    saving = ModelCheckpoint(tmp_path / "c", filename="{step}", save_top_k=1 if saves else 0)
    with pytest.raises(SystemExit):
        fit(tmp_path, Interrupt(), saving)
    assert not gathered and "dspark-draft" not in folders(tmp_path)
    command = f"No draft is exported; run: dspark export --ckpt_path {tmp_path / 'c' / 'step=4.ckpt'}"
    assert (command if saves else "No draft is exported, and no checkpoint was saved") in caplog.messages


def test_says_what_it_wrote_and_what_comes_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, enable_checkpointing=False)
    assert f"Draft exported to {tmp_path / 'dspark-draft'}" in caplog.messages
    command = next(message for message in caplog.messages if message.startswith("Next: "))
    speculative = command.partition("--speculative-config ")[2].strip("'")
    assert "vllm serve 'a target'" in command
    assert json.loads(speculative) == {"model": str(tmp_path / "dspark-draft"), "num_speculative_tokens": 2}
