"""What was learned: loss, tau, acceptance, time and learning rate over the optimizer steps."""

from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes

from dspark_lightning.report.data import Curve
from dspark_lightning.report.drawing import Chart, chart, count_steps, look, position_color

POINTS = 200
"""Of a curve in a chart; longer ones are averaged down, so that the page of a long run stays small."""


LOSSES = {
    "train/loss": "loss",
    "train/l1_loss": "L1",
    "train/confidence_loss": "confidence",
    "train/ce_loss": "cross entropy",
}
TAUS = {"train/tau": "training", "val/tau": "held-out", "val/tau_decode": "held-out, decoding"}


def training_charts(scalars: dict[str, Curve]) -> list[Chart]:
    """Loss, tau, acceptance by position, time and learning rate over the optimizer steps: those that were logged."""
    parts = ("time/data", "time/target", "time/draft", "time/backward", "time/optimizer")
    times = {tag: tag.removeprefix("time/") for tag in parts}
    rates = {tag: tag.removeprefix("lr-") for tag in scalars if tag.startswith("lr-")}
    drawn = [
        _curves(
            scalars,
            LOSSES,
            "Loss and its parts",
            "The training loss and the three terms it is the weighted sum of; lower is better.",
            "loss",
        ),
        _curves(
            scalars,
            TAUS,
            "Tokens per target pass (tau)",
            "Tau on training rows and on rows the draft has not seen; higher is better, and 1 is no draft at all.",
            "tokens per target pass",
        ),
        _acceptance_curves(scalars, "val", "on held-out rows"),
        _acceptance_curves(scalars, "train", "in training"),
        _curves(
            scalars,
            times,
            "Time of a step",
            "Where the seconds of an optimizer step go; lower is better, and data should cost next to nothing.",
            "seconds",
        ),
        _curves(
            scalars,
            rates,
            "Learning rate",
            "The optimizer's learning rate; a curve above that still rises as it nears the end asks for more steps.",
            "learning rate",
        ),
    ]
    return [each for each in drawn if each is not None]


def _curves(scalars: dict[str, Curve], tags: dict[str, str], title: str, caption: str, unit: str) -> Chart | None:
    curves = {label: scalars[tag] for tag, label in tags.items() if tag in scalars}

    def draw(axes: Axes) -> None:
        for i, (label, curve) in enumerate(curves.items()):
            _curve(axes, curve, look(i), label)
        count_steps(axes)

    caption += _note(curves.values())
    return chart(draw, title, caption, xlabel="optimizer step", ylabel=unit) if curves else None


def _curve(axes: Axes, curve: Curve, style: dict[str, Any], label: str) -> None:
    """A line; one of few points, as validation gives, shows them, and lies above the others."""
    few = len(curve.steps) <= 30
    thin = curve.thinned(POINTS)
    style = style if few else style | {"marker": ""}
    axes.plot(thin.steps, thin.values, label=label, zorder=3 if few else 2, **style)


def _note(curves: Iterable[Curve]) -> str:
    """Tell of averaging, where there is any."""
    averaged = any(len(curve.steps) > POINTS for curve in curves)
    return f" Neighbouring values are averaged to {POINTS} points." if averaged else ""


def _acceptance_curves(scalars: dict[str, Curve], stage: str, place: str) -> Chart | None:
    prefix = f"{stage}/accept_rate@"
    curves = {int(tag.removeprefix(prefix)): curve for tag, curve in scalars.items() if tag.startswith(prefix)}
    if not curves:
        return None

    def draw(axes: Axes) -> None:
        for i, k in enumerate(sorted(curves)):
            _curve(axes, curves[k], {"marker": "o", "color": position_color(i, len(curves))}, str(k))
        count_steps(axes)

    title = f"Acceptance by position, {place}"
    caption = "The share of tokens the target would accept at each position of the block, 1 to K; higher is better."
    caption += _note(curves.values())
    return chart(draw, title, caption, xlabel="optimizer step", ylabel="acceptance")
