"""FSDP1 on the CPU, which Lightning and torch refuse: for tests only, with the private names that it takes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import enable_wrap

from dspark_lightning.strategies import DSparkFSDPStrategy


def _full_state_dict(module: nn.Module, world_size: int, rank0_only: bool = True) -> AbstractContextManager[Any]:
    """Like Lightning's, but without offloading: on the CPU torch would free the storage it still reads."""
    return FSDP.state_dict_type(
        module,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
    )


class CPUFSDPStrategy(DSparkFSDPStrategy):
    """Hands torch the CPU as a device object; Lightning passes its index, which is None."""

    def setup_environment(self) -> None:
        super(DSparkFSDPStrategy, self).setup_environment()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        with enable_wrap(
            wrapper_cls=FSDP,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device,
            **self.kwargs,
        ):
            yield

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        if "mixed" in self.precision_plugin.precision:  # Lightning's is for CUDA
            self.precision_plugin.forward_context = lambda: torch.autocast("cpu", torch.bfloat16)  # type: ignore[method-assign]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with mock.patch("lightning.pytorch.strategies.fsdp._get_full_state_dict_context", _full_state_dict):
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        with mock.patch("lightning.pytorch.strategies.fsdp._get_full_state_dict_context", _full_state_dict):
            return super().optimizer_state(optimizer)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with mock.patch("lightning.pytorch.strategies.fsdp._get_full_state_dict_context", _full_state_dict):
            return super().load_checkpoint(*args, **kwargs)
