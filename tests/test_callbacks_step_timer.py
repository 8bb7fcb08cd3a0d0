"""StepTimer: parts that last a known time, work that is counted, validation left out."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dspark_lightning.callbacks import StepTimer, step_timer
from fakes import FakeDSpark, RecordingLogger, fake_loader, tiny_trainer


class Slow(nn.Module):
    """A draft whose forward and backward take given times."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds = (forward, backward)

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.seconds[0])
        output = self.weight * inputs
        if output.requires_grad:
            output.register_hook(lambda grad: time.sleep(self.seconds[1]))
        return output


class SlowDSpark(FakeDSpark):
    """Target 0.02 s, draft forward 0.04 s, backward 0.06 s; validation over 0.5 s."""

    def __init__(self) -> None:
        super().__init__()
        self.draft = Slow(0.04, 0.06)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        time.sleep(0.5)
        self.draft(torch.ones(1, 1))
        return super().validation_step(batch, batch_idx)


@pytest.fixture(scope="module")
def logger(tmp_path_factory: pytest.TempPathFactory) -> RecordingLogger:
    """Four steps of two micro-batches, a validation after the second step, windows of three steps."""
    logger = RecordingLogger()
    options = {"max_epochs": 1, "log_every_n_steps": 3, "accumulate_grad_batches": 2, "val_check_interval": 4}
    trainer = tiny_trainer(tmp_path_factory.mktemp("timer"), logger=logger, callbacks=StepTimer(), **options)
    trainer.fit(SlowDSpark(), fake_loader(*range(8)), fake_loader(0))
    return logger


@pytest.fixture(scope="module")
def records(logger: RecordingLogger) -> list[tuple[int, dict[str, float]]]:
    return logger.of("time")


def test_each_part_lasts_what_it_should(records: list[tuple[int, dict[str, float]]]) -> None:
    step, values = records[0]
    assert step == 2
    for part, seconds in {"target": 0.02, "draft": 0.04, "backward": 0.06}.items():
        assert 2 * seconds <= values[f"time/{part}"] < 2 * seconds + 0.1
    assert values["time/optimizer"] < 0.1
    assert values["time/data"] < 0.1  # over 0.16 with the validation, which came in this window


def test_parts_sum_to_the_step(records: list[tuple[int, dict[str, float]]]) -> None:
    values = records[0][1]
    parts = sum(values[f"time/{part}"] for part in ("data", "target", "draft", "backward", "optimizer"))
    assert values["time/step"] == pytest.approx(parts)


def test_work_is_what_the_window_held(records: list[tuple[int, dict[str, float]]]) -> None:
    values = records[0][1]
    seconds = 3 * values["time/step"]
    assert values["time/rows_per_second"] * seconds == pytest.approx(6 * 3)
    assert values["time/supervised_tokens_per_second"] * seconds == pytest.approx(3 + 5 + 7 + 9 + 11 + 13)


def test_the_fill_rate_is_that_of_all_batches_of_the_window(logger: RecordingLogger) -> None:
    """Batch i has 3 + i real tokens in 12 places."""
    (_, first), (_, last) = logger.of("data")
    assert first == {"data/fill_rate": pytest.approx((3 + 4 + 5 + 6 + 7 + 8) / (6 * 12))}
    assert last == {"data/fill_rate": pytest.approx((9 + 10) / (2 * 12))}


def test_the_fill_rate_is_over_all_ranks(tmp_path: Path) -> None:
    """As if a second rank had held as many places, all of them padding."""
    logger = RecordingLogger()
    trainer = tiny_trainer(tmp_path, logger=logger, callbacks=StepTimer(), max_epochs=1, log_every_n_steps=1)

    def reduce(value: Any, *args: Any, **options: Any) -> Any:
        return value * torch.tensor([1, 1, 1, 2]) if torch.is_tensor(value) and value.shape == (4,) else value

    trainer.strategy.reduce = reduce  # type: ignore[method-assign]
    trainer.fit(FakeDSpark(), fake_loader(0))
    assert logger.of("data")[0][1] == {"data/fill_rate": pytest.approx(3 / 24)}


def test_the_last_window_is_logged_at_the_end(records: list[tuple[int, dict[str, float]]]) -> None:
    assert [step for step, _ in records] == [2, 3]
    values = records[1][1]
    assert values["time/rows_per_second"] * values["time/step"] == pytest.approx(2 * 3)


def test_cuda_events_are_read_in_seconds_and_only_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """A millisecond passes from one event to the next."""

        count = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.synchronized = False

        def record(self) -> None:
            Event.count += 1
            self.milliseconds = Event.count

        def synchronize(self) -> None:
            self.synchronized = True

        def elapsed_time(self, end: "Event") -> float:
            assert end.synchronized
            return end.milliseconds - self.milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    start, end = (step_timer._now(torch.device("cuda", 1)) for _ in range(2))
    assert not end.synchronized
    assert step_timer._seconds(start, end) == pytest.approx(0.001)


def test_no_hook_stays_on_the_draft(tmp_path: Path) -> None:
    module = FakeDSpark()
    tiny_trainer(tmp_path, callbacks=StepTimer(), max_epochs=1).fit(module, fake_loader(0))
    assert not module.draft._forward_hooks
    assert not module.draft._forward_pre_hooks
