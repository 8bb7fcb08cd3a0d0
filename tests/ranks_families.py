"""A few steps of every family under every strategy, on one rank or two; what was reached goes to FOLDER as JSON.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/ranks_families.py FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from dspark_lightning import DSparkModule
from dspark_lightning.datamodules import ChatDataModule
from dspark_lightning.rope import rope_errors
from family_helpers import FAMILIES
from ranks_helpers import STRATEGIES, quiet_trainer

TEXT_FAMILIES = (*FAMILIES, "qwen3_moe")


def train(family: str, strategy: str, precision: str, folder: Path) -> dict[str, Any]:
    """Three steps of four rows for the target in FOLDER/family."""
    trainer = quiet_trainer(
        strategy,
        folder,
        precision=precision,
        max_steps=3,
        gradient_clip_val=1.0,
        val_check_interval=3,
        limit_val_batches=2,
    )
    module = DSparkModule(
        str(folder / family), mask_token_id=5, num_draft_layers=2, block_size=4, num_anchors=8, markov_rank=8
    )
    trainer.fit(module, ChatDataModule("embedded", "embedded", max_length=64, batch_size=4 // trainer.world_size))
    assert module.draft is not None and module.target is not None
    values = {name: trainer.callback_metrics[f"val/{name}"].item() for name in ("loss", "tau")}
    return values | {"rope": rope_errors(module.draft) + rope_errors(module.target.model)}


def main() -> None:
    folder = Path(sys.argv[1])
    facts = {
        f"{family} {strategy} {precision}": train(family, strategy, precision, folder)
        for family in TEXT_FAMILIES
        for strategy in STRATEGIES
        for precision in ("32-true", "bf16-mixed", "bf16-true")
    }
    if os.environ["RANK"] == "0":
        (folder / "families.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
