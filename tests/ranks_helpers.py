"""What the tests on two ranks share: strategies by name, a quiet trainer, and how a script is started on two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from dspark_lightning.strategies import DSparkFSDP2Strategy
from fsdp1_on_cpu import CPUFSDPStrategy

STRATEGIES = ("ddp", "fsdp1", "fsdp2")


def make_strategy(name: str) -> str | Strategy:
    """A fresh strategy: alone, ddp, fsdp1 or fsdp2; with "-sharded" its checkpoints are folders."""
    kind, _, sharded = name.partition("-")
    if kind == "fsdp1":
        return CPUFSDPStrategy(state_dict_type="sharded" if sharded else "full")
    if kind == "fsdp2":
        return DSparkFSDP2Strategy(save_distributed_checkpoint=bool(sharded))
    return "auto" if kind == "alone" else kind


def quiet_trainer(strategy: str | Strategy, folder: Path, **options: Any) -> Trainer:
    """A trainer on the CPU over all ranks there are, without checkpoints unless asked for."""
    torch.set_num_threads(1)
    defaults = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("WORLD_SIZE", "1")),
        "strategy": make_strategy(strategy) if isinstance(strategy, str) else strategy,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "default_root_dir": folder,
    }
    return Trainer(**(defaults | options))


def run_on_two_ranks(script: str, *arguments: object, timeout: float = 280) -> None:
    """Run a script of this folder under torchrun; its errors are shown."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(Path(__file__).with_name(script)), *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=timeout)
    assert run.returncode == 0, run.stderr[-4000:]


def read_json(path: Path) -> Any:
    """What a script wrote."""
    return json.loads(path.read_text())
