"""The `dspark` command on CUDA devices, under each strategy and precision. Run with `make test-cuda`."""

import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dspark_lightning import load_pretrained_draft

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).parent.parent
STRATEGIES = ("ddp", "fsdp", "fsdp2")
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
OPTIONS = {
    "trainer.max_steps": 4,
    "trainer.log_every_n_steps": 1,
    "trainer.val_check_interval": 4,
    "trainer.limit_val_batches": 2,
    "trainer.enable_progress_bar": "false",
    "model.init_args.num_anchors": 4,
    "data.init_args.batch_size": 2,
}


@pytest.fixture(autouse=True)
def _a_device() -> None:
    """Whoever asks for these tests must not take a skipped run for a passed one."""
    if not torch.cuda.is_available():
        pytest.fail("no CUDA device")


def losses(folder: Path, accelerator: str, devices: int, strategy: str | None, precision: str) -> list[float]:
    """Run the quickstart for four steps and read the loss of each from its log.

    A run whose RoPE tables are wrong does not end well: the configuration has `RopePrecisionCheck`.
    """
    command = [sys.executable, "-m", "dspark_lightning", "fit", "--config", str(ROOT / "configs" / "quickstart.yaml")]
    if strategy is not None:
        command += ["--config", str(ROOT / "configs" / "strategy" / f"{strategy}.yaml")]
    options = {"trainer.accelerator": accelerator, "trainer.devices": devices, "trainer.precision": precision}
    command += [f"--{name}={value}" for name, value in (OPTIONS | options).items()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("Trained 4 steps") == 1
    log = folder / "runs" / "quickstart" / "version_0"
    assert load_pretrained_draft(log / "dspark-draft").lm_head.weight.isfinite().all()
    events = EventAccumulator(str(log))
    events.Reload()
    return [scalar.value for scalar in events.Scalars("train/loss")]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_devices_train_and_export(strategy: str, precision: str, tmp_path: Path) -> None:
    found = losses(tmp_path, "gpu", torch.cuda.device_count(), strategy, precision)
    assert len(found) == 4 and all(math.isfinite(loss) for loss in found)


@cache
def losses_on_the_cpu(folder: Path) -> tuple[float, ...]:
    return tuple(losses(folder, "cpu", 1, None, "32-true"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_device_computes_what_the_cpu_computes(
    strategy: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "on-the-cpu"
    folder.mkdir(exist_ok=True)
    assert losses(tmp_path, "gpu", 1, strategy, "32-true") == pytest.approx(losses_on_the_cpu(folder), abs=1e-3)
