"""A run on a stream that stops and resumes trains on the rows of an unbroken run and ends with its weights."""

import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from chat_helpers import MASK_ID, chat, save_tokenizer, write_jsonl
from chat_helpers import datasets_cache as datasets_cache
from dspark_lightning.datamodules import ChatDataModule
from dspark_lightning.embedded import embedded_data
from ranks_helpers import run_on_two_ranks
from resume_helpers import Recorder, SaveMore, saver
from stream_run import train


class Runs:
    """Starts runs that differ in nothing but the checkpoint they resume from: 23 rows, blocks of 5, batches of 2."""

    def __init__(self, folder: Path, data: dict[str, Any] | None = None, **trainer_args: Any) -> None:
        self.folder, self.trainer_args = folder, {"max_steps": 15} | trainer_args
        rows = [chat("question", f"answer {'x' * (i % 5)} {i}") for i in range(23)]
        self.data: dict[str, Any] = {
            "train_data": write_jsonl(folder / "rows.jsonl", rows),
            "tokenizer": save_tokenizer(folder / "tokenizer"),
            "mask_token_id": MASK_ID,
            "max_length": 128,
            "batch_size": 2,
            "stream_rows": 5,
            "seed": 3,
        } | (data or {})
        self.full = self(save_to="first")

    def __call__(
        self, ckpt_path: Path | None = None, save_to: str | None = None, stop_in_batch: int | None = None, **data: Any
    ) -> Recorder:
        """Train to the end; save at every step, and when the run fails."""
        callbacks: list[Callback] = []
        if save_to is not None:
            callbacks = [saver(self.folder / save_to, "step", every_n_train_steps=1), SaveMore(self.folder / save_to)]
        trainer = Trainer(
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=bool(callbacks),
            callbacks=callbacks,
            **self.trainer_args,
        )
        model = Recorder(stop_in_batch)
        trainer.fit(model, datamodule=ChatDataModule(**self.data | data), ckpt_path=ckpt_path)
        return model

    def check(self, ckpt_path: Path, trained: int, save_to: str | None = None) -> None:
        """Resume: exactly the batches behind the first `trained` must follow, and give the same weight."""
        resumed = self(ckpt_path, save_to)
        assert [rows for _, rows in resumed.seen] == [rows for _, rows in self.full.seen[trained:]], ckpt_path.name
        assert resumed.weight.item() == self.full.weight.item(), ckpt_path.name


@pytest.mark.parametrize(
    ("data", "accumulate"),
    [
        pytest.param({}, 1, marks=pytest.mark.slow),
        ({"packing": True, "batch_size": 1}, 2),
        ({"num_workers": 1}, 2),
        pytest.param({"packing": True, "num_workers": 1}, 1, marks=pytest.mark.slow),
        ({"stream_rows": 1, "batch_size": 3}, 2),  # blocks that fill no batch
        pytest.param({"stream_rows": 100}, 1, marks=pytest.mark.slow),  # a block is a pass
    ],
)
def test_resume_from_many_checkpoints_and_again(tmp_path: Path, data: dict[str, Any], accumulate: int) -> None:
    run = Runs(tmp_path, data, accumulate_grad_batches=accumulate, max_steps=24 // accumulate)
    assert len(run.full.seen) == 24
    for step in range(1, 24 // accumulate, 3 * accumulate):
        again = step + 2
        run.check(tmp_path / "first" / f"step_{step}.ckpt", step * accumulate, save_to=f"second{step}")
        if again < 24 // accumulate:
            run.check(tmp_path / f"second{step}" / f"step_{again}.ckpt", again * accumulate)


@pytest.mark.parametrize("stream_rows", [2, 4])
def test_a_run_that_fails_inside_an_accumulation_window_goes_back_to_its_start(
    tmp_path: Path, stream_rows: int
) -> None:
    """Also where the window began in an earlier block, or blocks earlier."""
    run = Runs(tmp_path, {"stream_rows": stream_rows}, accumulate_grad_batches=4, max_steps=6)
    for stop in (7, 9):
        with pytest.raises(ArithmeticError, match="stopped"):
            run(save_to=f"failed{stop}", stop_in_batch=stop)
        path = tmp_path / f"failed{stop}" / "failed.ckpt"
        assert torch.load(path, weights_only=True)["ChatDataModule"]["pending"] == stop % 4
        run.check(path, stop - stop % 4)


def test_epochs_that_are_limited_go_on_in_the_stream(tmp_path: Path) -> None:
    run = Runs(tmp_path, {"num_workers": 1}, limit_train_batches=4, accumulate_grad_batches=3, max_steps=8)
    assert [epoch for epoch, _ in run.full.seen] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4  # two steps each
    unlimited = ChatDataModule(**run.data)
    unlimited.setup("fit")
    batches = [batch["row_id"].tolist() for batch in islice(unlimited.train_dataloader(), 16)]
    assert [rows for _, rows in run.full.seen] == batches
    for step, trained in ((1, 3), (2, 4), (3, 7), (6, 12)):
        run.check(tmp_path / "first" / f"step_{step}.ckpt", trained)


def test_a_longer_run_goes_on_behind_the_last_step(tmp_path: Path) -> None:
    run = Runs(tmp_path, {"packing": True}, max_steps=10)
    run.trainer_args["max_steps"] = 4
    run(save_to="short")
    run.trainer_args["max_steps"] = 10
    assert [rows for _, rows in run(tmp_path / "short" / "step_4.ckpt").seen] == [rows for _, rows in run.full.seen[4:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "seed 3, this run has 4"),
        ({"batch_size": 1}, "batch_size 2, this run has 1"),
        ({"stream_rows": 6}, "stream_rows 5, this run has 6"),
        ({"stream_rows": None}, "stream_rows 5, this run has None"),
        ({"packing": True}, "packing False, this run has True"),
        ({"min_supervised_tokens": 3}, "min_supervised_tokens 2, this run has 3"),
    ],
)
def test_another_order_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    run = Runs(tmp_path, max_steps=3)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        run(tmp_path / "first" / "step_2.ckpt", **change)
    assert "\n" not in str(error.value)


def test_a_checkpoint_of_rows_is_no_checkpoint_of_a_stream(tmp_path: Path) -> None:
    run = Runs(tmp_path, {"stream_rows": None}, max_steps=3)
    with pytest.raises(ValueError, match=r"written with stream_rows None, this run has 5: .* so resume with None$"):
        run(tmp_path / "first" / "step_2.ckpt", stream_rows=5)


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    run = Runs(tmp_path, max_steps=2)
    state = torch.load(tmp_path / "first" / "step_2.ckpt", weights_only=True)["ChatDataModule"]
    data = ChatDataModule(**run.data)
    data.setup("fit")
    with pytest.raises(ValueError, match=r"in a stream with ranks 4, this run has 1: .* so resume with 4$"):
        data.load_state_dict(state | {"ranks": 4})


def write_rows(folder: Path) -> None:
    with embedded_data("train").open() as lines:
        (folder / "rows.jsonl").write_text("".join(islice((line for line in lines if len(line) > 250), 20)))


@pytest.mark.parametrize(
    ("data", "accumulate"),
    [
        ({"packing": True}, 2),
        pytest.param({}, 1, marks=pytest.mark.slow),
        pytest.param({"num_workers": 1}, 2, marks=pytest.mark.slow),
        pytest.param({"packing": True, "num_workers": 1}, 1, marks=pytest.mark.slow),
    ],
)
def test_a_drafter_ends_with_the_same_weights(tmp_path: Path, data: dict[str, Any], accumulate: int) -> None:
    write_rows(tmp_path)
    unbroken = train(tmp_path, "alone", accumulate=accumulate, **data)
    for step in (1, 4):
        path = tmp_path / f"step={step}.ckpt"
        resumed = train(tmp_path, "alone", accumulate=accumulate, ckpt_path=path, **data)
        assert resumed["rows"] == unbroken["rows"][2 * step * accumulate :]
        torch.testing.assert_close(resumed["weights"], unbroken["weights"], atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2-sharded"])
def test_two_ranks_resume_each_in_its_own_place(tmp_path: Path, strategy: str) -> None:
    write_rows(tmp_path)
    run_on_two_ranks("stream_run.py", tmp_path, strategy)
    rows = []
    for rank in (0, 1):
        unbroken, resumed = torch.load(tmp_path / f"{strategy}-{rank}.pt", weights_only=True)
        assert len(unbroken["rows"]) == 12 and resumed["rows"] == unbroken["rows"][8:]
        torch.testing.assert_close(resumed["weights"], unbroken["weights"], atol=0, rtol=0)
        rows.append(set(unbroken["rows"]))
    assert rows[0].isdisjoint(rows[1])


def test_other_rows_or_files_are_refused(tmp_path: Path) -> None:
    run = Runs(tmp_path, max_steps=3)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(reversed(lines)))
    (tmp_path / "few.jsonl").write_text("".join(lines[:4]))
    for i, part in enumerate((lines[:12], lines[12:])):
        (tmp_path / f"part{i}.jsonl").write_text("".join(part))
    for name in ("other.jsonl", "few.jsonl", "part*.jsonl"):
        with pytest.raises(ValueError, match=r"^the checkpoint was written in a stream that began with other rows"):
            run(tmp_path / "first" / "step_2.ckpt", train_data=str(tmp_path / name))
    (tmp_path / "longer.jsonl").write_text("".join(lines) + lines[0])
    run(tmp_path / "first" / "step_2.ckpt", train_data=str(tmp_path / "longer.jsonl"))
