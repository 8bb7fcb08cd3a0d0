"""A DataLoader of batches for a vision-language target, for training loops without a datamodule."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import ProcessorMixin

from dspark_lightning.datamodules.vlm_collate import dspark_vlm_collate_fn


def build_dspark_vlm_dataloader(
    dataset_cfg: Any,
    processor: ProcessorMixin,
    batch_size: int,
    max_length: int,
    shuffle: bool,
    num_workers: int = 0,
    distributed: bool = False,
    dp_mesh: DeviceMesh | None = None,
    inject_fake_image: bool = True,
) -> DataLoader[Any]:
    """Batches of `dspark_vlm_collate_fn`, with the index of each row as its `row_id`.

    Args:
        dataset_cfg: A sequence of conversations with pictures, or anything whose `.instantiate()` returns one.
        processor: The target's.
        batch_size: Rows of a batch on one rank.
        max_length: Tokens of every row.
        shuffle: Whether rows come in an order drawn anew each epoch (with `distributed`, set by the sampler's
            `set_epoch`).
        num_workers: Processes that read pictures.
        distributed: Whether the ranks share the rows out among them. All make the same number of steps; where the rows
            do not come out even, some come twice.
        dp_mesh: The ranks that share; None takes the whole world.
        inject_fake_image: See `dspark_vlm_collate_fn`.

    Raises:
        ValueError: dataset_cfg is no such thing or has no rows; `distributed` without a process group; or a dp_mesh
            of several dimensions or without `distributed`.
    """
    dataset = dataset_cfg.instantiate() if hasattr(dataset_cfg, "instantiate") else dataset_cfg
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(f"dataset_cfg must give a sequence of rows, got {type(dataset).__name__}")
    if not len(dataset):
        raise ValueError("dataset_cfg gives no rows")
    if dp_mesh is not None and (not distributed or dp_mesh.ndim != 1):
        raise ValueError(
            f"dp_mesh must be a mesh of one dimension, given together with distributed, got {dp_mesh.ndim} dimensions "
            f"and distributed {distributed}"
        )
    rows = _NumberedRows(dataset)
    sampler: DistributedSampler[Any] | None = None
    if distributed:
        replicas, rank = _share(dp_mesh)
        sampler = DistributedSampler(rows, replicas, rank, shuffle)
    return DataLoader(
        rows,
        batch_size,
        shuffle=shuffle and sampler is None,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=partial(
            dspark_vlm_collate_fn, processor=processor, max_length=max_length, inject_fake_image=inject_fake_image
        ),
    )


def _share(dp_mesh: DeviceMesh | None) -> tuple[int, int]:
    """How many ranks share the rows, and which of them this one is."""
    if dp_mesh is not None:
        return dp_mesh.size(), dp_mesh.get_local_rank()
    if not dist.is_initialized():
        raise ValueError(
            "distributed is true, but there is no process group: call torch.distributed.init_process_group"
        )
    return dist.get_world_size(), dist.get_rank()


class _NumberedRows(Dataset[dict[str, Any]]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        if not isinstance(row, Mapping):
            raise ValueError(f"row {index} must be an object with a conversation, got {type(row).__name__}")
        return {**row, "row_id": index}
