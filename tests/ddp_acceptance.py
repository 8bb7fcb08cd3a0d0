"""Two ranks train on different batches; rank 0 writes what was logged, unbroken and resumed, as JSON.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/ddp_acceptance.py FOLDER
"""

import json
import os
import sys
from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint

from dspark_lightning.callbacks import AcceptanceMetrics, StepTimer
from fakes import FakeDSpark, RecordingLogger, fake_loader, tiny_trainer

RANK = int(os.environ["RANK"])


def fit(folder: Path, epochs: int, ckpt_path: Path | None = None) -> RecordingLogger:
    """Rank 0 trains on batches 0, 2, 4 and validates on 1; rank 1 trains on 1, 3, 5 and validates on 6."""
    logger = RecordingLogger()
    options = dict(strategy="ddp", devices=2, use_distributed_sampler=False, enable_checkpointing=True)
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    callbacks = [AcceptanceMetrics(), StepTimer(), saving]
    trainer = tiny_trainer(
        folder, **options, max_epochs=epochs, log_every_n_steps=5, logger=logger, callbacks=callbacks
    )
    validation = fake_loader(1 if RANK == 0 else 6)
    trainer.fit(FakeDSpark(), fake_loader(*range(RANK, 6, 2)), validation, ckpt_path=ckpt_path)
    return logger


def main() -> None:
    folder = Path(sys.argv[1])
    runs = {"unbroken": fit(folder / "a", 4), "stopped": fit(folder / "b", 1)}
    runs["resumed"] = fit(folder / "b", 4, folder / "b" / "epoch=0.ckpt")
    if RANK == 0:
        records = {run: {stage: logger.of(stage) for stage in ("train", "val", "time")} for run, logger in runs.items()}
        (folder / "records.json").write_text(json.dumps(records))


if __name__ == "__main__":
    main()
