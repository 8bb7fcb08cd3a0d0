"""Acceptance metrics of training, validation and test, over all ranks.

Example:
    >>> from lightning.pytorch import Trainer
    >>> trainer = Trainer(callbacks=[AcceptanceMetrics()], log_every_n_steps=10)  # doctest: +SKIP

    ModelCheckpoint(monitor="val/tau", mode="max") and EarlyStopping find the validation values, whatever their order.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer

from dspark_lightning.callbacks.window import window_closes, write_scalars
from dspark_lightning.metrics import COUNTS, AcceptanceMetric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYOUT = {
    "acceptance": {
        "accept_rate@k, training": ["Multiline", [r"train/accept_rate@\d+$"]],
        "accept_rate@k, validation": ["Multiline", [r"val/accept_rate@\d+$"]],
        "tau": ["Multiline", [r"(train|val)/tau$"]],
    }
}
"""TensorBoard's "Custom scalars" page: one chart for all positions."""

ON_PROGRESS_BAR = ("train/loss", "train/tau", "val/tau")


class AcceptanceMetrics(Callback):
    """Log the values of `AcceptanceMetric` as `train/...`, `val/...` and `test/...`.

    The steps of the module must return their loss terms as {"terms": ...}; `DSparkModule` does. Training values cover
    everything since the last ones and come once every `log_every_n_steps` optimizer steps and at the end of the fit;
    supervised_tokens and kept_anchors are then per optimizer step. Validation and test values cover the whole set.
    A checkpoint holds the open window, so a resumed run logs what an unbroken one would.

    With a TensorBoardLogger, the page "Custom scalars" shows accept_rate@1..K in one chart, and each validation adds a
    figure of acceptance over position.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, AcceptanceMetric] = {}
        self._steps = 0  # optimizer steps in the open training window
        self._is_global_zero = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start empty; a checkpoint, loaded later, fills the training window."""
        del stage
        arguments = ("block_size", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha")
        self._metrics = {
            name: AcceptanceMetric(*(pl_module.hparams[key] for key in arguments)).to(trainer.strategy.root_device)
            for name in ("train", "val", "test")
        }
        self._steps, self._is_global_zero = 0, trainer.is_global_zero

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell TensorBoard which curves belong together."""
        del pl_module
        for logger in _tensorboards(trainer):
            logger.experiment.add_custom_scalars(LAYOUT)

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
        del batch, batch_idx
        self._update("train", outputs)
        if not window_closes(trainer, self._steps):
            return
        values = self._train_values()
        _log(pl_module, values, logger=False, on_step=True, on_epoch=False)
        write_scalars(trainer, _floats(values))
        self._metrics["train"].reset()
        self._steps = 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last window, however short; a resumed run still continues it."""
        del pl_module
        if self._steps:
            write_scalars(trainer, _floats(self._train_values()))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the previous validation."""
        del trainer, pl_module
        self._metrics["val"].reset()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: dict[str, Tensor],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add a batch."""
        del trainer, pl_module, batch, batch_idx, dataloader_idx
        self._update("val", outputs)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the whole set, before ModelCheckpoint and EarlyStopping look for it."""
        values = self._metrics["val"].compute()
        _log(pl_module, _named("val", values), sync_dist=True)  # Lightning itself keeps a sanity check out of the logs
        if trainer.sanity_checking:
            return
        for logger in _tensorboards(trainer):
            figure = acceptance_figure(values)
            logger.experiment.add_figure("val/acceptance_by_position", figure, global_step=trainer.global_step)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the previous test."""
        del trainer, pl_module
        self._metrics["test"].reset()

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: dict[str, Tensor],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add a batch."""
        del trainer, pl_module, batch, batch_idx, dataloader_idx
        self._update("test", outputs)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the whole set."""
        del trainer
        _log(pl_module, _named("test", self._metrics["test"].compute()), sync_dist=True)

    def state_dict(self) -> dict[str, Any]:
        """The open training window, summed over ranks (every rank takes part in saving a checkpoint)."""
        if not self._metrics:
            return {}
        metric = self._metrics["train"]
        with metric.sync_context():
            return {"steps": self._steps, "sums": dict(metric.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the window: rank 0 takes the sums of all ranks, so that they count once."""
        self._steps = state_dict["steps"]
        if self._is_global_zero:
            metric = self._metrics["train"]
            metric.load_state_dict(state_dict["sums"])
            metric.to(metric.device)

    def _update(self, stage: str, outputs: STEP_OUTPUT) -> None:
        if not isinstance(outputs, Mapping) or "terms" not in outputs:
            raise ValueError(
                f"AcceptanceMetrics needs the {stage} step to return a dict with 'terms', the second result of "
                f"compute_dspark_loss(return_terms=True), got {type(outputs).__name__}"
            )
        self._metrics[stage].update(outputs["terms"])

    def _train_values(self) -> dict[str, Tensor]:
        values = self._metrics["train"].compute()
        return _named("train", values | {name: values[name] / self._steps for name in COUNTS})


def acceptance_figure(values: Mapping[str, Tensor]) -> "Figure":
    """Draw accept_rate@k over k, and the product of the rates up to k: about the share of blocks that gets that far.

    Args:
        values: of `AcceptanceMetric.compute`.
    """
    from matplotlib.figure import Figure

    rates = {int(name.partition("@")[2]): float(value) for name, value in values.items() if "@" in name}
    products = torch.tensor(list(rates.values())).cumprod(0).tolist()
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(rates), list(rates.values()), marker="o", label="accept_rate@k")
    axes.plot(list(rates), products, marker="o", label="product up to k")
    axes.set(xlabel="position k", ylabel="acceptance", ylim=(0, 1), xticks=list(rates))
    axes.set_title(f"tau {float(values['tau']):.2f}" if "tau" in values else "no supervised block")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    """The TensorBoard loggers that write: those of rank 0."""
    return [x for x in trainer.loggers if isinstance(x, TensorBoardLogger)] if trainer.is_global_zero else []


def _named(stage: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{stage}/{name}": value for name, value in values.items()}


def _floats(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Fetch all values from the device in one go."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def _log(pl_module: LightningModule, values: Mapping[str, Tensor], **options: Any) -> None:
    """Hand values that are equal on all ranks to Lightning: its loggers, callback_metrics and the progress bar."""
    for name, value in values.items():
        pl_module.log(name, value, prog_bar=name in ON_PROGRESS_BAR, **options)
