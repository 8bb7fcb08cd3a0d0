"""Checkpoints that are there as a whole or not at all, and a check of those that a run is asked to go on from."""

import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.api import CheckpointException

from dspark_lightning.checkpoint_content import check_content
from dspark_lightning.checkpoint_draft import read_checkpoint
from dspark_lightning.delivery import all_or_none, process_rank, world_size
from dspark_lightning.replace import alone_in, discard, replace_path, scratch_path
from dspark_lightning.sharded_checkpoint import written_by

_TICK = 1_000_000  # nanoseconds that tell two times apart


def check_checkpoint(path: str | Path, strategy: type[Strategy], weights_only: bool | None = None) -> None:
    """Check that a strategy can go on from a checkpoint.

    Args:
        path: of a file or a folder.
        strategy: that will read it.
        weights_only: as for `torch.load`; with False it may hold anything, and what is in it is not looked at.

    Raises:
        ValueError: it cannot be read, is incomplete, was not written by a `DSparkModule`, or is a folder that another
            strategy wrote.
    """
    if weights_only is not False:
        read_checkpoint(path)
    if not Path(path).is_dir():
        return
    writer = written_by(Path(path))
    reader = FSDPStrategy if writer == "FSDP1" else ModelParallelStrategy
    if not issubclass(strategy, reader):
        raise ValueError(
            f"the checkpoint {str(path)!r} is a folder that {writer} wrote, which {strategy.__name__} cannot read: run "
            "under the strategy that wrote it, or export its draft and start from that with draft_init"
        )


def check_for_loading(path: str | Path, strategy: type[Strategy], weights_only: bool | None = None) -> None:
    """`check_checkpoint`, and that every byte is the one that was written; all ranks have to call this, and share that.

    Raises:
        ValueError: see `check_checkpoint` and `check_content`.
    """
    check_checkpoint(path, strategy, weights_only)
    if weights_only is not False:
        all_or_none(lambda: check_content(Path(path), process_rank(), world_size()))


class WholeFileIO(TorchCheckpointIO):
    """Writes a checkpoint file beside its place, then moves it there.

    Lightning writes it to the system's folder for temporary files. Where that is another disk, moving it is copying it
    over its predecessor, which is lost when the run dies meanwhile or the disk is full.

    Args:
        strategy: for which checkpoints are read.
    """

    def __init__(self, strategy: type[Strategy]) -> None:
        self.strategy = strategy

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Save a file, whole or not at all.

        Raises:
            ValueError: it cannot be written; the predecessor is still there.
        """
        if _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with alone_in(Path(path).parent):  # a second run with the same folder would write the same file
            _write_whole(checkpoint, Path(path))

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a file.

        Raises:
            ValueError: see `check_for_loading`.
        """
        if not _is_remote(path):
            check_for_loading(path, self.strategy, kwargs.get("weights_only"))
        return super().load_checkpoint(path, *args, **kwargs)


def _write_whole(checkpoint: dict[str, Any], path: Path) -> None:
    scratch = scratch_path(path)
    try:
        with scratch.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        put_checkpoint(scratch, path)
    except (OSError, RuntimeError) as error:
        discard(scratch)
        reason = write_problem(error)
        if reason is None:
            raise
        raise ValueError(f"cannot write the checkpoint {str(path)!r}: {reason}") from error


def put_checkpoint(finished: Path, path: Path) -> None:
    """Move a checkpoint to its place, newer by its time than all that lie there.

    Lightning's ckpt_path="last" goes by the time, and the clock may have been put back since those were written.
    """
    times = [0]
    for other in path.parent.glob(f"*{path.suffix}"):
        with suppress(OSError):  # another run has just deleted it
            times.append(other.stat().st_mtime_ns)
    if finished.stat().st_mtime_ns <= max(times):
        os.utime(finished, ns=(max(times) + _TICK,) * 2)
    replace_path(finished, path)


def _is_remote(path: str | Path) -> bool:
    """Whether a path such as s3://bucket/name is meant for fsspec."""
    return "://" in str(path)


def prepare_checkpoints(trainer: Trainer | None) -> None:
    """Have a trainer's strategy use `WholeFileIO`, unless the user gave it something else than Lightning's default.

    Raises:
        ValueError: a fit could not write its checkpoints; now, not after hours of training.
    """
    if trainer is None:
        return
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = WholeFileIO(type(trainer.strategy))
    if trainer.state.fn == TrainerFn.FITTING and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        all_or_none(lambda: _check_folders(trainer) if trainer.is_global_zero else None)


def _check_folders(trainer: Trainer) -> None:
    for callback in trainer.checkpoint_callbacks:
        folder = getattr(callback, "dirpath", None)
        if folder is None or _is_remote(folder):
            continue
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(f"ModelCheckpoint cannot write to {folder!r}: {error.strerror or error}") from error


def name_optimizer_states(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Put parameters' names in place of their numbers, in a checkpoint that is about to be written.

    An optimizer numbers what it trains, FSDP takes such numbers for those of all parameters, the frozen ones included.
    Names mean the same to every strategy.
    """
    trainer = module.trainer
    if isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy)):  # these have names, or numbers of all
        return
    names = {parameter: name for name, parameter in module.named_parameters()}
    for i, optimizer in enumerate(trainer.optimizers[: len(checkpoint.get("optimizer_states", ()))]):
        saved = checkpoint["optimizer_states"][i]
        renamed: dict[int, str] = {}
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            own = [names[parameter] for parameter in group["params"]]
            renamed |= dict(zip(saved_group["params"], own, strict=True))
        checkpoint["optimizer_states"][i] = {
            **saved,
            "state": {renamed[number]: state for number, state in saved["state"].items()},
            "param_groups": [
                {**group, "params": [renamed[number] for number in group["params"]]} for group in saved["param_groups"]
            ],
        }


def write_problem(error: BaseException | None) -> str | None:
    """Why something could not be written; None where it is another error.

    torch raises errors of its own around those of the system, which are lost on their way from other ranks.
    """
    if isinstance(error, CheckpointException):
        problems = ((rank, write_problem(cause)) for rank, (cause, _) in sorted(error.failures.items()))
        return next((f"{problem} (on rank {rank})" for rank, problem in problems if problem is not None), None)
    problem = None
    while error is not None:
        if isinstance(error, OSError):
            return error.strerror or str(error)
        if "inline_container" in str(error):  # torch's writer of files
            problem = "not all of it was written, is the disk full?"
        error = error.__cause__ or error.__context__
    return problem
