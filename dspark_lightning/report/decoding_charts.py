"""How the draft decodes: acceptance by position, accepted lengths, and what a confidence threshold changes."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator

from dspark_lightning.report.drawing import INK, SERIES, Chart, chart, chart_name, defined, look, positions
from dspark_lightning.report.records import Evaluation, Summary, Threshold


def acceptance_charts(evaluation: Evaluation) -> list[Chart]:
    """Conditional acceptance, survival and accepted lengths, of all data and of each set."""
    named = [(chart_name(name), summary) for name, summary in evaluation.summaries()]
    return [
        _by_position(
            named,
            "conditional_acceptance",
            "Conditional acceptance",
            "How often position k is accepted once all before it are; higher is better, and a flat line means that "
            "late positions are as good as the first.",
        ),
        _by_position(
            named,
            "survival",
            "Survival",
            "The share of rounds in which positions 1 to k are all accepted; higher is better, and tau is 1 plus all "
            "of them.",
        ),
        _accepted_lengths(named, evaluation.block_size),
    ]


def _by_position(named: list[tuple[str, Summary]], field: str, title: str, caption: str) -> Chart:
    """All data in the page's own ink, each data set in a colour."""

    def draw(axes: Axes) -> None:
        for i, (name, summary) in enumerate(named):
            values = defined(getattr(summary, field))
            together = {"color": INK, "linewidth": 2.6, "marker": "o"}
            style = look(i - 1) if i else together if len(named) > 1 else look(0)
            axes.plot(range(1, len(values) + 1), values, label=name, **style)
        positions(axes, len(values))

    return chart(draw, title, caption, xlabel="position k in the block", ylabel="share", ylim=(0, 1.03))


def _accepted_lengths(named: list[tuple[str, Summary]], block_size: int) -> Chart:
    """Bars for all data, a mark for each data set."""
    lengths = range(block_size + 1)

    def draw(axes: Axes) -> None:
        for i, (name, summary) in enumerate(named):
            shares = [count / max(1, summary.rounds) for count in summary.accepted_lengths]
            if i:
                axes.plot(lengths, shares, label=name, **look(i - 1) | {"linestyle": ""})
            else:
                bars: dict[str, Any] = {"color": INK, "alpha": 0.25} if len(named) > 1 else {"color": SERIES[0]}
                axes.bar(lengths, shares, **bars)
                axes.plot([], [], label=name, marker="s", markersize=8, linestyle="", **bars)
        axes.xaxis.set_major_locator(FixedLocator(lengths[:: 1 + block_size // 10]))
        axes.grid(axis="x", visible=False)

    title = "Accepted tokens per round"
    caption = (
        "How many tokens of a block the target takes; weight further right is better, the last bar is whole blocks."
    )
    return chart(draw, title, caption, xlabel="draft tokens accepted", ylabel="share of rounds")


def threshold_charts(thresholds: Sequence[Threshold]) -> list[Chart]:
    """What cutting a block at low confidence costs in tau, and what it saves in verified tokens."""
    ordered = sorted(thresholds, key=lambda point: point.threshold)

    def trade(axes: Axes) -> None:
        x, y = [p.verified_per_round for p in ordered], [p.tau for p in ordered]
        axes.plot(x, y, color=SERIES[0], marker="o")
        for point in _spread(ordered):
            place = (point.verified_per_round, point.tau)
            axes.annotate(f"{point.threshold:g}", place, (5, -11), textcoords="offset points")
        axes.margins(x=0.12, y=0.12)

    def share(axes: Axes) -> None:
        values = defined([p.accepted_share for p in ordered])
        axes.plot([p.threshold for p in ordered], values, color=SERIES[0], marker="o")

    return [
        chart(
            trade,
            "What a threshold costs and saves",
            "Tau against the draft tokens the target checks per round, one dot per confidence threshold; up and to the "
            "left is better.",
            xlabel="draft tokens verified per round",
            ylabel="tokens per target pass",
        ),
        chart(
            share,
            "How much of what is verified is accepted",
            "The share of verified draft tokens that the target accepts; higher is less work for nothing.",
            xlabel="confidence threshold",
            ylabel="share",
            ylim=(0, 1.03),
        ),
    ]


def _spread(ordered: Sequence[Threshold]) -> list[Threshold]:
    """Those whose labels do not overlap: a twelfth of the range apart."""
    room = (max(p.verified_per_round for p in ordered) - min(p.verified_per_round for p in ordered)) / 12
    kept: list[Threshold] = []
    for point in ordered:
        if not kept or abs(point.verified_per_round - kept[-1].verified_per_round) > room:
            kept.append(point)
    return kept
