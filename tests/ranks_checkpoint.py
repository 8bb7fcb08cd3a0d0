"""Runs of one or two ranks that save, die and go on; see `make_runs`.

It is also a process of its own, from which the ranks are forked: everything is imported once, so that a run costs
little more than its training. As torchrun does, it ends the other ranks when one fails.
"""

import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from dspark_lightning import Qwen3DSpark, cli
from dspark_lightning.callbacks import DraftExport
from dspark_lightning.datamodules import ChatDataModule
from dspark_lightning.embedded import embedded_data
from dspark_lightning.sharding import full_state_dict
from ranks_helpers import quiet_trainer

SAVES = (3, 6)
"""Steps with a checkpoint, in the middle of the first and of the second epoch."""
STEPS = 8


@dataclass
class Run:
    """One fit.

    Args:
        name: of what it writes.
        strategy: ddp, fsdp1, fsdp1-sharded, fsdp2, fsdp2-sharded or alone.
        ranks: processes; four rows a step, however many there are.
        ckpt_path: from which it goes on.
        last: keeps one checkpoint, last.ckpt, in the folder of this name; otherwise one for each step in that of the
            run's own name.
        accident: a function below; rank `at` meets it at the second save.
        at: see `accident`.
        arguments: of the command line, in place of all the others except `ranks`, `accident` and `at`.
    """

    name: str
    strategy: str = "alone"
    ranks: int = 2
    ckpt_path: str | None = None
    last: str | None = None
    accident: str | None = None
    at: int = 1
    arguments: list[str] = field(default_factory=list)


class Outcomes:
    """What runs left in a folder.

    Args:
        folder: NAME.pt (weights), NAME.RANK.json (rows of each step), NAME.RANK.log and codes.json are in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.codes: dict[str, list[int]] = json.loads((folder / "codes.json").read_text())

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        assert not any(self.codes[name]), self.log(name)[-3000:]
        weights: dict[str, torch.Tensor] = torch.load(self.folder / f"{name}.pt")
        return weights

    def rows(self, name: str) -> list[list[int]]:
        """Rows of each step, of one rank after the other."""
        ranks = range(len(self.codes[name]))
        steps = [json.loads((self.folder / f"{name}.{rank}.json").read_text()) for rank in ranks]
        return [list(chain(*step)) for step in zip(*steps, strict=True)]

    def log(self, name: str, rank: int = 0) -> str:
        return (self.folder / f"{name}.{rank}.log").read_text()


def make_runs(folder: Path, runs: list[Run]) -> Outcomes:
    """Make fits one after the other, on twenty rows: five steps an epoch."""
    with embedded_data("train").open() as lines:
        (folder / "rows.jsonl").write_text("".join(islice((line for line in lines if len(line) > 250), 20)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(folder)]
    plan = json.dumps([asdict(run) for run in runs])
    made = subprocess.run(command, input=plan, capture_output=True, text=True, check=False, env=environment)
    assert made.returncode == 0, made.stderr[-3000:]
    print(made.stdout)
    return Outcomes(folder)


def chosen_slow(request: pytest.FixtureRequest) -> bool:
    """Whether slow tests of the asking file run too, which need more fits."""
    mine = (item for item in request.session.items if item.path == request.path)
    return any(item.get_closest_marker("slow") for item in mine)


class Record(Callback):
    """Writes the rows of every step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[list[int]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: dict[str, torch.Tensor], *args: Any
    ) -> None:
        self.rows.append(batch["row_id"].tolist())
        self.path.write_text(json.dumps(self.rows))


def train(folder: Path, run: Run) -> None:
    record = Record(folder / f"{run.name}.{os.environ['RANK']}.json")
    if run.last:
        saving = ModelCheckpoint(folder / run.last, every_n_train_steps=3, save_top_k=0, save_last=True)
    else:
        saving = ModelCheckpoint(folder / run.name, "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = quiet_trainer(
        run.strategy,
        folder / run.name,
        devices=run.ranks,
        max_steps=STEPS,
        gradient_clip_val=1.0,
        enable_checkpointing=True,
        callbacks=[record, saving, *([] if run.last else [DraftExport(str(folder / run.name))])],
    )
    module = Qwen3DSpark(
        "embedded", mask_token_id=5, num_draft_layers=2, block_size=4, num_anchors=4, markov_rank=8, warmup_ratio=0.2
    )
    data = ChatDataModule(str(folder / "rows.jsonl"), max_length=64, batch_size=4 // run.ranks)
    trainer.fit(module, data, ckpt_path=run.ckpt_path)
    assert module.draft is not None
    weights = full_state_dict(module.draft)
    if trainer.is_global_zero:
        torch.save(weights, folder / f"{run.name}.pt")


# Accidents ------------------------------------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_writing_its_part() -> Any:
    write = FileSystemWriter.write_data

    def write_half(self: FileSystemWriter, *args: Any) -> None:
        write(self, *args).wait()
        part = next(Path(self.path).glob(f"__{dist.get_rank()}_*.distcp"))
        os.truncate(part, part.stat().st_size // 2)
        die()

    return mock.patch.object(FileSystemWriter, "write_data", write_half)


def dies_writing_the_file() -> Any:
    save = torch.save

    def save_half(checkpoint: Any, file: Any, **options: Any) -> None:
        save(checkpoint, file, **options)
        if isinstance(file, io.BufferedWriter):  # anything else is on its way to another rank
            file.flush()
            os.truncate(file.fileno(), file.tell() // 2)
            die()

    return mock.patch("torch.save", save_half)


def dies_while_rank_0_writes() -> Any:
    """On both ranks: rank 0 has written a half, rank 1 dies, and rank 0 is ended before it goes on."""
    save = torch.save

    def save_half(checkpoint: Any, file: Any, **options: Any) -> None:
        save(checkpoint, file, **options)
        if isinstance(file, io.BufferedWriter):
            file.flush()
            os.truncate(file.fileno(), file.tell() // 2)
            time.sleep(100)

    if dist.get_rank() == 0:
        return mock.patch("torch.save", save_half)
    return mock.patch("lightning.pytorch.strategies.ddp.DDPStrategy.save_checkpoint", lambda *args, **kwargs: die())


def dies_between_the_renames() -> Any:
    rename = Path.rename

    def rename_or_die(self: Path, target: Path) -> Path:
        if self.name.endswith(".writing") and self.is_dir():
            die()
        return rename(self, target)

    return mock.patch.object(Path, "rename", rename_or_die)


def leave_room(size: int) -> None:
    """No file may grow beyond these bytes, which is what the system calls too large."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def disk_is_full() -> Any:
    leave_room(50_000)
    return mock.patch.dict({})


def disk_is_full_at_last() -> Any:
    """Every rank has written its tensors; what is no tensor finds no room."""
    save = torch.save

    def fill_and_save(value: Any, file: Any, **options: Any) -> None:
        if isinstance(file, Path):
            leave_room(500)
        try:
            save(value, file, **options)
        finally:
            leave_room(resource.RLIM_INFINITY)  # for the log

    return mock.patch("torch.save", fill_and_save)


class Accident(Callback):
    """Prepares an accident after the first save, so that it happens at the second."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == SAVES[1] - 1:
            globals()[self.name]().start()


# Ranks ----------------------------------------------------------------------------------------------------------------


def run_rank(folder: Path, run: Run, rank: int, port: int) -> int:
    log = os.open(folder / f"{run.name}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(run.ranks)}
    os.environ |= {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        extra = [Accident(run.accident)] if run.accident and run.at in (rank, -1) else []
        with mock.patch.object(Qwen3DSpark, "configure_callbacks", _adding(extra)):
            if run.arguments:
                cli.main(run.arguments)
            else:
                train(folder, run)
        return 0
    except SystemExit as stop:
        return int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _adding(extra: list[Callback]) -> Any:
    configure = Qwen3DSpark.configure_callbacks
    return lambda self: [*configure(self), *extra]


def run_ranks(folder: Path, run: Run) -> list[int]:
    """Fork the ranks and wait for them.

    Returns:
        their exit codes; that of a killed one is negative.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks: dict[int, int] = {}
    for rank in range(run.ranks):
        pid = os.fork()
        if pid == 0:
            os._exit(run_rank(folder, run, rank, port))
        ranks[pid] = rank
    codes = [0] * run.ranks
    running = dict(ranks)
    end, ending = time.monotonic() + 120, signal.SIGTERM
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            if status:  # the others notice that by themselves, unless they are busy with something else
                end = min(end, time.monotonic() + 10)
        elif time.monotonic() > end:
            for other in running:
                os.kill(other, ending)
            end, ending = time.monotonic() + 10, signal.SIGKILL
        time.sleep(0.02)
    return codes


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    codes: dict[str, list[int]] = {}
    for arguments in json.load(sys.stdin):
        start = time.monotonic()
        run = Run(**arguments)
        codes[run.name] = run_ranks(folder, run)
        print(f"{time.monotonic() - start:.1f} s {run.name} {codes[run.name]}", flush=True)
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
