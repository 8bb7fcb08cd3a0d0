"""A fit that is asked to end, folders that nobody may write to, and two runs that write to one place."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from dspark_lightning.checkpoint_draft import read_checkpoint
from dspark_lightning.checkpoints import WholeFileIO
from fault_kinds import EXPORTING, FIT, KINDS, SAVING, STEPS, Stage, same_export, small_disk

ONLY_WHEN_ASKED = SAVING | {"every_n_train_steps": 100, "save_on_exception": True}


def test_sigterm_saves_and_the_next_start_goes_on_there(stage: Stage, tmp_path: Path) -> None:
    whole, _ = stage.unbroken("fit")
    folder = tmp_path / "run"
    stage.prepare("fit", folder)
    saving = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": ONLY_WHEN_ASKED}
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": ".", "name": "logs"}}
    changes = {"callbacks": json.dumps([saving, EXPORTING]), "logger": json.dumps(logger), "log_every_n_steps": 1}
    arguments = [*FIT, *(f"--trainer.{name}={value}" for name, value in changes.items())]
    begun = "logs/version_0/metrics.csv"  # written at the first step
    ended = stage.commands.run(folder, arguments, kill_at=begun, signal=int(signal.SIGTERM))
    assert ended.code == 0, ended.output[-3000:]  # Lightning's way: whoever sent the signal knows
    step = read_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"]
    assert 0 < step < STEPS
    assert f"Going on at step {step} of " in stage.commands.finish(folder, arguments).output
    same_export(folder / "drafts" / "dspark-draft", whole / "drafts" / "dspark-draft")


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_nobody_may_write_to(kind: str, stage: Stage, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with small_disk(folder, 8_000, 0) as limit:
        stage.prepare(kind, folder)
        before = sorted(folder.rglob("*"))
        if limit:  # not mounted; unless it is root, a user is stopped by the mode
            folder.chmod(0o555)
        else:
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        ended = stage.commands.run(folder, KINDS[kind].arguments)
        assert ended.code == 2, ended.output[-3000:]
        assert "cannot write" in ended.last_line or "read-only" in ended.last_line, ended.last_line
        assert sorted(folder.rglob("*")) == before


def test_two_runs_that_save_to_one_place_leave_whole_files(tmp_path: Path) -> None:
    path, io = tmp_path / "last.ckpt", WholeFileIO(SingleDeviceStrategy)
    runs = []
    for number in (1, 2):
        pid = os.fork()
        if pid == 0:
            try:
                for _ in range(30):
                    io.save_checkpoint({"weights": torch.full((50_000,), number)}, path)
                os._exit(0)
            finally:
                os._exit(1)
        runs.append(pid)
    codes, seen = [], set()
    while runs:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            runs.remove(pid)
            codes.append(status)
        if path.exists():
            weights = torch.load(path)["weights"]
            seen.add(int(weights[0]))
            assert (weights == weights[0]).all() and len(weights) == 50_000
    assert codes == [0, 0] and seen <= {1, 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
