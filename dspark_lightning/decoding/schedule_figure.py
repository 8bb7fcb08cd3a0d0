"""What policies of verification reach under load, drawn."""

from collections.abc import Sequence
from typing import Any

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
        load.plot([result.concurrency for result in mine], speeds, label=name, **policy_style(name, names))
        trade.plot(
            [result.tokens_per_second_per_user for result in mine], speeds, label=name, **policy_style(name, names)
        )
    load.set(xlabel="users", ylabel="tokens per second, all users", xscale="log", yscale="log")
    ticks = sorted({result.concurrency for result in results})
    load.set_xticks(ticks, [str(tick) for tick in ticks])
    load.set_xticks([], minor=True)
    trade.set(xlabel="tokens per second, each user", xscale="log")
    for axes in (load, trade):
        axes.grid(alpha=0.3)
    load.legend(fontsize="small")
    return figure


def policy_style(policy: str, policies: Sequence[str], ink: str = "black") -> dict[str, Any]:
    """How a policy's line is drawn: fixed lengths recede, the longer the fainter, and schedulers stand out.

    Args:
        policy: its name.
        policies: all that are drawn.
        ink: colour of what has none of its own.
    """
    kind = policy.split()[0].rstrip(",")
    alike = [other for other in policies if other.startswith(kind)]
    place = alike.index(policy)
    if kind == "fixed":
        return {"color": ink, "alpha": 0.75 - 0.55 * place / max(1, len(alike) - 1), "linewidth": 1}
    if kind == "threshold":
        return {"color": "#1a80cc", "linestyle": ("--", ":", "-.")[place % 3], "linewidth": 1.4}
    if kind == "scheduler":
        return {"color": ("#d55e00", "#009e73")[place % 2], "marker": "os"[place % 2], "markersize": 4}
    return {"color": ink, "linestyle": ":"}
