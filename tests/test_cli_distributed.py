"""The `dspark` command on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
OPTIONS = {
    "trainer.devices": 2,
    "trainer.strategy": "ddp",
    "trainer.max_steps": 3,
    "trainer.val_check_interval": 3,
    "trainer.limit_val_batches": 2,
    "trainer.enable_progress_bar": "false",
    "model.init_args.num_draft_layers": 1,
    "model.init_args.num_anchors": 4,
    "data.init_args.batch_size": 2,
}


@pytest.mark.slow
@pytest.mark.distributed
def test_a_fit_on_two_ranks_ends_well_and_prints_its_summary_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dspark_lightning", "fit", "--config", str(CONFIG)]
    command += [f"--{name}={value}" for name, value in OPTIONS.items()]
    environment = os.environ | {"PYTHONPATH": str(CONFIG.parent.parent)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("Trained 3 steps") == 1
    assert (tmp_path / "runs/quickstart/version_0/dspark-draft/model.safetensors").exists()
