"""Train two steps of a pair in many ways and write down the bytes that each rank then holds.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/ranks_memory.py FOLDER
"""

import gc
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dspark_lightning import Qwen3DSpark
from dspark_lightning.datamodules import ChatDataModule
from ranks_helpers import make_strategy, quiet_trainer

RUNS = [("ddp", "whole"), ("fsdp", "whole"), ("fsdp", "split"), ("fsdp2", "whole"), ("fsdp2", "split")]
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
DRAFT = {"num_draft_layers": 2, "mask_token_id": 5, "block_size": 4, "num_anchors": 8, "markov_rank": 8}


def strategy_of(name: str) -> str | Strategy:
    """That of the overlay; FSDP1 through its class for the CPU."""
    return (
        DDPStrategy(gradient_as_bucket_view=True) if name == "ddp" else make_strategy({"fsdp": "fsdp1"}.get(name, name))
    )


class Count:
    """Bytes of storages, each counted for the first who names it."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, tensors: Iterable[Any]) -> int:
        total = 0
        for tensor in tensors:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if not isinstance(local, Tensor) or local.is_meta:
                continue
            storage = local.untyped_storage()
            if storage.data_ptr() not in self.seen and storage.nbytes():
                self.seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total


def weights(module: nn.Module) -> list[nn.Parameter]:
    return [
        *module.parameters(),
        *(x for m in module.modules() for x in [getattr(m, "_flat_param", None)] if x is not None),
    ]


class Measure(Callback):
    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.others: list[tuple[list[int], str, int]] = []
        # What earlier runs of this process left is not this one's; held on to, so that its memory is not used again.
        self.before = [x for x in gc.get_objects() if isinstance(x, Tensor)]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step < 2:
            return
        target, draft = pl_module.target.model, pl_module.draft  # type: ignore[union-attr]
        assert isinstance(target, nn.Module) and isinstance(draft, nn.Module)
        count, states = Count(), trainer.optimizers[0].state.values()
        self.held = {
            "target: weights": count(weights(target)),
            "target: buffers": count(target.buffers()),
            "draft: frozen embedding and head": count(p for p in weights(draft) if not p.requires_grad),
            "draft: trained weights": count(weights(draft)),
            "draft: gradients": count(p.grad for p in draft.parameters()),
            "draft: AdamW's two states": count(state[key] for state in states for key in ("exp_avg", "exp_avg_sq")),
            "draft: buffers": count(draft.buffers()),
        }
        gc.collect()
        count(self.before)
        for x in gc.get_objects():
            if isinstance(x, Tensor) and not isinstance(x, DTensor) and (size := count([x])):
                self.others.append((list(x.shape), str(x.dtype), size))


def measure(strategy: str, precision: str, where: str, folder: Path) -> dict[str, Any]:
    """What this rank holds after two steps of a pair whose target is "whole" or "split"."""
    measuring = Measure()
    options = {"precision": precision, "max_steps": 2, "limit_val_batches": 0, "callbacks": [measuring]}
    trainer = quiet_trainer(strategy_of(strategy), folder, **options)
    module = Qwen3DSpark("embedded", shard_target=where == "split", **DRAFT)  # type: ignore[arg-type]
    trainer.fit(module, ChatDataModule("embedded", "embedded", max_length=64, batch_size=2))
    largest = sorted(measuring.others, key=lambda other: -other[2])[:6]
    return {"held": measuring.held, "others": sum(size for *_, size in measuring.others), "largest": largest}


def main() -> None:
    folder = Path(sys.argv[1])
    runs = [(strategy, precision, where) for strategy, where in RUNS for precision in PRECISIONS]
    facts = {" ".join(run): measure(*run, folder) for run in runs}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
