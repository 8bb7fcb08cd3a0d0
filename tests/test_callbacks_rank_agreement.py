"""RankAgreement, with the other rank's answer put in its mouth; `test_ranks_facts.py` has two real ones."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from lightning.pytorch import LightningModule, Trainer

import dspark_lightning.callbacks.rank_agreement as rank_agreement
from dspark_lightning.callbacks import RankAgreement

MODULE = cast(LightningModule, None)


def trainer(**counts: Any) -> Trainer:
    """One optimizer, and batches of every kind."""
    known = {
        "optimizers": [object()],
        "num_training_batches": 3,
        "num_sanity_val_batches": [2],
        "num_val_batches": [5, 4],
        "num_test_batches": [6],
        "sanity_checking": False,
    }
    return cast(Trainer, SimpleNamespace(**(known | counts)))


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the other rank has; this one is rank 0."""
    theirs: list[Any] = []
    monkeypatch.setattr(rank_agreement, "gather_values", lambda value: [value, list(theirs)])
    return theirs


@pytest.mark.parametrize(
    ("hook", "sanity_checking", "ours", "kind"),
    [
        ("on_train_start", False, [3], "training"),
        ("on_validation_start", True, [2], "validation"),
        ("on_validation_start", False, [5, 4], "validation"),
        ("on_test_start", False, [6], "test"),
    ],
)
def test_each_hook_looks_at_its_own_batches(
    hook: str, sanity_checking: bool, ours: list[int], kind: str, other: list[Any]
) -> None:
    check = getattr(RankAgreement(), hook)
    other[:] = ours
    check(trainer(sanity_checking=sanity_checking), MODULE)
    other[-1] += 1
    mine, theirs = (" + ".join(map(str, counts)) for counts in (ours, other))
    with pytest.raises(
        ValueError, match=rf"rank 1 has {theirs} {kind} batches, rank 0 has {mine}:".replace("+", r"\+")
    ):
        check(trainer(sanity_checking=sanity_checking), MODULE)


@pytest.mark.parametrize("count", [0, 2])
def test_there_is_one_optimizer(count: int, other: list[Any]) -> None:
    with pytest.raises(ValueError, match=f"configure_optimizers gives {count} optimizers, must give 1"):
        RankAgreement().on_train_start(trainer(optimizers=[object()] * count), MODULE)
