"""An evaluation as tables for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Summaries = Mapping[str, Mapping[str, Any]]
"""Summaries by name: each dataset's, and "all" when there are several."""


def print_evaluation(results: Mapping[str, Any]) -> None:
    """Print what `evaluation_results` returned."""
    summaries: dict[str, Any] = dict(results["datasets"])
    if len(summaries) > 1:
        summaries["all"] = results["overall"]
    overall = results["overall"]
    tables = [_headline(summaries), _by_position(summaries)]
    if overall["confidence"] is not None:
        tables += [_confidence(overall["confidence"]), _thresholds(overall["thresholds"])]
    console = Console()
    console = console if console.is_terminal else Console(width=160)  # piped output has no width of its own
    for table in tables:
        console.print(table)


def _headline(summaries: Summaries) -> Table:
    header = (
        "dataset",
        "answers",
        "rounds",
        "tau (95 %)",
        "accepted / verified",
        "speed-up (10-90 % of answers)",
        "tokens/s",
        "same",
    )
    rows = []
    for name, summary in summaries.items():
        speed = summary["speedup"]
        rows.append(
            (
                name,
                str(summary["answers"]),
                str(summary["rounds"]),
                _with_interval(summary["tau"], summary["tau_interval"]),
                f"{summary['tokens_accepted']} / {summary['tokens_verified']}",
                "" if speed is None else _with_interval(speed["ratio"], (speed["low"], speed["high"])),
                "" if summary["tokens_per_second"] is None else f"{summary['tokens_per_second']:.1f}",
                "" if summary["same_as_plain"] is None else f"{summary['same_as_plain']} of {summary['answers']}",
            )
        )
    return _table(
        "Tokens per target pass (tau), speed against the target alone, answers that equal its own", header, rows
    )


def _by_position(summaries: Summaries) -> Table:
    size = len(next(iter(summaries.values()))["survival"])
    rows = []
    for label, key in (("accepted if reached", "conditional_acceptance"), ("accepted so far", "survival")):
        rows += [(name, label, *map(_number, summary[key])) for name, summary in summaries.items()]
    return _table("Acceptance by position in the block", ("dataset", "", *_positions(size)), rows)


def _confidence(confidence: Mapping[str, Any]) -> Table:
    parts = [*confidence["by_position"], confidence["pooled"]]
    rows = [(label, *(_number(part[key]) for part in parts)) for label, key in _MEASURES]
    title = "Confidence of each token against its acceptance, all datasets"
    return _table(title, ("", *_positions(len(parts) - 1), "all"), rows)


def _thresholds(sweep: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (
            f"{row['threshold']:.2f}",
            _number(row["tau"]),
            _number(row["verified_per_round"]),
            _number(row["accepted_share"]),
        )
        for row in sweep[::2]
    ]
    header = ("threshold", "tau", "verified per round", "of these accepted")
    return _table("What confidence thresholds would have kept, all datasets", header, rows)


_MEASURES = (("calibration error (ECE)", "ece"), ("ranking (AUC)", "auc"), ("Brier score", "brier"))


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*header, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


def _positions(size: int) -> list[str]:
    return [f"@{k}" for k in range(1, size + 1)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    return _number(value) if interval is None else f"{_number(value)} ({interval[0]:.2f}-{interval[1]:.2f})"
