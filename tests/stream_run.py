"""Train a small drafter on a stream, alone or as one of two ranks: what the tests of streams share.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/stream_run.py FOLDER STRATEGY
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from dspark_lightning import Qwen3DSpark
from dspark_lightning.datamodules import ChatDataModule
from dspark_lightning.sharding import full_state_dict
from ranks_helpers import quiet_trainer
from resume_run import RecordRows


def train(
    folder: Path, strategy: str, steps: int = 6, accumulate: int = 1, ckpt_path: Path | None = None, **data: Any
) -> dict[str, Any]:
    """Train on the rows of `folder`, with a checkpoint after every step. Returns the weights and the rows trained."""
    record = RecordRows()
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(
        strategy,
        folder,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        enable_checkpointing=ckpt_path is None,
        callbacks=[record, *([saver] if ckpt_path is None else [])],
    )
    module = Qwen3DSpark(
        "embedded", mask_token_id=5, num_draft_layers=1, block_size=4, num_anchors=4, markov_rank=8, warmup_ratio=0.2
    )
    stream = {"max_length": 160, "batch_size": 2, "stream_rows": 9} | data
    trainer.fit(module, ChatDataModule(str(folder / "rows.jsonl"), **stream), ckpt_path=ckpt_path)
    assert module.draft is not None
    return {"weights": full_state_dict(module.draft), "rows": record.rows}


def main() -> None:
    """An unbroken run, and one that goes on from the middle of it; each rank saves both."""
    folder, strategy = Path(sys.argv[1]), sys.argv[2]
    packing = {"packing": True, "num_workers": 1}
    unbroken = train(folder, strategy, **packing)
    resumed = train(folder, strategy, ckpt_path=folder / "step=4.ckpt", **packing)
    torch.save([unbroken, resumed], folder / f"{strategy}-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
