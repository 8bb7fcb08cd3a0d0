"""What each policy of verifying gives under load."""

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, NullLocator

from dspark_lightning.decoding.schedule_figure import policy_style
from dspark_lightning.report.drawing import INK, Chart, chart, chart_name
from dspark_lightning.report.records import Schedule

LABELS = {
    "concurrency": "concurrent requests",
    "tokens_per_second": "tokens per second",
    "tokens_per_second_per_user": "tokens per second and user",
    "verified_per_request": "draft tokens verified",
}


def schedule_charts(schedule: Schedule) -> list[Chart]:
    """Throughput over load, throughput against speed per user, and what each policy verifies."""
    return [
        _policies(
            schedule,
            ("concurrency", "tokens_per_second"),
            "Throughput over load",
            "Tokens per second of all users together, for each policy; higher is better. What drafting costs is left "
            "out.",
        ),
        _policies(
            schedule,
            ("tokens_per_second_per_user", "tokens_per_second"),
            "Throughput against speed per user",
            "Along each line the load grows to the left; up and to the right is better.",
        ),
        _policies(
            schedule,
            ("concurrency", "verified_per_request"),
            "Draft tokens verified per request",
            "How much each policy has the target check; a good one checks less as the load grows.",
        ),
    ]


def _policies(schedule: Schedule, fields: tuple[str, str], title: str, caption: str) -> Chart:
    """One line per policy, its points in the order of the load."""
    policies = dict.fromkeys(result.policy for result in schedule.results)

    def draw(axes: Axes) -> None:
        for policy in policies:
            results = sorted((r for r in schedule.results if r.policy == policy), key=lambda r: r.concurrency)
            x, y = ([getattr(result, field) for result in results] for field in fields)
            axes.plot(x, y, label=chart_name(policy), **policy_style(policy, list(policies), INK))
        if fields[0] == "concurrency":
            _loads(axes, schedule)
        else:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_ylim(bottom=0)

    return chart(draw, title, caption, xlabel=LABELS[fields[0]], ylabel=LABELS[fields[1]])


def _loads(axes: Axes, schedule: Schedule) -> None:
    """Mark the loads that were measured, as many as there is room for."""
    loads = sorted({result.concurrency for result in schedule.results})
    shown = loads[:: -(-len(loads) // 9)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [str(load) for load in shown])
    axes.xaxis.set_minor_locator(NullLocator())
