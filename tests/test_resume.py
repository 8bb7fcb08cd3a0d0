"""A run that is killed and resumed ends where an unbroken one ends, bit for bit."""

import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import resume_run
from dspark_lightning.embedded import embedded_data


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty rows: ten steps an epoch, so sixteen steps end in the middle of the second."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with embedded_data("train").open() as lines:
        path.write_text("".join(islice((line for line in lines if len(line) > 250), 40)))
    return path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> dict[str, Any]:
    return resume_run.train(tmp_path_factory.mktemp("unbroken"), rows)


def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path, rows: Path, unbroken: dict[str, Any]) -> None:
    command = [sys.executable, resume_run.__file__, str(tmp_path), str(rows), "14"]
    killed = subprocess.run(command, capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr.decode()
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [f"step={s}.ckpt" for s in (12, 3, 6, 9)]
    resumed = resume_run.train(tmp_path, rows, ckpt_path=str(tmp_path / "step=12.ckpt"))
    assert resumed["rows"] == unbroken["rows"][12 * 4 :]
    torch.testing.assert_close(resumed["weights"], unbroken["weights"], atol=0, rtol=0)


@pytest.mark.parametrize("step", [3, 9])
def test_resuming_in_the_first_epoch(tmp_path: Path, rows: Path, unbroken: dict[str, Any], step: int) -> None:
    resume_run.train(tmp_path, rows)
    resumed = resume_run.train(tmp_path, rows, ckpt_path=str(tmp_path / f"step={step}.ckpt"))
    assert resumed["rows"] == unbroken["rows"][step * 4 :]
    torch.testing.assert_close(resumed["weights"], unbroken["weights"], atol=0, rtol=0)


def test_an_epoch_trains_every_row_once(unbroken: dict[str, Any]) -> None:
    assert sorted(unbroken["rows"][:40]) == list(range(40))
    assert unbroken["rows"][40:] != unbroken["rows"][:24]
