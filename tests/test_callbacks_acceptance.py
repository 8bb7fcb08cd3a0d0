"""AcceptanceMetrics in real fits: windows, resume, validation, TensorBoard."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.data import DataLoader

from dspark_lightning.callbacks import AcceptanceMetrics
from fakes import FakeDSpark, RecordingLogger, fake_loader, fake_tau, tiny_trainer


def fit(
    tmp_path: Path,
    *batches: int,
    val: DataLoader[Any] | None = None,
    ckpt_path: Path | None = None,
    callbacks: Sequence[Callback] = (),
    **arguments: Any,
) -> RecordingLogger:
    logger = RecordingLogger()
    trainer = tiny_trainer(tmp_path, logger=logger, callbacks=[AcceptanceMetrics(), *callbacks], **arguments)
    trainer.fit(FakeDSpark(), fake_loader(*batches), val, ckpt_path=ckpt_path)
    return logger


def taus(logger: RecordingLogger, stage: str = "train") -> list[tuple[int, Any]]:
    return [(step, pytest.approx(values[f"{stage}/tau"])) for step, values in logger.of(stage)]


def test_a_window_is_everything_since_the_last_one(tmp_path: Path) -> None:
    logger = fit(tmp_path, *range(7), max_epochs=1, log_every_n_steps=3)
    assert taus(logger) == [(2, fake_tau(0, 1, 2)), (5, fake_tau(3, 4, 5)), (6, fake_tau(6))]
    first = logger.of("train")[0][1]
    assert first["train/accept_rate@1"] == 0.5
    assert first["train/accept_rate@2"] == 0.25
    assert first["train/loss"] == pytest.approx((0.1 * 9 + 0.9 * 3) / 9)
    assert first["train/supervised_tokens"] == pytest.approx((3 + 5 + 7) / 3)
    assert first["train/kept_anchors"] == pytest.approx((2 + 3 + 4) / 3)


def test_windows_count_optimizer_steps_across_epochs(tmp_path: Path) -> None:
    options = {"max_epochs": 2, "log_every_n_steps": 2, "accumulate_grad_batches": 2}
    logger = fit(tmp_path, *range(5), **options)  # 3 steps an epoch, the last from one batch
    assert taus(logger) == [(1, fake_tau(0, 1, 2, 3)), (3, fake_tau(4, 0, 1)), (5, fake_tau(2, 3, 4))]
    assert logger.of("train")[1][1]["train/supervised_tokens"] == pytest.approx((11 + 3 + 5) / 2)


def test_accumulation_and_batching_do_not_change_the_values(tmp_path: Path) -> None:
    one = fit(tmp_path, *range(4), max_epochs=1, log_every_n_steps=4)
    four = fit(tmp_path, *range(4), max_epochs=1, log_every_n_steps=1, accumulate_grad_batches=4)
    differing = {"train/supervised_tokens", "train/kept_anchors"}  # per optimizer step
    one_values, four_values = (
        {k: v for k, v in x.of("train")[0][1].items() if k not in differing} for x in (one, four)
    )
    assert one_values == pytest.approx(four_values)


def test_resume_continues_the_open_window(tmp_path: Path) -> None:
    unbroken = fit(tmp_path, 0, 1, 2, max_epochs=4, log_every_n_steps=5)
    saving = ModelCheckpoint(tmp_path, every_n_epochs=1, filename="first")
    fit(tmp_path, 0, 1, 2, max_epochs=1, log_every_n_steps=5, callbacks=[saving], enable_checkpointing=True)
    resumed = fit(tmp_path, 0, 1, 2, max_epochs=4, log_every_n_steps=5, ckpt_path=tmp_path / "first.ckpt")
    assert len(unbroken.records) == 3
    assert resumed.records == unbroken.records


def test_only_rank_zero_takes_the_saved_sums(tmp_path: Path) -> None:
    callback = AcceptanceMetrics()
    trainer = tiny_trainer(tmp_path, callbacks=callback, max_epochs=1)
    trainer.fit(FakeDSpark(), fake_loader(0, 1, 2))
    state = callback.state_dict()
    assert state["steps"] == 3
    assert state["sums"]["counts"].tolist() == [3 + 5 + 7, 2 + 3 + 4]
    other = AcceptanceMetrics()
    other.setup(trainer, FakeDSpark(), "fit")
    other._is_global_zero = False
    other.load_state_dict(state)
    assert other.state_dict()["sums"]["counts"].tolist() == [0, 0]


def test_a_value_without_denominator_is_not_logged_again(tmp_path: Path) -> None:
    loader = fake_loader(0, 1)
    for part in ("num", "den"):
        loader.dataset[1]["terms"][f"tau_{part}"] *= 0
    logger = RecordingLogger()
    trainer = tiny_trainer(tmp_path, logger=logger, callbacks=AcceptanceMetrics(), max_epochs=1, log_every_n_steps=1)
    trainer.fit(FakeDSpark(), loader)
    assert ["train/tau" in values for _, values in logger.of("train")] == [True, False]


def test_validation_covers_the_set_and_not_the_sanity_check(tmp_path: Path) -> None:
    logger = fit(tmp_path, 0, 1, val=fake_loader(2, 3, 4), max_epochs=2, num_sanity_val_steps=2)
    assert taus(logger, "val") == [(1, fake_tau(2, 3, 4)), (3, fake_tau(2, 3, 4))]
    assert logger.of("val")[0][1]["val/supervised_tokens"] == 7 + 9 + 11


def test_validate_and_test_return_what_fit_logged(tmp_path: Path) -> None:
    logger = fit(tmp_path, 0, val=fake_loader(2, 3), max_epochs=1)
    trainer = tiny_trainer(tmp_path, callbacks=AcceptanceMetrics())
    validated = trainer.validate(FakeDSpark(), fake_loader(2, 3), verbose=False)[0]
    tested = trainer.test(FakeDSpark(), fake_loader(2, 3), verbose=False)[0]
    assert validated == pytest.approx(logger.of("val")[0][1])
    assert {name.replace("test/", "val/"): value for name, value in tested.items()} == validated


def test_checkpoint_and_early_stopping_monitor_val_tau(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="val/tau", mode="max")
    stopping = EarlyStopping("val/tau", mode="max", patience=2)
    callbacks = [checkpoint, stopping, AcceptanceMetrics()]
    options = {"callbacks": callbacks, "max_epochs": 9, "log_every_n_steps": 1, "enable_checkpointing": True}
    trainer = tiny_trainer(tmp_path, **options)
    trainer.fit(FakeDSpark(), fake_loader(0, 5), fake_loader(1))
    assert checkpoint.best_model_score.item() == pytest.approx(fake_tau(1))
    assert trainer.current_epoch == 3  # val/tau never improves: stopped after the third validation
    assert trainer.callback_metrics["train/tau"].item() == pytest.approx(fake_tau(5))


def test_few_values_on_the_progress_bar(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, callbacks=AcceptanceMetrics(), max_epochs=1, log_every_n_steps=1)
    trainer.fit(FakeDSpark(), fake_loader(0), fake_loader(1))
    assert trainer.progress_bar_metrics.keys() == {"train/loss", "train/tau", "val/tau"}


def test_tensorboard_shows_all_positions_together(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    trainer = tiny_trainer(tmp_path, logger=logger, callbacks=AcceptanceMetrics(), max_epochs=1, log_every_n_steps=1)
    trainer.fit(FakeDSpark(), fake_loader(0, 1), fake_loader(2))
    events = EventAccumulator(logger.log_dir).Reload()
    curves = {f"{stage}/accept_rate{at}" for stage in ("train", "val") for at in ("", "@1", "@2")}
    assert curves | {"train/tau", "val/tau", "train/loss", "val/loss"} <= set(events.Tags()["scalars"])
    assert [(e.step, e.value) for e in events.Scalars("train/tau")] == [
        (0, fake_tau(0)),
        (1, pytest.approx(fake_tau(1))),
    ]
    assert events.Tags()["images"] == ["val/acceptance_by_position"]
    content = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    charts = layout_pb2.Layout.FromString(content).category[0].chart
    assert [list(chart.multiline.tag) for chart in charts[:2]] == [
        [r"train/accept_rate@\d+$"],
        [r"val/accept_rate@\d+$"],
    ]


@pytest.mark.parametrize("kind", ["none", "csv", "fast_dev_run"])
def test_other_loggers_work(kind: str, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="csv") if kind == "csv" else False
    options = {"logger": logger, "callbacks": AcceptanceMetrics(), "log_every_n_steps": 1, "max_epochs": 1}
    trainer = tiny_trainer(tmp_path, fast_dev_run=kind == "fast_dev_run", **options)
    trainer.fit(FakeDSpark(), fake_loader(0), fake_loader(1))
    assert trainer.callback_metrics["val/tau"].item() == pytest.approx(fake_tau(1))
    if logger:
        assert "train/tau" in (Path(logger.log_dir) / "metrics.csv").read_text()


def test_a_step_without_terms_is_named(tmp_path: Path) -> None:
    class Silent(FakeDSpark):
        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            del batch, batch_idx

    trainer = tiny_trainer(tmp_path, callbacks=AcceptanceMetrics(), max_epochs=1)
    with pytest.raises(ValueError, match=r"needs the val step to return a dict with 'terms'.*got NoneType"):
        trainer.validate(Silent(), fake_loader(0), verbose=False)
