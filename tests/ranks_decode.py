"""Two ranks train two steps and decode, under every strategy; rank 0 writes down what was logged.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/ranks_decode.py FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD

from dspark_lightning import Qwen3DSpark
from dspark_lightning.callbacks import DecodeAcceptance
from dspark_lightning.datamodules import ChatDataModule
from ranks_helpers import STRATEGIES, quiet_trainer

OPTIONS: dict[str, Any] = {"num_draft_layers": 2, "block_size": 4, "num_anchors": 8, "markov_rank": 8}


def decode(strategy: str, folder: Path) -> dict[str, Any]:
    """Values logged in a fit after its second step, and in the test behind it."""
    module = Qwen3DSpark(target="embedded", mask_token_id=5, **OPTIONS, optimizer=lambda params: SGD(params, lr=0.1))
    rows = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    data = ChatDataModule("embedded", val_data="embedded", val_split="train[:8]", max_length=96, batch_size=rows)
    callback = DecodeAcceptance("embedded", every_n_steps=2, limit=3, max_new_tokens=10, temperature=1.0)
    trainer = quiet_trainer(strategy, folder, max_steps=2, limit_val_batches=0, callbacks=[callback])
    trainer.fit(module, data)
    logged = {name: value.item() for name, value in trainer.callback_metrics.items() if "decode" in name}
    training = module.draft is not None and module.draft.training
    (tested,) = trainer.test(module, data, verbose=False)
    return {
        "fit": logged,
        "test": {name: value for name, value in tested.items() if "decode" in name},
        "training": training,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    for name in STRATEGIES:
        values = decode(name, out)
        if os.environ["RANK"] == "0":
            (out / f"{name}.json").write_text(json.dumps(values))
