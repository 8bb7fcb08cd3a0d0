"""Two ranks train a few steps under every strategy; each writes down what it saw as JSON.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/ranks_facts.py FOLDER [no-batch]
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

import dspark_lightning.module
from dspark_lightning import Qwen3DSpark
from dspark_lightning.datamodules import ChatDataModule
from dspark_lightning.delivery import Delivery
from dspark_lightning.embedded import embedded_data
from dspark_lightning.rope import rope_errors
from fsdp1_on_cpu import CPUFSDPStrategy
from ranks_helpers import STRATEGIES, quiet_trainer
from ranks_numbers import global_batch, share

RANK = int(os.environ.get("RANK", "0"))
OPTIONS: dict[str, Any] = {"num_draft_layers": 2, "block_size": 4, "num_anchors": 8, "markov_rank": 8}


class LightningsPrecision(CPUFSDPStrategy):
    """With the policy that Lightning's own class has."""

    mixed_precision_config = FSDPStrategy.mixed_precision_config


class Watch(Callback):
    """Notes dtypes while it trains, and what is held whole between two steps."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            gc.collect()
            full = pl_module.draft.config.vocab_size * pl_module.draft.config.hidden_size
            held = {
                x.untyped_storage().data_ptr()
                for x in gc.get_objects()
                if isinstance(x, torch.Tensor) and _holds(x, full)
            }
            self.seen["whole_vocabularies"] = len(held)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        draft, target = pl_module.draft, pl_module.target.model
        self.seen["rope"] = rope_errors(draft) + rope_errors(target)
        self.seen["loss"] = sorted({str(x.dtype) for x in (outputs["loss"], *outputs["terms"].values())})
        self.seen["weights"] = sorted({str(p.dtype) for p in draft.parameters() if p.requires_grad})
        self.seen["target_share"] = sum(_local(p) for p in target.parameters())


def _local(parameter: torch.Tensor) -> int:
    """Entries that this rank holds."""
    if parameter.is_meta:
        return 0
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


def _holds(tensor: torch.Tensor, entries: int) -> bool:
    """Whether a tensor's memory has room for a whole embedding."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return False
    return tensor.untyped_storage().nbytes() >= entries * tensor.element_size()


def loader(batches: int) -> DataLoader[Any]:
    return DataLoader([share(global_batch("unequal", i)) for i in range(batches)], batch_size=None)  # type: ignore[arg-type]


def fit(
    folder: Path, kind: Any, precision: str = "32-true", steps: int = 3, val: int = 1, **options: Any
) -> dict[str, Any]:
    """What was seen; or the error that stopped it."""
    watch = Watch()
    print(f"rank {RANK}: {kind} {precision} {options}", file=sys.stderr, flush=True)  # shown when something goes wrong
    trainer = quiet_trainer(kind, folder, precision=precision, max_epochs=1, callbacks=[watch], val_check_interval=1.0)
    module = options.pop("module", None) or Qwen3DSpark("embedded", mask_token_id=5, **(OPTIONS | options))
    try:
        trainer.fit(module, loader(steps), loader(val))
    except (ValueError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return watch.seen | {"tau": trainer.callback_metrics["val/tau"].item(), "steps": trainer.global_step}


class MeasuredDelivery(Delivery):
    """Notes after each part how many bytes of weights this process holds."""

    held: ClassVar[list[int]] = []

    def __call__(self, part: torch.nn.Module) -> None:
        super().__call__(part)
        gc.collect()
        tensors = (x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta)
        storages = (x.untyped_storage() for x in tensors)
        self.held.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))


def loading_growth(folder: Path, kind: str) -> int:
    """Bytes by which the memory of this rank grows while the target is split, from its second unit to its last."""
    MeasuredDelivery.held.clear()
    with mock.patch.object(dspark_lightning.module, "Delivery", MeasuredDelivery):
        fit(folder, kind)
    _, _, first, *others = MeasuredDelivery.held  # embedding and head are delivered before the first unit
    return max(others) - first


def fit_uneven(folder: Path, kind: str, val_rows: int) -> dict[str, Any]:
    """Eleven training rows in global batches of four, and validation rows that do not come out even."""
    rows = folder / "rows.jsonl"
    lines = embedded_data("train").read_text().splitlines()
    if RANK == 0:
        rows.write_text("\n".join(lines[:11]))
        (folder / "val.jsonl").write_text("\n".join(lines[20 : 20 + val_rows]))
    barrier()
    trainer = quiet_trainer(kind, folder, max_epochs=2)
    module = Qwen3DSpark("embedded", mask_token_id=5, **OPTIONS)
    batch_size = 4 // trainer.world_size
    trainer.fit(module, ChatDataModule(str(rows), str(folder / "val.jsonl"), max_length=64, batch_size=batch_size))
    values = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    barrier()
    return values | {"steps": trainer.global_step}


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


class TwoOptimizers(Qwen3DSpark):
    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        half = list(self.parameters())
        return [SGD(half[:2], lr=0.1), SGD(half[2:], lr=0.1)]


def main() -> None:
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["no-batch"]:
        sys.exit(fit(folder, "ddp", steps=2 * (1 - RANK)).get("error"))
    loads = count_loads()
    facts: dict[str, Any] = {}
    for name in STRATEGIES:
        for precision in ("32-true", "bf16-mixed", "bf16-true"):
            facts[f"{name} {precision}"] = fit(folder, name, precision)
        facts[f"{name} replicated"] = fit(folder, name, "bf16-mixed", shard_target=False)
        facts[f"{name} recomputed"] = fit(folder, name, activation_checkpointing=True)
    facts["loads"] = len(loads)
    for name in ("fsdp1", "fsdp2"):
        facts[f"{name} loading"] = loading_growth(folder, name)
    for precision in ("bf16-mixed", "bf16-true"):
        facts[f"Lightning's {precision}"] = fit(folder, LightningsPrecision(), precision)
    for name, rows in (("uneven", 5), ("one row", 1)):
        for kind in STRATEGIES:
            facts[f"{kind} {name}"] = fit_uneven(folder, kind, rows)
    facts["fsdp2 by hand"] = fit(folder, ModelParallelStrategy(2, 1), "bf16-true")
    facts["default sizes"] = fit(folder, ModelParallelStrategy())
    facts["tensor parallel"] = fit(folder, ModelParallelStrategy(1, 2))
    facts["training batches"] = fit(folder, "fsdp2", steps=3 - RANK)
    facts["validation batches"] = fit(folder, "ddp", val=2 + RANK)
    facts["optimizers"] = fit(folder, "ddp", module=TwoOptimizers("embedded", mask_token_id=5, **OPTIONS))
    dspark_lightning.module.load_target = lambda *args, **kwargs: fail()
    facts["unreadable"] = fit(folder, "ddp")
    (folder / f"rank{RANK}.json").write_text(json.dumps(facts))
    dist.barrier()


def count_loads() -> list[str]:
    """A list that grows with each target this rank reads."""
    loads: list[str] = []
    load: Callable[..., PreTrainedModel] = dspark_lightning.module.load_target

    def counted(target: str, *args: Any, **kwargs: Any) -> PreTrainedModel:
        loads.append(target)
        return load(target, *args, **kwargs)

    dspark_lightning.module.load_target = counted
    return loads


def fail() -> PreTrainedModel:
    raise ValueError("cannot read the target 'embedded': damaged")


if __name__ == "__main__":
    main()
