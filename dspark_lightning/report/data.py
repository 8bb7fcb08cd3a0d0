"""Reading a run: the logs of the training, and what the tools wrote about its draft."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dspark_lightning.report.records import Calibration, Evaluation, Schedule
from dspark_lightning.typed_json import build, parse

T = TypeVar("T")

EVALUATION = "evaluation/evaluation.json"
CALIBRATION = "evaluation/calibration.json"
SCHEDULE = "evaluation/schedule.json"


@dataclass(frozen=True)
class Curve:
    """A logged value over optimizer steps; steps rise."""

    steps: list[int]
    values: list[float]

    def thinned(self, points: int) -> "Curve":
        """At most `points` points: neighbours are averaged, and stand at the last one's step."""
        count = len(self.steps)
        size = -(-count // points)
        starts = range(0, count, size)
        last = [self.steps[min(i + size, count) - 1] for i in starts]
        return Curve(last, [mean(self.values[i : i + size]) for i in starts])


@dataclass(frozen=True)
class Run:
    """What a run folder holds; None or empty for what it does not."""

    folder: Path
    scalars: dict[str, Curve]
    config: str | None  # the text of config.yaml
    settings: Mapping[str, Any]  # its model.init_args
    evaluation: Evaluation | None
    calibration: Calibration | None
    schedule: Schedule | None
    stale: frozenset[str]  # files that were made from other records than the evaluation, and so are left out


def read_run(folder: Path) -> Run:
    """Read everything that is there.

    Raises:
        ValueError: no such folder, neither logs nor an evaluation in it, or a file that cannot be used.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}: give that of a run, such as runs/quickstart/version_0")
    if (folder / "evaluation.json").exists() and not (folder / EVALUATION).exists():
        raise ValueError(
            f"{str(folder)!r} is the evaluation of a run: give the run's own folder, {str(folder.parent)!r}"
        )
    config = _read_text(folder / "config.yaml")
    evaluation = _read_record(Evaluation, folder / EVALUATION, "dspark evaluate")
    calibration = _read_record(Calibration, folder / CALIBRATION, "dspark calibrate")
    schedule = _read_record(Schedule, folder / SCHEDULE, "dspark schedule")
    made = {CALIBRATION: calibration, SCHEDULE: schedule}
    digest = None if evaluation is None else evaluation.records_digest
    stale = frozenset(name for name, record in made.items() if record and digest and record.records_digest != digest)
    run = Run(
        folder=folder,
        scalars=read_scalars(folder),
        config=config,
        settings=_settings(config, folder / "config.yaml"),
        evaluation=evaluation,
        calibration=None if CALIBRATION in stale else calibration,
        schedule=None if SCHEDULE in stale else schedule,
        stale=stale,
    )
    if not run.scalars and run.evaluation is None:
        raise ValueError(
            f"{str(folder)!r} is no folder of a run: it has neither TensorBoard events (events.out.tfevents.*) nor "
            f"{EVALUATION}; give one such as runs/quickstart/version_0"
        )
    return run


def read_scalars(folder: Path) -> dict[str, Curve]:
    """Every scalar of all event files of a folder, in the order of steps; of one step the value written last."""
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    log.Reload()
    events = {tag: log.Scalars(tag) for tag in log.Tags()["scalars"]}
    trained = [event.step for tag in events if tag.startswith("train/") for event in events[tag]]
    return {tag: _curve(events[tag], last=max(trained, default=math.inf)) for tag in events}


def _curve(events: list[Any], last: float) -> Curve:
    # Lightning logs what comes with the n-th optimizer step as step n - 1, but a validation after the fit as step n.
    written = sorted(events, key=lambda event: event.wall_time)
    latest = {int(min(event.step, last)) + 1: event.value for event in written}
    return Curve(sorted(latest), [latest[step] for step in sorted(latest)])


def _read_record(kind: type[T], path: Path, command: str) -> T | None:
    text = _read_text(path)
    if text is None:
        return None
    try:
        return build(kind, parse(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error}): write it again with `{command}`") from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} {error}: write it again with `{command}`") from error


def _settings(config: str | None, path: Path) -> Mapping[str, Any]:
    """The arguments of the module in a configuration that LightningCLI saved; empty for one of another form."""
    try:
        node = yaml.safe_load(config or "")
    except yaml.YAMLError as error:
        raise ValueError(f"{str(path)!r} is not YAML: {' '.join(str(error).split())}") from error
    for key in ("model", "init_args"):
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def _read_text(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {str(path)!r}: {error}") from error
