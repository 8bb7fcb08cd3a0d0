"""A step whose loss or gradients are NaN or infinite changes nothing, and a fit that makes only such steps ends.

Example:
    >>> from lightning.pytorch import Trainer
    >>> trainer = Trainer(callbacks=[FiniteSteps(max_in_a_row=3)])  # doctest: +SKIP
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dspark_lightning.callbacks.window import window_closes, write_scalars
from dspark_lightning.delivery import gather_values

_SHOWN = 4  # rows named in a message


class FiniteSteps(Callback):
    """Skip optimizer steps with a loss or a gradient that is NaN or infinite on any rank, on all ranks alike.

    Weights and optimizer states stay as they were; the step counts, and the learning rate goes on. A warning names its
    rows, `train/skipped_steps` is how many the run has skipped so far, logged every `log_every_n_steps` steps. Batches
    of a validation or a test with such values are named once all are through; `AcceptanceMetrics` leaves them out.

    Whether all is finite is read from the device once an optimizer step.

    Args:
        max_in_a_row: so many steps skipped one after the other end the fit. float16 may take a few to find its scale.

    Raises:
        ValueError: max_in_a_row is below 1; during a fit, that many steps were skipped: names the last one's rows.
    """

    def __init__(self, max_in_a_row: int = 10) -> None:
        if max_in_a_row is None or max_in_a_row < 1:  # a configuration may say null
            raise ValueError(f"max_in_a_row must be 1 or more, got {max_in_a_row}")
        self.max_in_a_row = max_in_a_row
        self._skipped = 0
        self._in_a_row = 0
        self._steps = 0  # since the last ones were logged
        self._rows: list[Tensor] = []  # of the micro-batch that runs
        self._seen: list[tuple[Tensor, list[Tensor]]] = []  # of the open step: whether finite, and rows
        self._measured: list[tuple[Tensor, list[Tensor]]] = []  # the same of a validation, which may part a step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start counting; a checkpoint, loaded later, puts back its counts."""
        del trainer, pl_module, stage
        self._skipped = self._in_a_row = self._steps = 0
        self._seen, self._measured = [], []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: dict[str, Any], batch_idx: int
    ) -> None:
        """Note the rows of a micro-batch."""
        del trainer, pl_module, batch_idx
        self._rows = _row_ids(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Note whether its loss is finite."""
        del trainer, pl_module
        self._seen.append((loss.detach().isfinite().all(), self._rows))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Take the gradients away where something is not finite: without them an optimizer leaves all as it is.

        Raises:
            ValueError: too many steps in a row.
        """
        del pl_module
        seen, self._seen = self._seen, []
        self._steps += 1
        flags = [flag for flag, _ in seen]
        finite = torch.stack([*flags, *_finite_gradients(optimizer)]).all()
        if trainer.strategy.reduce((~finite).long(), reduce_op="sum").item() == 0:
            self._in_a_row = 0
            return
        optimizer.zero_grad(set_to_none=True)
        self._skipped += 1
        self._in_a_row += 1
        step, rows = trainer.global_step + 1, _gathered_rows(_suspects(seen), trainer, "train")
        if self._in_a_row >= self.max_in_a_row:
            raise ValueError(
                f"{self._in_a_row} optimizer steps in a row had NaN or infinite losses or gradients, the last one was "
                f"step {step} with {rows}: look at these rows; if they change from step to step, lower the learning "
                "rate, or train in another precision than float16"
            )
        rank_zero_warn(f"Step {step} is skipped, its loss or gradients are NaN or infinite, with {rows}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Log the count, as often as everything else."""
        del pl_module, outputs, batch, batch_idx
        if window_closes(trainer, self._steps):
            write_scalars(trainer, {"train/skipped_steps": self._skipped})
            self._steps = 0

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: dict[str, Any],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note whether the terms of a batch are finite."""
        del trainer, pl_module, batch_idx, dataloader_idx
        self._note_terms(outputs, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Name the rows whose values are missing from this validation."""
        del pl_module
        self._warn_of_terms(trainer, "val")

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: dict[str, Any],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note whether the terms of a batch are finite."""
        del trainer, pl_module, batch_idx, dataloader_idx
        self._note_terms(outputs, batch)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Name the rows whose values are missing from this test."""
        del pl_module
        self._warn_of_terms(trainer, "test")

    def state_dict(self) -> dict[str, Any]:
        """What was skipped so far; the same on every rank."""
        return {"skipped": self._skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._skipped, self._in_a_row = state_dict["skipped"], state_dict["in_a_row"]

    def _note_terms(self, outputs: STEP_OUTPUT, batch: Mapping[str, Any]) -> None:
        terms = outputs["terms"].values()  # type: ignore[index]
        self._measured.append((torch.stack([term.isfinite().all() for term in terms]).all(), _row_ids(batch)))

    def _warn_of_terms(self, trainer: Trainer, stage: str) -> None:
        measured, self._measured = self._measured, []
        bad = _not_finite(measured)
        if any(gather_values(len(bad))):
            rows = _gathered_rows(bad, trainer, "val")
            rank_zero_warn(f"{stage}/* lack batches whose loss is NaN or infinite, with {rows}")


def _finite_gradients(optimizer: Optimizer) -> list[Tensor]:
    """Whether each gradient is finite; of a sharded one, the part on this rank."""
    grads = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    local = (grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads if grad is not None)
    return [grad.isfinite().all() for grad in local]


def _row_ids(batch: Mapping[str, Any]) -> list[Tensor]:
    """Of the batch; of packed rows, those of all documents, filled up with -1."""
    return [batch[name] for name in ("doc_row_ids", "row_id") if name in batch][:1]


def _not_finite(seen: Sequence[tuple[Tensor, list[Tensor]]]) -> list[list[Tensor]]:
    return [rows for flag, rows in seen if not flag]


def _suspects(seen: Sequence[tuple[Tensor, list[Tensor]]]) -> list[list[Tensor]]:
    """Rows of the micro-batches without a finite loss; of all where, on all ranks, only the gradients are at fault."""
    bad = _not_finite(seen)
    return bad if any(gather_values(len(bad))) else [rows for _, rows in seen]


def _gathered_rows(mine: Sequence[Sequence[Tensor]], trainer: Trainer, split: str) -> str:
    """Rows of all ranks, for people: from which file and line, where the datamodule knows."""
    ids = {row for tensor in chain(*mine) for row in tensor.flatten().tolist() if row >= 0}
    rows = sorted(set(chain(*gather_values(sorted(ids)))))
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    sets = getattr(getattr(datamodule, "source", datamodule), "row_sets", {})
    names = [sets[split].place(row) if split in sets else f"row_id {row}" for row in rows[:_SHOWN]]
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return f"the rows {', '.join(names)}{more}" if names else "rows without a row_id"
