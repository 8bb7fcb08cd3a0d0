"""Makes Lightning go on exactly where a checkpoint was written.

Its own counters do not always (seen with 2.6):

- A checkpoint written inside an accumulation window (on a failure, or the first after a resume) counts batches whose
  gradients were never applied, and these gradients are lost. It is taken back to its last optimizer step.
- A checkpoint written at the last batch or at the end of an epoch makes the resumed run miscount its epochs. A second
  resume then loses its place in the epoch, or a whole epoch. It is turned into one at the beginning of the next epoch.
"""

from typing import Any

from dspark_lightning.datamodules.chat import ChatDataModule

_COUNTERS = ("ready", "started", "processed", "completed")


def settle_progress(checkpoint: dict[str, Any]) -> None:
    """Edit a loaded checkpoint in place. Call it in `LightningModule.on_load_checkpoint`.

    Args:
        checkpoint: As Lightning hands it over. Without the state of a `ResumableSampler` in it nothing is done.
    """
    position = _position(checkpoint)
    loops = checkpoint.get("loops", {}).get("fit_loop")
    if position is None or loops is None:
        return
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    if position["pending"]:
        for counter in (batches["current"], batches["total"]):
            _set(counter, counter["processed"] - position["pending"])
        position["batches"] -= position["pending"]
        position["pending"] = 0
    elif batches["is_last_batch"] and not _awaits_validation(epochs, batches):
        if batches["current"]["completed"] < batches["current"]["processed"]:
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1  # as Lightning does for such a checkpoint
        for counter in (epochs["current"], epochs["total"]):
            _set(counter, counter["started"])
        _set(batches["total"], batches["total"]["processed"])
        _set(batches["current"], 0)
        batches["is_last_batch"] = False


def hand_over_position(checkpoint: dict[str, Any], datamodule: object) -> None:
    """Let a datamodule go on where one of another class was, over the same rows; Lightning looks for its class's name.

    Call it before `settle_progress`. `ResumableSampler.load_state_dict` refuses another number of rows or order.

    Args:
        checkpoint: As Lightning hands it over.
        datamodule: That of this run.
    """
    name, position = type(datamodule).__qualname__, _position(checkpoint)
    if position is not None and isinstance(getattr(datamodule, "source", datamodule), ChatDataModule):
        checkpoint.setdefault(name, position)


def _position(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """The state of a `ResumableSampler`."""
    return next((value for value in checkpoint.values() if isinstance(value, dict) and "pending" in value), None)


def _awaits_validation(epochs: dict[str, Any], batches: dict[str, Any]) -> bool:
    """Whether the batches are done but the epoch is not: written while it ends. Lightning resumes that well."""
    finished = batches["current"]["completed"] == batches["current"]["processed"]
    return bool(finished and epochs["current"]["processed"] < epochs["current"]["started"])


def _set(counter: dict[str, int], value: int) -> None:
    counter.update(dict.fromkeys(_COUNTERS, value))
