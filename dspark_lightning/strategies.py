"""Strategies that split a target+draft pair over the ranks.

They are Lightning's, with what a pair needs: RoPE tables that stay fp32, gradients summed in fp32, and checkpoints that
are there as a whole or not at all.

Example:
    >>> from lightning.pytorch import Trainer
    >>> trainer = Trainer(strategy=DSparkFSDP2Strategy(), devices=8)  # doctest: +SKIP
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import MixedPrecision

from dspark_lightning.checkpoints import check_for_loading, put_checkpoint, write_problem
from dspark_lightning.delivery import all_or_none, gather_values
from dspark_lightning.replace import discard, scratch_path
from dspark_lightning.sharded_checkpoint import readable, seal


class _WholeCheckpoints(ParallelStrategy):
    """Puts a checkpoint under its name only when every rank has written its part.

    Lightning writes a sharded one in place: a rank that dies meanwhile would take the previous one with it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save beside the final place, then move it there.

        Raises:
            ValueError: a rank cannot write; raised on every rank, and the predecessor is still there.
        """
        path = Path(self.broadcast(filepath))
        scratch = scratch_path(path)
        if self.is_global_zero:
            discard(scratch)
        self.barrier()
        problem = None
        try:
            super().save_checkpoint(checkpoint, scratch, storage_options)
        except (CheckpointException, OSError, RuntimeError, ValueError) as error:
            problem = write_problem(error)
            if problem is None:
                raise
        problems = gather_values(problem)
        problem = next(filter(None, problems), None)
        all_or_none(lambda: _finish(scratch, path, problem) if self.is_global_zero else None)

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint that this strategy can read.

        Raises:
            ValueError: see `check_for_loading`.
        """
        check_for_loading(self.broadcast(checkpoint_path), type(self), kwargs.get("weights_only"))
        with readable(Path(checkpoint_path)):
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)


def _finish(scratch: Path, path: Path, problem: str | None) -> None:
    """Move a checkpoint to its place, or, if there was a problem, delete what there is of it."""
    try:
        if problem is None:
            if scratch.is_dir():
                seal(scratch)
            put_checkpoint(scratch, path)
            return
    except OSError as error:
        problem = error.strerror or str(error)
    discard(scratch)
    raise ValueError(f"cannot write the checkpoint {str(path)!r}: {problem}")


class DSparkFSDPStrategy(_WholeCheckpoints, FSDPStrategy):
    """FSDP1: Lightning's `FSDPStrategy`, arguments included, without its cast of buffers.

    bf16-mixed is autocast over fp32 weights, as everywhere else; bf16-true holds bf16 weights. Gradients are summed
    over ranks in fp32. An explicit `mixed_precision` replaces all of that.
    """

    def setup_environment(self) -> None:
        """Refuse the CPU, before anything is read.

        Raises:
            ValueError: torch's FSDP1 needs accelerators.
        """
        if self.root_device.type == "cpu":
            raise ValueError(
                "FSDP1 does not run on the CPU: take dspark_lightning.strategies.DSparkFSDP2Strategy, as "
                "configs/strategy/fsdp2.yaml does, or set trainer.accelerator to gpu"
            )
        super().setup_environment()

    @property
    def mixed_precision_config(self) -> MixedPrecision:
        """What FSDP casts: by default only the gradients on their way."""
        return self.mixed_precision or MixedPrecision(reduce_dtype=torch.float32)


class DSparkFSDP2Strategy(_WholeCheckpoints, ModelParallelStrategy):
    """FSDP2: Lightning's `ModelParallelStrategy` with all ranks in its data-parallel dimension.

    Args:
        save_distributed_checkpoint: True writes a folder to which each rank adds its part; False one file, which every
            strategy reads.
        process_group_backend: None takes the device's: nccl or gloo.
        timeout: how long ranks wait for each other.
    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def setup_environment(self) -> None:
        """Count the ranks; Lightning's "auto" would count nodes."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
