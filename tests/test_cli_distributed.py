"""The `dspark` command on two ranks, under each strategy."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import DistBackendError

from dspark_lightning import cli

CONFIGS = Path(__file__).parent.parent / "configs"
OPTIONS = {
    "trainer.devices": 2,
    "trainer.max_steps": 3,
    "trainer.val_check_interval": 3,
    "trainer.limit_val_batches": 2,
    "trainer.enable_progress_bar": "false",
    "model.init_args.num_draft_layers": 1,
    "model.init_args.num_anchors": 4,
    "data.init_args.batch_size": 2,
}
STRATEGIES: dict[str, dict[str, str]] = {
    "ddp": {},
    # on the CPU torch refuses that of the overlay
    "fsdp": {"trainer.strategy.class_path": "fsdp1_on_cpu.CPUFSDPStrategy"},
    "fsdp2": {},
}


def fit(strategy: str, folder: Path) -> str:
    """Run the quickstart for three steps. Returns the line with tau."""
    command = [sys.executable, "-m", "dspark_lightning", "fit", "--config", str(CONFIGS / "quickstart.yaml")]
    command += ["--config", str(CONFIGS / "strategy" / f"{strategy}.yaml")]
    command += [f"--{name}={value}" for name, value in (OPTIONS | STRATEGIES[strategy]).items()]
    paths = [str(CONFIGS.parent), str(Path(__file__).parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("Trained 3 steps") == 1
    assert (folder / "runs/quickstart/version_0/dspark-draft/model.safetensors").exists()
    (line,) = re.findall(r"^Held-out rows: .* \(tau\).*$", run.stdout, flags=re.MULTILINE)
    return line


@pytest.mark.parametrize(
    "lost", [RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer\nmore"), DistBackendError("NCCL")]
)
def test_a_rank_that_another_left_says_so_in_one_line(
    lost: RuntimeError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: object) -> None:
        raise lost

    monkeypatch.setattr(cli, "run_lightning", run)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["fit"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "dspark: error: the connection to another rank is lost, whose own message says why it ended:"
    )
    assert line.endswith("start again with the last checkpoint as --ckpt_path")


def test_fsdp1_on_the_cpu_is_refused_before_anything_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overlay = CONFIGS / "strategy" / "fsdp.yaml"
    with pytest.raises(SystemExit, match="2"):
        cli.main(["fit", f"--config={CONFIGS / 'quickstart.yaml'}", f"--config={overlay}"])
    output = capsys.readouterr()
    assert "rows read" not in output.out + output.err
    assert output.err.splitlines()[-1].startswith(
        "dspark: error: FSDP1 does not run on the CPU: take dspark_lightning."
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_a_fit_on_two_ranks_ends_well_and_all_strategies_say_the_same(tmp_path: Path) -> None:
    folders = {strategy: tmp_path / strategy for strategy in STRATEGIES}
    for folder in folders.values():
        folder.mkdir()
    lines = {strategy: fit(strategy, folder) for strategy, folder in folders.items()}
    assert len(set(lines.values())) == 1, lines
