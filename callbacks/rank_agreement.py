"""Ranks that would wait for each other for ever are stopped before the first step.

Example:
    >>> from lightning.pytorch import Trainer
    >>> trainer = Trainer(callbacks=[RankAgreement()])  # doctest: +SKIP
"""

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer

from dspark_lightning.delivery import gather_values


class RankAgreement(Callback):
    """Check that steps are counted alike: every rank makes as many as the others, and there is one optimizer.

    A step is a collective that all ranks have to join, and Lightning's `global_step` adds up the steps of optimizers.

    The datamodules of this package see to it by themselves; loaders of your own may not. A loader without a length is
    not looked at.

    Raises:
        ValueError: names the ranks and their batches; or there are several optimizers.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the optimizers and the training batches."""
        del pl_module
        if len(trainer.optimizers) != 1:
            raise ValueError(f"configure_optimizers gives {len(trainer.optimizers)} optimizers, must give 1")
        _check("training", [trainer.num_training_batches])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the validation batches."""
        del pl_module
        _check("validation", trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the test batches."""
        del pl_module
        _check("test", trainer.num_test_batches)


def _check(kind: str, batches: Sequence[int | float]) -> None:
    for rank, theirs in enumerate(every := gather_values(list(batches))):
        if theirs != every[0]:
            raise ValueError(
                f"rank {rank} has {_text(theirs)} {kind} batches, rank 0 has {_text(every[0])}: every rank must have "
                "as many as the others, so give them equal numbers of rows, or drop the rest"
            )


def _text(batches: Sequence[int | float]) -> str:
    return " + ".join(f"{count}" for count in batches)
