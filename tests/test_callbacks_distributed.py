"""The callbacks over two ranks, and a window that is saved by two ranks and resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes import fake_tau

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

EPOCH = (0, 1, 2, 3, 4, 5)  # three steps, one batch of each rank in each


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 logged in each run."""
    folder = tmp_path_factory.mktemp("ddp")
    script = Path(__file__).with_name("ddp_acceptance.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([*launcher, str(script), str(folder)], capture_output=True, text=True, check=False, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads((folder / "records.json").read_text())


def test_values_cover_all_ranks(records: dict[str, Any]) -> None:
    windows = [(4, fake_tau(*EPOCH, 0, 1, 2, 3)), (9, fake_tau(4, 5, *EPOCH, 0, 1)), (11, fake_tau(2, 3, 4, 5))]
    train = records["unbroken"]["train"]
    assert [(step, values["train/tau"]) for step, values in train] == [(s, pytest.approx(t)) for s, t in windows]
    assert train[2][1]["train/supervised_tokens"] == pytest.approx((7 + 9 + 11 + 13) / 2)
    assert records["unbroken"]["val"][0][1]["val/tau"] == pytest.approx(fake_tau(1, 6))


def test_resume_counts_the_saved_window_once(records: dict[str, Any]) -> None:
    assert records["resumed"]["train"] == records["unbroken"]["train"]


def test_throughput_counts_all_ranks(records: dict[str, Any]) -> None:
    values = records["unbroken"]["time"][0][1]
    assert values["time/rows_per_second"] * 5 * values["time/step"] == pytest.approx(2 * 5 * 3)
