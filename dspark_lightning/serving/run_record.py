"""The record of a draft, from the run that trained it or from its checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from dspark_lightning.checkpoint_draft import read_checkpoint
from dspark_lightning.serving.record import ExportRecord, Training, Validation
from dspark_lightning.typed_json import build

_KEY = "export_record"  # in checkpoints
_SETTINGS = (
    *("num_anchors", "loss_decay_gamma", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha"),
    *("warmup_ratio", "min_lr_ratio", "seed"),
)


def run_record(
    trainer: Trainer, module: LightningModule, validation: Validation | None, prompts: list[list[int]]
) -> ExportRecord:
    """What a run can say about its draft at this moment.

    Args:
        trainer: of the run.
        module: that is trained.
        validation: the last one.
        prompts: token ids of held-out prompts.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    source = getattr(data, "train_data", None) or getattr(data, "cache", None)
    settings: dict[str, Any] = _settings(module.hparams)
    if trainer.optimizers:
        optimizer = trainer.optimizers[0]
        rate = optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"])
        settings |= {"optimizer": type(optimizer).__name__, "learning_rate": float(rate)}
    if isinstance(size := getattr(data, "batch_size", None), int):
        settings["batch_size"] = size
    settings |= {
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "ranks": trainer.world_size,
        "precision": trainer.precision,
    }
    return ExportRecord(
        target=module.hparams.get("target"),
        gguf_file=module.hparams.get("gguf_file"),
        training=Training(trainer.global_step, None if source is None else str(source), settings),
        validation=validation,
        prompts=prompts,
    )


def last_validation(trainer: Trainer) -> Validation | None:
    """What the validation that ends now has logged; None where it measured no acceptance."""
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    if not math.isfinite(values.get("val/tau", math.nan)):
        return None
    rates = [value for name, value in values.items() if name.startswith("val/accept_rate@")]
    return Validation(trainer.global_step, values["val/tau"], rates)


def held_out_prompts(batch: object, media: frozenset[str]) -> list[list[int]]:
    """The tokens of each row of a batch up to its first supervised one.

    Args:
        batch: of a validation.
        media: keys of what is no text, which a prompt alone would lack; of such a batch none is taken.
    """
    if not isinstance(batch, Mapping) or not {"input_ids", "loss_mask"} <= batch.keys() or media & batch.keys():
        return []
    rows: list[list[int]] = _as_list(batch["input_ids"])
    starts = [mask.index(1) if 1 in mask else 0 for mask in _as_list(batch["loss_mask"])]
    return [row[:start] for row, start in zip(rows, starts, strict=True) if start]


def keep_record(record: ExportRecord, checkpoint: dict[str, Any]) -> None:
    """Put a record into a checkpoint that is about to be saved."""
    checkpoint[_KEY] = asdict(record)


def kept_record(checkpoint: Mapping[str, Any]) -> ExportRecord | None:
    """The record in a checkpoint; None where it keeps none.

    Raises:
        ValueError: it is damaged.
    """
    if not isinstance(checkpoint.get(_KEY), dict):
        return None
    try:
        return build(ExportRecord, checkpoint[_KEY])
    except ValueError as error:
        raise ValueError(f"the {_KEY} in the checkpoint {error}") from error


def checkpoint_record(ckpt_path: str | Path) -> ExportRecord:
    """The record of a checkpoint's draft; of one that keeps none, what can be told from the rest.

    Raises:
        ValueError: see `read_checkpoint` and `kept_record`.
    """
    checkpoint = read_checkpoint(ckpt_path)
    record = kept_record(checkpoint)
    if record is not None:
        return record
    hparams = checkpoint.get("hyper_parameters") or {}
    steps = checkpoint.get("global_step")
    return ExportRecord(
        target=checkpoint["dspark"]["target"],
        gguf_file=hparams.get("gguf_file"),
        training=None if steps is None else Training(steps, None, _settings(hparams)),
    )


def _settings(hparams: Mapping[str, Any]) -> dict[str, Any]:
    return {name: hparams[name] for name in _SETTINGS if name in hparams}


def _as_list(values: Tensor) -> list[list[int]]:
    rows: list[list[int]] = values.tolist()
    return rows
