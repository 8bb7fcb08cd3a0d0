"""Whole files, folders that replace each other, and optimizer states by name, on one rank."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

import dspark_lightning.replace as replace
from dspark_lightning import Qwen3DSpark
from dspark_lightning.checkpoints import (
    WholeFileIO,
    name_optimizer_states,
    prepare_checkpoints,
    put_checkpoint,
    write_problem,
)
from dspark_lightning.datamodules import ChatDataModule
from dspark_lightning.replace import outdated_path, replace_path
from fakes import tiny_trainer


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "content").write_text(content)
    return path


def test_optimizer_states_get_the_names_of_their_parameters() -> None:
    class Module(nn.Module):
        def __init__(self, trainer: Any = None) -> None:
            super().__init__()
            self.frozen, self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
            self.trainer = trainer

    module = Module()
    optimizer = torch.optim.Adam([{"params": [module.b.weight], "lr": 0.1}, {"params": [module.a.weight], "lr": 0.2}])
    module.a.weight.grad, module.b.weight.grad = torch.full((1, 1), 2.0), torch.full((1, 1), 3.0)
    optimizer.step()
    module.trainer = SimpleNamespace(strategy=SingleDeviceStrategy(), optimizers=[optimizer])
    checkpoint = {"optimizer_states": [optimizer.state_dict()]}
    name_optimizer_states(module, checkpoint)  # type: ignore[arg-type]
    named = checkpoint["optimizer_states"][0]
    assert [(group["params"], group["lr"]) for group in named["param_groups"]] == [
        (["b.weight"], 0.1),
        (["a.weight"], 0.2),
    ]
    assert {name: state["exp_avg"].item() for name, state in named["state"].items()} == {
        "a.weight": pytest.approx(0.2),
        "b.weight": pytest.approx(0.3),
    }
    assert set(optimizer.state_dict()["state"]) == {0, 1}  # the optimizer itself is left alone
    optimizer.load_state_dict(named)
    assert optimizer.state[module.a.weight]["exp_avg"].item() == pytest.approx(0.2)


def test_a_checkpoint_of_weights_alone_has_no_optimizer_to_name() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    trainer = SimpleNamespace(strategy=None, optimizers=[optimizer])
    module = SimpleNamespace(trainer=trainer, named_parameters=lambda: ())
    checkpoint: dict[str, Any] = {"state_dict": {}}
    name_optimizer_states(module, checkpoint)  # type: ignore[arg-type]
    assert checkpoint == {"state_dict": {}}


def test_a_folder_takes_the_place_of_a_file(tmp_path: Path) -> None:
    """A run that goes on with sharded checkpoints where it had whole ones."""
    path = tmp_path / "last.ckpt"
    path.write_text("old")
    replace_path(folder(tmp_path / "new", "new"), path)
    assert (path / "content").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("before", ["nothing", "predecessor", "moved away", "both", "file", "link"])
def test_replacing_whatever_a_dead_run_left(tmp_path: Path, before: str) -> None:
    path = tmp_path / "last.ckpt"
    if before == "file":
        path.write_text("old")
    if before == "link":
        path.symlink_to(folder(tmp_path / "elsewhere", "kept"))
    if before in ("predecessor", "both"):
        folder(path, "old")
    if before in ("moved away", "both"):
        folder(outdated_path(path), "older")
        folder(tmp_path / ".last.outdated.ckpt.deleting", "oldest")
    if before == "file":
        (tmp_path / "new").write_text("new")
    replace_path(tmp_path / "new" if before == "file" else folder(tmp_path / "new", "new"), path)
    assert (path if before == "file" else path / "content").read_text() == "new"
    assert {entry.name for entry in tmp_path.iterdir()} - {"elsewhere"} == {"last.ckpt"}
    assert before != "link" or (tmp_path / "elsewhere" / "content").read_text() == "kept"


def test_at_every_moment_a_complete_folder_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, steps = folder(tmp_path / "last.ckpt", "old"), []
    folder(outdated_path(path), "older")

    def look() -> None:
        found = [p for p in (path, outdated_path(path)) if p.exists()]
        steps.append([(p / "content").read_text() for p in found])

    rename, delete = Path.rename, replace.shutil.rmtree

    def watched_rename(self: Path, target: Path) -> Path:
        look()
        return rename(self, target)

    def watched_delete(target: Path, **options: Any) -> None:
        look()
        assert target not in (path, outdated_path(path))  # nothing is deleted where it may be looked for
        delete(target, **options)

    monkeypatch.setattr(Path, "rename", watched_rename)
    monkeypatch.setattr(replace.shutil, "rmtree", watched_delete)
    replace_path(folder(tmp_path / "new", "new"), path)
    assert all({"old", "new"} & set(step) for step in steps) and ["old"] in steps


def test_a_checkpoint_io_that_the_user_gave_stays() -> None:
    class Own(TorchCheckpointIO):
        pass

    for given, kept in ((Own(), Own), (None, WholeFileIO), (TorchCheckpointIO(), WholeFileIO)):
        strategy = SingleDeviceStrategy(checkpoint_io=given)
        trainer = SimpleNamespace(strategy=strategy, state=SimpleNamespace(fn="validate"))
        prepare_checkpoints(trainer)  # type: ignore[arg-type]
        assert type(strategy.checkpoint_io) is kept
    prepare_checkpoints(None)


def test_a_folder_that_cannot_be_written_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    where = tmp_path / "file" / "checkpoints"
    options: dict[str, Any] = {"callbacks": [ModelCheckpoint(where)], "enable_checkpointing": True, "max_steps": 1}
    module = Qwen3DSpark("embedded", mask_token_id=5, num_draft_layers=1)
    with pytest.raises(ValueError, match=f"ModelCheckpoint cannot write to '{where}': Not a directory"):
        tiny_trainer(tmp_path, **options).fit(module, ChatDataModule("embedded", max_length=64))
    assert module.draft is None


def test_an_error_that_is_none_of_the_disk_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="local object"):
        WholeFileIO(SingleDeviceStrategy).save_checkpoint({"a": lambda: 0}, tmp_path / "a.ckpt")
    assert write_problem(RuntimeError("Connection closed by peer")) is None


def test_what_was_written_last_is_the_newest_though_the_clock_was_put_back(tmp_path: Path) -> None:
    """Lightning's ckpt_path="last" goes by the time."""
    first, second, third = (tmp_path / name for name in ("last.ckpt", "last-v1.ckpt", "last-v2.ckpt"))
    io, ahead = WholeFileIO(SingleDeviceStrategy), 4_000_000_000
    io.save_checkpoint({"step": 1}, first)
    os.utime(first, (ahead, ahead))
    io.save_checkpoint({"step": 2}, second)
    put_checkpoint(folder(tmp_path / "written", "3"), third)
    times = [path.stat().st_mtime for path in (first, second, third)]
    assert ahead == times[0] < times[1] < times[2] < ahead + 1
