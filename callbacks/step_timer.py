"""Throughput, and where the time of a training step goes.

Example:
    >>> from lightning.pytorch import Trainer
    >>> trainer = Trainer(callbacks=[StepTimer()], log_every_n_steps=10)  # doctest: +SKIP
"""

import time
from itertools import pairwise
from typing import cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dspark_lightning.callbacks.window import window_closes, write_scalars

PARTS = ("data", "target", "draft", "backward", "optimizer")


class StepTimer(Callback):
    """Log throughput over all ranks and the parts of a step on this rank, once every `log_every_n_steps` steps.

    `time/supervised_tokens_per_second` and `time/rows_per_second` are over all ranks. `time/step` is the mean number of
    seconds from one optimizer step to the next, validation left out, and the sum of:

    - `time/data`: between batches: waiting for the next one, copying it to the device, saving checkpoints
    - `time/target`: from the start of training_step to the draft's forward
    - `time/draft`: the draft's forward
    - `time/backward`: loss and backward
    - `time/optimizer`: clipping, optimizer and scheduler

    `data/fill_rate` is the share of real tokens among all places of the batches, over all ranks; the rest is padding.

    On CUDA the marks are events on the stream, read once per window: nothing waits for the device within a step.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[str | None, float | torch.cuda.Event]] = []  # what ended there; None starts the clock
        self._work: Tensor | None = None  # of the open window: supervised tokens, rows, real tokens, places
        self._steps = 0
        self._device = torch.device("cpu")
        self._hooks: list[RemovableHandle] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock and watch the draft."""
        self._device, self._work, self._steps, self._marks = pl_module.device, None, 0, []
        self._unhook()

        def entered(module: nn.Module, inputs: tuple[object, ...]) -> None:
            del module, inputs
            if trainer.training:
                self._mark("target")

        def left(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            del module, inputs, output
            if trainer.training:
                self._mark("draft")

        draft = cast(nn.Module, pl_module.draft)
        self._hooks = [draft.register_forward_pre_hook(entered), draft.register_forward_hook(left)]
        self._mark(None)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        """The batch is on the device."""
        del trainer, pl_module, batch, batch_idx
        self._mark("data")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loss and backward are done."""
        del trainer, pl_module
        self._mark("backward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Count the optimizer steps of the window."""
        del trainer, pl_module, optimizer
        self._steps += 1

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: dict[str, Tensor],
        batch_idx: int,
    ) -> None:
        """Add a micro-batch; at the end of a window, log it and start the next one."""
        del pl_module, batch_idx
        self._mark("optimizer")
        tokens = outputs["terms"]["supervised_tokens"].float()  # type: ignore[index]
        rows, places = (
            torch.full_like(tokens, count) for count in (len(batch["input_ids"]), batch["input_ids"].numel())
        )
        work = torch.stack([tokens, rows, batch["attention_mask"].sum().to(tokens), places])
        self._work = work if self._work is None else self._work + work
        if window_closes(trainer, self._steps):
            self._write(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave validation out of the time of a step."""
        del trainer, pl_module
        if self._marks:
            self._mark(None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last window, however short."""
        del pl_module
        if self._steps:
            self._write(trainer)
        self._unhook()
        self._marks = []

    def _mark(self, part: str | None) -> None:
        self._marks.append((part, _now(self._device)))

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _write(self, trainer: Trainer) -> None:
        """Log the open window and start the next one at its end. Every rank takes part."""
        assert self._work is not None
        seconds = dict.fromkeys(PARTS, 0.0)
        for (_, start), (part, end) in pairwise(self._marks):
            if part is not None:
                seconds[part] += _seconds(start, end)
        total = sum(seconds.values())
        tokens, rows, real, places = trainer.strategy.reduce(self._work, reduce_op="sum").tolist()
        values = {"supervised_tokens_per_second": tokens / total, "rows_per_second": rows / total}
        values |= {"step": total / self._steps} | {part: value / self._steps for part, value in seconds.items()}
        write_scalars(trainer, {f"time/{name}": value for name, value in values.items()})
        write_scalars(trainer, {"data/fill_rate": real / places})
        self._marks = [(None, self._marks[-1][1])]
        self._work, self._steps = None, 0


def _now(device: torch.device) -> float | torch.cuda.Event:
    """A moment on the device's own clock; recording one does not wait for the device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
    return float(end) - float(start)  # type: ignore[arg-type]
