"""Train on batches of which some are not finite, on one rank or on two; what is spoiled is rank 1's on two.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/ranks_finite.py FOLDER
"""

import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from dspark_lightning import Qwen3DSpark
from dspark_lightning.callbacks import FiniteSteps
from dspark_lightning.sharding import full_state_dict
from fakes import RecordingLogger
from ranks_helpers import quiet_trainer
from ranks_numbers import LENGTH, ROWS, global_batch, share

BATCHES = 6
WIDTH = 128  # hidden size of the embedded target
BAD_ROW = 2


class LostLoss(Callback):
    """Makes the loss of some batches NaN and leaves their gradients as they are."""

    def __init__(self, indices: tuple[int, ...]) -> None:
        self.indices = indices
        self.here = False

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.here = int(batch["row_id"][0]) // ROWS in self.indices

    def on_before_backward(self, trainer: Trainer, module: Any, loss: Tensor) -> None:
        if self.here:
            loss.data.fill_(math.nan)


class Overflow(Callback):
    """Lets one entry of a gradient become infinite in the window of some batch, on the last rank."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.here = False

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.here = self.index in (batch["row_id"] // ROWS)

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        if self.here and trainer.global_rank == trainer.world_size - 1:
            grad = module.draft.fc.weight.grad
            (grad.to_local() if isinstance(grad, DTensor) else grad)[0, 0] = math.inf


def spoil(batch: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    """Make one row's weight infinite, or let it come with features that are not finite."""
    bad = (torch.arange(ROWS) == BAD_ROW).view(-1, 1)
    if how == "weights":
        return batch | {"loss_weights": torch.ones(ROWS, LENGTH).masked_fill(bad, math.inf)}
    if how == "features":
        values = torch.zeros(ROWS, LENGTH, WIDTH).masked_fill(bad.unsqueeze(-1), math.nan)
        return batch | {"target_hidden_states": values, "target_last_hidden_states": values}
    return batch


def train(
    folder: Path, how: str = "", bad: tuple[int, ...] = (), out: tuple[int, ...] = (), limit: int = 10, **options: Any
) -> dict[str, Any]:
    """Six batches, of which `bad` are spoiled and `out` are left out. Weights, states, and what was logged."""
    indices = [index for index in range(BATCHES) if index not in out]
    batches = [share(spoil(global_batch("plain", i), how if i in bad else "")) for i in indices]
    spoilers: dict[str, list[Callback]] = {"gradient": [Overflow(i) for i in bad], "loss": [LostLoss(bad)]}
    logger = RecordingLogger()
    trainer = quiet_trainer(
        options.pop("strategy", "alone"),
        folder,
        max_epochs=1,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=logger,
        callbacks=[*spoilers.get(how, []), FiniteSteps(limit)],
        **options,
    )
    sizes = {"num_draft_layers": 1, "block_size": 4, "num_anchors": 4, "markov_rank": 8}
    # A constant learning rate: the steps behind a skipped one have that of a run without it.
    module = Qwen3DSpark("embedded", mask_token_id=5, **sizes, warmup_ratio=0.0, min_lr_ratio=1.0)
    held_out = [share(global_batch("plain", BATCHES))] if "val_check_interval" in options else []
    trainer.fit(module, *(DataLoader(x, batch_size=None) for x in (batches, held_out) if x))  # type: ignore[arg-type]
    assert module.draft is not None
    return {
        "weights": full_state_dict(module.draft),
        "states": trainer.optimizers[0].state_dict()["state"],
        "skipped": [values["train/skipped_steps"] for _, values in logger.records if "train/skipped_steps" in values],
    }


def main(folder: Path) -> None:
    for strategy, how in (("ddp", "weights"), ("fsdp2", "gradient")):
        for name, changes in {"bad": {"bad": (1, 4)}, "out": {"out": (1, 4)}}.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = train(folder, how, strategy=strategy, **changes)
            result["warnings"] = [text for each in caught if " is skipped, " in (text := str(each.message))]
            del result["states"]
            torch.save(result, folder / f"{strategy}-{name}.{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
