"""What the callbacks that log once per window of optimizer steps share."""

from collections.abc import Mapping

from lightning.pytorch import Trainer


def window_closes(trainer: Trainer, steps: int) -> bool:
    """Whether a window of `steps` optimizer steps ends with this batch: once every `log_every_n_steps` global steps.

    False between two micro-batches of one optimizer step, where `steps` is 0 again.
    """
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return steps > 0 and every > 0 and trainer.global_step % every == 0


def write_scalars(trainer: Trainer, values: Mapping[str, float]) -> None:
    """Give values to every logger of the trainer, at the step where Lightning puts its own (it counts from 0).

    `LightningModule.log` would write a value again at later steps until it is replaced, even one that a window lacks.
    """
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=max(trainer.global_step - 1, 0))
        logger.save()
