"""An evaluation in one picture, for a file and for TensorBoard."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def evaluation_figure(results: Mapping[str, Any]) -> Figure:
    """Draw acceptance by position and accepted lengths; with confidences also their reliability and what thresholds do.

    Args:
        results: of `evaluation_results`.
    """
    confidence = results["overall"]["confidence"]
    figure = Figure(figsize=(11, 4 if confidence is None else 8), layout="constrained")
    panels = figure.subplots(1 if confidence is None else 2, 2, squeeze=False)
    _acceptance(panels[0, 0], results["datasets"])
    _lengths(panels[0, 1], results["datasets"])
    if confidence is not None:
        _reliability(panels[1, 0], confidence["pooled"])
        _thresholds(panels[1, 1], results["overall"]["thresholds"])
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    return figure


def _acceptance(axes: Axes, datasets: Mapping[str, Any]) -> None:
    for number, (name, summary) in enumerate(datasets.items()):
        positions = range(1, len(summary["survival"]) + 1)
        for key, dashes, label in (("conditional_acceptance", "-", name), ("survival", "--", None)):
            axes.plot(
                positions,
                [_gap(value) for value in summary[key]],
                label=label,
                color=f"C{number}",
                linestyle=dashes,
                marker="o",
            )
    axes.set(xlabel="position k", ylabel="share", ylim=(0, 1.03), xticks=positions)
    axes.set_title("Accepted if reached (solid), accepted so far (dashed)")
    axes.legend()


def _lengths(axes: Axes, datasets: Mapping[str, Any]) -> None:
    for number, (name, summary) in enumerate(datasets.items()):
        shares = [count / max(1, summary["rounds"]) for count in summary["accepted_lengths"]]
        width = 0.8 / len(datasets)
        places = [length + (number - (len(datasets) - 1) / 2) * width for length in range(len(shares))]
        axes.bar(places, shares, width, label=f"{name}, tau {_gap(summary['tau']):.2f}")
    axes.set(xlabel="drafted tokens accepted", ylabel="share of rounds", title="Accepted tokens per round")
    axes.legend()


def _reliability(axes: Axes, pooled: Mapping[str, Any]) -> None:
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
    bins = pooled["bins"]
    most = max((each["count"] for each in bins), default=1)
    sizes = [8 + 92 * each["count"] / most for each in bins]
    axes.scatter([each["confidence"] for each in bins], [each["acceptance"] for each in bins], sizes)
    axes.set(xlabel="confidence", ylabel="accepted", title=f"Reliability of confidences, ECE {_gap(pooled['ece']):.3f}")


def _thresholds(axes: Axes, sweep: list[Mapping[str, Any]]) -> None:
    axes.plot([each["verified_per_round"] for each in sweep], [each["tau"] for each in sweep], marker="o")
    for each in sweep[::2]:
        place = (each["verified_per_round"], each["tau"])
        axes.annotate(f"{each['threshold']:.1f}", place, xytext=(4, -10), textcoords="offset points")
    axes.margins(0.1)
    axes.set(xlabel="tokens verified per round", ylabel="tau", title="What confidence thresholds would have kept")


def _gap(value: float | None) -> float:
    """NaN, which matplotlib leaves out, where a value is not known."""
    return float("nan") if value is None else value
