"""Two ranks train on pictures and text; each writes what it saw as JSON.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/ranks_vlm.py TARGET FOLDER STRATEGY ...
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import ProcessorMixin

from dspark_lightning import DSparkModule, build_dspark_vlm_dataloader, dspark_vlm_collate_fn
from dspark_lightning.datamodules.processor import load_processor
from dspark_lightning.sharding import full_state_dict
from ranks_helpers import quiet_trainer
from vlm_helpers import picture

RANK = int(os.environ["RANK"])
LENGTH = 96


def row(index: int, with_picture: bool) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": f"What is number {index}?"}]
    if with_picture:
        parts.insert(0, {"type": "image", "image": picture(56, 56, index)})
    answer = {"role": "assistant", "content": "It is red, and so on."}
    return {"conversation": [{"role": "user", "content": parts}, answer], "row_id": index}


def train(target: str, processor: ProcessorMixin, folder: Path, strategy: str) -> dict[str, Any]:
    """Rank 0 has pictures in all of its rows, rank 1 in none."""
    collate = partial(dspark_vlm_collate_fn, processor=processor, max_length=LENGTH)
    rows = [row(10 * RANK + i, with_picture=RANK == 0) for i in range(4)]
    loader: DataLoader[Any] = DataLoader(rows, 2, collate_fn=collate)  # type: ignore[arg-type]
    module = DSparkModule(target, mask_token_id=5, num_draft_layers=2, block_size=4, num_anchors=8, markov_rank=8)
    trainer = quiet_trainer(strategy, folder, max_epochs=2)
    trainer.fit(module, loader)
    assert module.draft is not None
    weights = sum(weight.double().square().sum().item() for weight in full_state_dict(module.draft).values())
    pixels = [tuple(batch["pixel_values"].shape) for batch in loader]
    return {"steps": trainer.global_step, "weights": weights, "pixels": pixels}


def shared_rows(processor: ProcessorMixin) -> dict[str, Any]:
    """Which rows the loader gives this rank: of 5 rows, in batches of 2."""
    rows = [row(i, with_picture=False) for i in range(5)]
    mesh = init_device_mesh("cpu", (2,))
    loaders = {
        "world": build_dspark_vlm_dataloader(rows, processor, 2, LENGTH, shuffle=False, distributed=True),
        "mesh": build_dspark_vlm_dataloader(rows, processor, 2, LENGTH, False, distributed=True, dp_mesh=mesh),
        "alone": build_dspark_vlm_dataloader(rows, processor, 2, LENGTH, shuffle=False),
    }
    return {name: [batch["row_id"].tolist() for batch in loader] for name, loader in loaders.items()}


def main() -> None:
    target, folder = sys.argv[1], Path(sys.argv[2])
    processor = load_processor(target)
    seen = {strategy: train(target, processor, folder, strategy) for strategy in sys.argv[3:]}
    seen |= shared_rows(processor)
    (folder / f"rank{RANK}.json").write_text(json.dumps(seen))
    dist.barrier()


if __name__ == "__main__":
    main()
