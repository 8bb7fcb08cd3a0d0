"""FiniteSteps: a NaN in one row, what it does to a fit and what it does not."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping

import dspark_lightning.module as module_file
from chat_helpers import chat, datasets_cache, write_jsonl  # noqa: F401
from dspark_lightning.callbacks import AcceptanceMetrics, FiniteSteps
from dspark_lightning.capture import capture
from dspark_lightning.cli import main
from fakes import FakeDSpark, RecordingLogger, fake_loader, fake_tau, tiny_trainer
from ranks_finite import ROWS, train
from ranks_helpers import run_on_two_ranks

WARNING = "Step {} is skipped, its loss or gradients are NaN or infinite, with the rows row_id {}"


@pytest.mark.parametrize(
    ("how", "options", "bad", "out", "step"),
    [
        ("features", {}, (1,), (1,), 2),
        ("weights", {"accumulate_grad_batches": 2}, (3,), (2, 3), 2),
        ("gradient", {"precision": "bf16-mixed"}, (1,), (1,), 2),
        ("weights", {"gradient_clip_algorithm": "value"}, (1,), (1,), 2),
        ("loss", {"accumulate_grad_batches": 2, "val_check_interval": 3}, (2,), (2, 3), 2),  # validates inside a step
    ],
)
def test_a_spoiled_batch_leaves_weights_and_states_as_if_it_had_not_been(
    how: str, options: dict[str, Any], bad: tuple[int], out: tuple[int], step: int, tmp_path: Path
) -> None:
    named = ", row_id ".join(str(ROWS * bad[0] + row) for row in range(ROWS))
    with pytest.warns(UserWarning, match=re.escape(WARNING.format(step, named))):
        spoiled = train(tmp_path, how, bad, **options)
    without = train(tmp_path, out=out, **options)
    assert all(weight.isfinite().all() for weight in spoiled["weights"].values())
    for part in ("weights", "states"):
        torch.testing.assert_close(spoiled[part], without[part], atol=0, rtol=0)
    steps = 6 // options.get("accumulate_grad_batches", 1)
    assert spoiled["skipped"] == [0] * (step - 1) + [1] * (steps - step + 1)
    assert without["skipped"] == [0] * (steps - len(out) // options.get("accumulate_grad_batches", 1))


def test_only_steps_in_a_row_end_the_fit(tmp_path: Path) -> None:
    apart = train(tmp_path, "weights", bad=(0, 2, 4), limit=2)
    assert apart["skipped"] == [1, 1, 2, 2, 3, 3]
    with pytest.raises(ValueError, match=r"2 optimizer steps .*, the last one was step 4 with the rows row_id 12, "):
        train(tmp_path, "weights", bad=(2, 3), limit=2)


def test_a_checkpoint_keeps_the_counts() -> None:
    """Which Lightning loads behind `setup`; a fit without one starts at 0."""
    one, other = FiniteSteps(), FiniteSteps()
    one.load_state_dict({"skipped": 7, "in_a_row": 2})
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == {"skipped": 7, "in_a_row": 2}
    other.setup(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), FakeDSpark(), "fit")
    assert other.state_dict() == {"skipped": 0, "in_a_row": 0}


@pytest.mark.parametrize("limit", [0, None])
def test_a_limit_below_1_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match=f"max_in_a_row must be 1 or more, got {limit}"):
        FiniteSteps(limit)


def test_the_command_ends_with_one_line_that_names_the_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that makes NaN of every row, as one in a precision too small does."""

    def capture_nan(*args: Any) -> Any:
        captured = capture(*args)
        captured.target_last_hidden_states.fill_(math.nan)
        return captured

    monkeypatch.setattr(module_file, "capture", capture_nan)
    data = write_jsonl(
        tmp_path / "rows.jsonl", [chat(f"Question {i}?", f"An answer of {i} words. " * 8) for i in range(8)]
    )
    settings = {
        "trainer.accelerator": "cpu",
        "trainer.max_epochs": 9,
        "trainer.logger": "false",
        "trainer.enable_progress_bar": "false",
        "trainer.enable_checkpointing": "false",
        "trainer.default_root_dir": tmp_path,
        "trainer.callbacks": json.dumps(
            [{"class_path": "dspark_lightning.callbacks.FiniteSteps", "init_args": {"max_in_a_row": 3}}]
        ),
        "model": "dspark_lightning.Qwen3DSpark",
        "model.target": "embedded",
        "model.mask_token_id": 5,
        "model.num_draft_layers": 1,
        "data": "dspark_lightning.datamodules.ChatDataModule",
        "data.train_data": data,
        "data.max_length": 64,
        "data.batch_size": 8,
    }
    with pytest.raises(SystemExit, match="2"):
        main(["fit", *(f"--{name}={value}" for name, value in settings.items())])
    places = ", ".join(f"{data}:{line}" for line in range(1, 5))
    assert capfd.readouterr().err.strip().splitlines()[-1] == (
        "dspark: error: 3 optimizer steps in a row had NaN or infinite losses or gradients, the last one was step 3 "
        f"with the rows {places} and 4 more: look at these rows; if they change from step to step, lower the learning "
        "rate, or train in another precision than float16"
    )


def test_a_validation_batch_with_nan_is_named_and_left_out(tmp_path: Path) -> None:
    """Lightning's EarlyStopping would end the fit at a value that is NaN."""
    val, logger = fake_loader(1, 2, 3), RecordingLogger()
    spoiled = val.dataset[1]
    spoiled["terms"]["tau_num"] = torch.tensor(math.nan)
    spoiled |= {"row_id": torch.tensor([9, 9]), "doc_row_ids": torch.tensor([[4, 6], [5, -1]])}  # packed rows
    trainer = tiny_trainer(
        tmp_path,
        max_epochs=2,
        logger=logger,
        num_sanity_val_steps=0,
        callbacks=[AcceptanceMetrics(), FiniteSteps(), EarlyStopping("val/tau", patience=5)],
    )
    with pytest.warns(UserWarning, match=r"^val/\* lack batches .*, with the rows row_id 4, row_id 5, row_id 6$"):
        trainer.fit(FakeDSpark(), fake_loader(4, 5), val)
    assert trainer.current_epoch == 2
    with pytest.warns(UserWarning, match=r"^test/\* lack batches .*, with the rows row_id 4, row_id 5, row_id 6$"):
        trainer.test(FakeDSpark(), val)
    assert [values["val/tau"] for _, values in logger.of("val")] == [pytest.approx(fake_tau(1, 3))] * 2


@pytest.mark.distributed
def test_a_spoiled_batch_of_one_rank_is_skipped_by_both(tmp_path: Path) -> None:
    run_on_two_ranks("ranks_finite.py", tmp_path)
    # Rank 1 knows whose loss it was; what only the gradients show may be any row's.
    for kind, rows in {"ddp": (6, 7), "fsdp2": (4, 5, 6, 7)}.items():
        bad, out = (torch.load(tmp_path / f"{kind}-{name}.0.pt") for name in ("bad", "out"))
        torch.testing.assert_close(bad["weights"], out["weights"], atol=0, rtol=0)
        assert bad["warnings"][0] == WARNING.format(2, ", row_id ".join(map(str, rows)))
        for rank in (0, 1):
            assert torch.load(tmp_path / f"{kind}-bad.{rank}.pt")["skipped"] == [0, 1, 1, 1, 2, 2]
