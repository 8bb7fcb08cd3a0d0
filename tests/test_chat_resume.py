"""A run that stops and resumes trains on the rows of an unbroken run and ends with its weights.

Every run here is a real one, and every resume has a new Trainer, module and datamodule.
"""

import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from chat_helpers import MASK_ID, chat, save_tokenizer, write_jsonl
from chat_helpers import datasets_cache as datasets_cache
from dspark_lightning.datamodules import ChatDataModule
from dspark_lightning.datamodules.resume import settle_progress
from resume_helpers import Recorder, SaveMore, saver

BATCHES = 5  # in an epoch: 11 rows, batches of 2


class Runs:
    """Starts runs that differ in nothing but the checkpoint they resume from."""

    def __init__(self, folder: Path, num_workers: int = 0, validate: bool = True, **trainer_args: Any) -> None:
        self.folder, self.trainer_args = folder, trainer_args
        self.data: dict[str, Any] = {
            "train_data": write_jsonl(folder / "rows.jsonl", [chat("question", f"answer {i}") for i in range(14)]),
            "train_split": "train[:11]",
            "val_split": "train[11:]" if validate else None,
            "tokenizer": save_tokenizer(folder / "tokenizer"),
            "mask_token_id": MASK_ID,
            "batch_size": 2,
            "num_workers": num_workers,
            "seed": 3,
        }
        self.full = self(save_to="first")

    def __call__(
        self,
        ckpt_path: Path | None = None,
        save_to: str | None = None,
        stop_in_batch: int | None = None,
        **data: Any,
    ) -> Recorder:
        """Train to the end; save at every step, after every epoch and every validation, and when the run fails."""
        callbacks: list[Callback] = []
        if save_to is not None:
            folder = self.folder / save_to
            callbacks = [
                saver(folder, "step", every_n_train_steps=1),
                saver(folder, "epoch", every_n_epochs=1, save_on_train_epoch_end=True),
                SaveMore(folder),
            ]
        trainer = Trainer(
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=bool(callbacks),
            num_sanity_val_steps=0,
            callbacks=callbacks,
            **self.trainer_args,
        )
        model = Recorder(stop_in_batch)
        trainer.fit(model, datamodule=ChatDataModule(**self.data | data), ckpt_path=ckpt_path)
        return model

    def check(self, ckpt_path: Path, save_to: str | None = None) -> None:
        """Resume: exactly the batches that the saved weight has not seen must follow, and give the same weight."""
        state = torch.load(ckpt_path, weights_only=True)["ChatDataModule"]
        trained = state["epoch"] * BATCHES + state["batches"] - state["pending"]
        resumed = self(ckpt_path, save_to)
        assert resumed.seen == self.full.seen[trained:], (ckpt_path.name, state)
        assert resumed.weight.item() == self.full.weight.item(), (ckpt_path.name, state)

    def saved(self, folder: str) -> list[Path]:
        return sorted((self.folder / folder).glob("*.ckpt"))


def test_epochs_differ_and_are_whole(tmp_path: Path) -> None:
    seen = Runs(tmp_path, max_epochs=2).full.seen
    assert [epoch for epoch, _ in seen] == [0] * BATCHES + [1] * BATCHES
    first, second = ([row for _, rows in part for row in rows] for part in (seen[:BATCHES], seen[BATCHES:]))
    assert first != second
    assert len(set(first)) == len(set(second)) == 2 * BATCHES


@pytest.mark.parametrize(("num_workers", "accumulate"), [(0, 1), (0, 2), (2, 2)])
def test_resume_from_every_checkpoint(tmp_path: Path, num_workers: int, accumulate: int) -> None:
    run = Runs(tmp_path, num_workers, accumulate_grad_batches=accumulate, max_epochs=2)
    assert len(run.saved("first")) == (14 if accumulate == 1 else 10)
    for path in run.saved("first"):
        run.check(path)


def test_a_run_that_fails_inside_an_accumulation_window_goes_back_to_its_start(tmp_path: Path) -> None:
    run = Runs(tmp_path, accumulate_grad_batches=3, max_epochs=2)
    with pytest.raises(ArithmeticError, match="stopped"):
        run(save_to="failed", stop_in_batch=BATCHES + 2)
    path = tmp_path / "failed" / "failed.ckpt"
    assert torch.load(path, weights_only=True)["ChatDataModule"]["pending"] == 2
    run.check(path)


@pytest.mark.parametrize("again", ["step_12", "epoch_10"])
def test_a_run_resumed_at_the_last_batch_of_an_epoch_resumes_again(tmp_path: Path, again: str) -> None:
    run = Runs(tmp_path, max_epochs=3)
    run.check(tmp_path / "first" / "step_5.ckpt", save_to="second")
    run.check(tmp_path / "second" / f"{again}.ckpt")


def test_checkpoints_of_other_datamodules_are_left_alone() -> None:
    checkpoint = {
        "loops": {"fit_loop": {"epoch_loop.batch_progress": {"is_last_batch": True}}},
        "OtherData": {"batches": 3},
    }
    before = repr(checkpoint)
    settle_progress(checkpoint)
    assert repr(checkpoint) == before


def test_limits_end_an_epoch_early(tmp_path: Path) -> None:
    run = Runs(tmp_path, max_epochs=2, limit_train_batches=3)
    for name, trained in (("step_1", 1), ("step_3", 3), ("epoch_3", 3), ("step_5", 5)):
        assert run(tmp_path / "first" / f"{name}.ckpt").seen == run.full.seen[trained:], name


def some(paths: Iterable[Path], count: int) -> list[Path]:
    paths = list(paths)
    return random.Random(0).sample(paths, min(count, len(paths)))


LIMITS = {
    "epochs": {"max_epochs": 3},
    "steps": {"max_epochs": -1},
    "both": {"max_epochs": 3, "check_val_every_n_epoch": None, "val_check_interval": 3},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("limit", LIMITS)
def test_resumed_runs_resume_again(
    tmp_path: Path, num_workers: int, validate: bool, accumulate: int, limit: str
) -> None:
    limits = LIMITS[limit] if limit == "epochs" else LIMITS[limit] | {"max_steps": 3 * -(-BATCHES // accumulate)}
    run = Runs(tmp_path, num_workers, validate, accumulate_grad_batches=accumulate, **limits)
    for path in run.saved("first") if num_workers == 0 else some(run.saved("first"), 5):
        run.check(path, save_to=f"second_{path.stem}")
        for again in some(run.saved(f"second_{path.stem}"), 4 if num_workers == 0 else 1):
            run.check(again, save_to=f"third_{path.stem}_{again.stem}")
            for last in some(run.saved(f"third_{path.stem}_{again.stem}"), 1):
                run.check(last)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "with seed 3, this run has 4"),
        ({"batch_size": 1}, "with global_batch_size 2 (batch_size x ranks), this run has 1"),
    ],
)
def test_another_order_inside_an_epoch_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    run = Runs(tmp_path, max_epochs=2)
    with pytest.raises(ValueError, match=re.escape(message)):
        run(tmp_path / "first" / "step_2.ckpt", **change)
    resumed = run(tmp_path / "first" / "epoch_5.ckpt", **change)
    assert {epoch for epoch, _ in resumed.seen} == {1}
