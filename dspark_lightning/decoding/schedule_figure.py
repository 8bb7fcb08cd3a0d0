"""What policies of verification reach under load, drawn."""

from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from dspark_lightning.decoding.simulate import ServingResult


def schedule_figure(results: Sequence[ServingResult]) -> Figure:
    """Draw throughput over the number of users, and over the speed that each of them sees.

    Args:
        results: of `simulate_serving`.
    """
    figure = Figure(figsize=(12, 5), layout="constrained")
    load, trade = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(result.policy for result in results))
    for name in names:
        mine = [result for result in results if result.policy == name]
        speeds = [result.tokens_per_second for result in mine]
        load.plot([result.concurrency for result in mine], speeds, label=name, **_style(name, names))
        trade.plot([result.tokens_per_second_per_user for result in mine], speeds, label=name, **_style(name, names))
    load.set(xlabel="users", ylabel="tokens per second, all users", xscale="log", yscale="log")
    ticks = sorted({result.concurrency for result in results})
    load.set_xticks(ticks, [str(tick) for tick in ticks])
    load.set_xticks([], minor=True)
    trade.set(xlabel="tokens per second, each user", xscale="log")
    for axes in (load, trade):
        axes.grid(alpha=0.3)
    load.legend(fontsize="small")
    return figure


def _style(name: str, names: Sequence[str]) -> dict[str, Any]:
    """Fixed lengths recede, schedulers stand out."""
    kind, _, _ = name.partition(" ")
    alike = [other for other in names if other.startswith(kind)]
    shade = (alike.index(name) + 1) / (len(alike) + 1)
    if kind == "fixed":
        return {"color": colormaps["Greys"](0.2 + 0.6 * shade), "linewidth": 1}
    if kind == "threshold":
        return {"color": colormaps["Blues"](0.3 + 0.6 * shade), "linestyle": "dashed"}
    if kind.startswith("scheduler"):
        return {"color": "tab:red" if name == "scheduler" else "tab:orange", "marker": "o", "markersize": 4}
    return {"color": "black", "linestyle": "dotted"}
