"""The top of the page: what was measured, and the four numbers that matter most."""

from dataclasses import dataclass

from dspark_lightning.report.data import Run
from dspark_lightning.report.records import Evaluation

DASH = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class Fact:
    """A number in large type, or one line of the page's head."""

    name: str
    value: str
    note: str = ""


def facts(run: Run) -> list[Fact]:
    """What was run, on what."""
    evaluation, settings = run.evaluation, run.settings
    if evaluation is None:
        known = {"Target": settings.get("target"), "Block size": settings.get("block_size")}
        return [Fact(name, str(value)) for name, value in known.items() if value is not None]
    machine = ", ".join(f"{name} {value}" for name, value in evaluation.machine.items())
    return [
        Fact("Target", evaluation.target),
        Fact("Draft", evaluation.draft),
        Fact("Block size", str(evaluation.block_size)),
        Fact(
            "Decoding",
            f"temperature {evaluation.temperature:g}, at most {evaluation.max_new_tokens:,} new tokens, confidence "
            f"threshold {evaluation.confidence_threshold:g}, seed {evaluation.seed}",
        ),
        *([Fact("Machine", machine)] if machine else []),
    ]


def headline(run: Run) -> list[Fact]:
    """Tau, speed-up, acceptance of the first token, and how long the draft was trained."""
    return [_tau(run), _speedup(run.evaluation), _first_acceptance(run), _steps(run)]


def _tau(run: Run) -> Fact:
    name = "Tokens per target pass (tau)"
    if run.evaluation is None:
        return _held_out(run, "val/tau", name)
    overall = run.evaluation.overall
    note = f"95 % interval {value_range(overall.tau_interval)}; at most {run.evaluation.block_size + 1}"
    return Fact(name, number(overall.tau), note)


def _speedup(evaluation: Evaluation | None) -> Fact:
    name = "Speed-up"
    if evaluation is None:
        return Fact(name, DASH, "dspark evaluate measures it")
    speedup = evaluation.overall.speedup
    if speedup is None:
        return Fact(name, DASH, "not timed in this evaluation")
    note = (
        f"spread {value_range((speedup.low, speedup.high))}; {speedup.tokens_per_second:,.1f} tokens per second, "
        f"{speedup.plain_tokens_per_second:,.1f} without a draft"
    )
    return Fact(name, f"{speedup.ratio:.2f}{TIMES}", note)


def _first_acceptance(run: Run) -> Fact:
    name = "Acceptance at position 1"
    if run.evaluation is None:
        return _held_out(run, "val/accept_rate@1", name)
    overall = run.evaluation.overall
    rounds = overall.conditional_counts[0]
    return Fact(name, number(overall.conditional_acceptance[0]), f"in {rounds:,} rounds that proposed a token")


def _held_out(run: Run, tag: str, name: str) -> Fact:
    """The last value that validation logged, in place of one from decoding."""
    if tag not in run.scalars:
        return Fact(name, DASH, "dspark evaluate measures it")
    curve = run.scalars[tag]
    note = f"on held-out answers after step {curve.steps[-1]:,}; dspark evaluate measures it in decoding"
    return Fact(name, f"{curve.values[-1]:.2f}", note)


def _steps(run: Run) -> Fact:
    steps = [curve.steps[-1] for tag, curve in run.scalars.items() if tag.startswith("train/")]
    if not steps:
        return Fact("Steps trained", DASH, "no training log in this folder")
    tau = run.scalars.get("val/tau")
    note = f"tau on held-out answers after step {tau.steps[-1]:,}: {tau.values[-1]:.2f}" if tau else ""
    return Fact("Steps trained", f"{max(steps):,}", note)


def value_range(bounds: tuple[float, float] | None) -> str:
    """An interval, as people read it; a dash for one that is not known."""
    return DASH if bounds is None else f"{bounds[0]:.2f} {DASH} {bounds[1]:.2f}"


def number(value: float | None, digits: int = 2) -> str:
    """A number, rounded; a dash for one that nothing was counted for."""
    return DASH if value is None else f"{value:.{digits}f}"
