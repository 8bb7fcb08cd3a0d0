"""What `dspark evaluate`, `dspark calibrate` and `dspark schedule` write, as far as the page shows it.

Null in the files is None here; every other key must be there. Positions in a block count from 1 in what people read, so
entry 0 of a list "by position" belongs to position 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Bin:
    """Predictions between `low` and `high`: their mean, and how often what they predict came true."""

    low: float
    high: float
    count: int
    confidence: float
    acceptance: float


@dataclass(frozen=True)
class Reliability:
    """How well the confidence head predicts acceptance."""

    count: int
    ece: float | None
    auc: float | None
    brier: float | None
    bins: list[Bin]


@dataclass(frozen=True)
class Confidence:
    """Reliability over all positions, and of each."""

    pooled: Reliability
    by_position: list[Reliability]


@dataclass(frozen=True)
class Speedup:
    """Wall-clock time of decoding with the draft against decoding without."""

    ratio: float
    low: float
    high: float
    tokens_per_second: float
    plain_tokens_per_second: float


@dataclass(frozen=True)
class Threshold:
    """What decoding does when a block is cut at the first confidence below `threshold`."""

    threshold: float
    tau: float
    verified_per_round: float
    accepted_share: float | None


@dataclass(frozen=True)
class Summary:
    """Decoding of one data set, or of all."""

    conversations: int
    answers: int
    rounds: int
    new_tokens: int
    tokens_drafted: int
    tokens_verified: int
    tokens_accepted: int
    tau: float | None
    tau_interval: tuple[float, float] | None
    accepted_lengths: list[int]
    survival: list[float | None]
    conditional_acceptance: list[float | None]
    conditional_counts: list[int]
    speedup: Speedup | None
    thresholds: list[Threshold] | None
    confidence: Confidence | None

    def __post_init__(self) -> None:
        block_size = len(self.accepted_lengths) - 1
        for name in ("survival", "conditional_acceptance", "conditional_counts"):
            _check_length(name, getattr(self, name), block_size, "accepted_lengths less one")


@dataclass(frozen=True)
class Evaluation:
    """The whole of evaluation.json."""

    command: str
    draft: str
    target: str
    block_size: int
    temperature: float
    max_new_tokens: int
    confidence_threshold: float
    seed: int
    machine: dict[str, Any]
    records_digest: str
    overall: Summary
    datasets: dict[str, Summary]

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size {self.block_size}, must be at least 1")
        for summary in (self.overall, *self.datasets.values()):
            _check_length("accepted_lengths", summary.accepted_lengths, self.block_size + 1, "block_size plus one")

    def summaries(self) -> list[tuple[str, Summary]]:
        """The data sets by name; before them all of them together, unless there is only one."""
        together = [("all data", self.overall)] if len(self.datasets) != 1 else []
        return [*together, *self.datasets.items()]


@dataclass(frozen=True)
class Calibration:
    """calibration.json: the temperature of each position, and the survival predicted without and with them."""

    command: str
    dataset: str
    num_samples: int
    temperatures: list[float]
    ece_before: float | None
    ece_after: float | None
    ece_before_by_position: list[float | None]
    ece_after_by_position: list[float | None]
    survival_bins_before: list[list[Bin]]
    survival_bins_after: list[list[Bin]]
    records_digest: str

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name.startswith("survival_bins") or field.name.endswith("by_position"):
                _check_length(field.name, getattr(self, field.name), len(self.temperatures), "temperatures")


@dataclass(frozen=True)
class ScheduleResult:
    """One policy under one load."""

    concurrency: int
    policy: str
    tokens_per_second: float
    tokens_per_second_per_user: float
    verified_per_request: float
    accepted_per_request: float


@dataclass(frozen=True)
class Schedule:
    """What the page shows of schedule.json."""

    command: str
    results: list[ScheduleResult]
    records_digest: str


def _check_length(name: str, values: Sequence[Any], expected: int, source: str) -> None:
    if len(values) != expected:
        raise ValueError(f"{name} of {len(values)} entries, must be {expected} as {source} says")
