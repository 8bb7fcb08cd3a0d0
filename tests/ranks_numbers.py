"""Train a pair on given rows, on one rank or on two that share them: the numbers must be the same.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/ranks_numbers.py FOLDER
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader

from dspark_lightning import Qwen3DSpark
from dspark_lightning.module import default_optimizer
from dspark_lightning.sharding import full_state_dict
from fakes import RecordingLogger
from ranks_helpers import STRATEGIES, quiet_trainer

STEPS, ROWS, LENGTH = 8, 4, 40
SCENARIOS = ("unequal", "none", "accumulated", "plain", "clipped", "weighted")
OF_SGD = {"plain": 0.2, "clipped": 1.0, "weighted": 0.2}


def global_batch(scenario: str, index: int) -> dict[str, Tensor]:
    """Four rows: the first two are rank 0's, the others rank 1's."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(6, 1000, (ROWS, LENGTH), generator=generator)
    supervised = torch.tensor([(7 * (ROWS * index + row)) % 23 + 2 for row in range(ROWS)])
    if scenario == "none":  # rank 1 has no anchor in every other step, and once no rank has any
        supervised[2:] *= index % 2
        supervised *= index != 5
    places = torch.arange(LENGTH)
    weights = {"loss_weights": torch.tensor([[3.0], [0.5], [1.0], [0.1]]).expand(-1, LENGTH)}
    return (weights if scenario == "weighted" else {}) | {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "loss_mask": (places >= LENGTH - supervised.unsqueeze(-1)).long(),
        "row_id": torch.arange(ROWS) + ROWS * index,
    }


def share(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's rows."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    return {name: values.chunk(ranks)[rank] for name, values in batch.items()}


def loader(scenario: str, *indices: int) -> DataLoader[Any]:
    return DataLoader([share(global_batch(scenario, i)) for i in indices], batch_size=None)  # type: ignore[arg-type]


def train(scenario: str, strategy: str, folder: Path) -> dict[str, Any]:
    """Weights by name, and everything that was logged."""
    logger = RecordingLogger()
    accumulate = 2 if scenario == "accumulated" else 1
    clip = {"gradient_clip_val": 0.1} if scenario == "clipped" else {}
    # Adam hardly notices that gradients were scaled, so that is looked at through SGD.
    optimizer = partial(SGD, lr=OF_SGD[scenario]) if scenario in OF_SGD else default_optimizer
    trainer = quiet_trainer(
        strategy,
        folder,
        max_steps=STEPS,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=4,
        val_check_interval=4 * accumulate,
        logger=logger,
        **clip,
    )
    module = Qwen3DSpark(
        "embedded",
        mask_token_id=5,
        num_draft_layers=2,
        block_size=4,
        num_anchors=12,
        markov_rank=8,
        warmup_ratio=0.0,
        optimizer=optimizer,
    )
    batches = range(STEPS * accumulate)
    trainer.fit(module, loader(scenario, *batches), loader(scenario, 100, 101, 103))
    assert module.draft is not None
    train = [record for record in logger.of("train") if "train/skipped_steps" not in record[1]]
    return {"weights": full_state_dict(module.draft), "records": train + logger.of("val")}


def main() -> None:
    folder = Path(sys.argv[1])
    for strategy in STRATEGIES:
        for scenario in SCENARIOS:
            result = train(scenario, strategy, folder)
            if os.environ["RANK"] == "0":
                torch.save(result, folder / f"{strategy}-{scenario}.pt")


if __name__ == "__main__":
    main()
