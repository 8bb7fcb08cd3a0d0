"""Whether the confidence head can be trusted, before and after calibration."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from dspark_lightning.report.drawing import INK, SERIES, Chart, chart, defined, picture, positions
from dspark_lightning.report.headline import number
from dspark_lightning.report.records import Bin, Calibration, Confidence


def confidence_charts(confidence: Confidence | None, calibration: Calibration | None) -> list[Chart]:
    """Reliability of the head as evaluated, and its calibration error and survival before and after calibration."""
    charts = []
    if confidence is not None:
        charts.append(_pooled_reliability(confidence))
    if calibration is not None:
        charts += [_calibration_error(calibration), _calibrated_survival(calibration)]
    elif confidence is not None:
        charts.append(_reliability_by_position(confidence))
    return charts


def _pooled_reliability(confidence: Confidence) -> Chart:
    pooled = confidence.pooled
    measures = {"Expected calibration error (ECE)": pooled.ece, "AUC": pooled.auc, "Brier score": pooled.brier}
    numbers = ", ".join(f"{name} {value:.3f}" for name, value in measures.items() if value is not None)
    title = "Confidence against acceptance"
    caption = (
        "Predicted and observed acceptance over all positions; larger dots hold more tokens, nearer the diagonal is "
        f"better. {numbers}."
    )

    def draw(axes: Axes) -> None:
        _diagonal(axes)
        _reliability(axes, pooled.bins, SERIES[0], filled=True)

    settings = {"xlabel": "predicted acceptance", "ylabel": "observed acceptance"}
    return chart(draw, title, caption, **settings)


def _calibration_error(calibration: Calibration) -> Chart:
    pairs = {"before": calibration.ece_before_by_position, "after": calibration.ece_after_by_position}

    def draw(axes: Axes) -> None:
        for i, (label, errors) in enumerate(pairs.items()):
            centres = [k + 1 + 0.4 * (i - 0.5) for k in range(len(errors))]
            axes.bar(centres, defined(errors), width=0.36, color=SERIES[1 - i], label=label)
        positions(axes, len(calibration.temperatures))
        axes.grid(axis="x", visible=False)

    title = "Calibration error by position"
    before, after = number(calibration.ece_before, 3), number(calibration.ece_after, 3)
    caption = (
        "The expected calibration error (ECE) of predicted survival before and after the temperatures are applied; "
        f"lower is better. Over all positions {before} before, {after} after."
    )
    return chart(draw, title, caption, xlabel="position k in the block", ylabel="ECE")


def _calibrated_survival(calibration: Calibration) -> Chart:
    caption = "Hollow before calibration, filled after; nearer the diagonal is better."
    pairs = zip(calibration.survival_bins_before, calibration.survival_bins_after, strict=True)
    return _panels("Predicted against observed survival, by position", caption, list(pairs))


def _reliability_by_position(confidence: Confidence) -> Chart:
    caption = "The same for each position of the block; nearer the diagonal is better."
    bins: list[tuple[list[Bin], list[Bin]]] = [([], reliability.bins) for reliability in confidence.by_position]
    return _panels("Predicted against observed acceptance, by position", caption, bins)


def _panels(title: str, caption: str, pairs: Sequence[tuple[list[Bin], list[Bin]]]) -> Chart:
    """A small picture for each position, of what was before (may be empty) and what is."""
    ticks = {"xticks": (0, 0.5, 1), "yticks": (0, 0.5, 1)}
    labels = {"xlabel": "predicted", "ylabel": "observed"}
    pictures = []
    for k, (before, after) in enumerate(pairs, start=1):

        def draw(axes: Axes, before: list[Bin] = before, after: list[Bin] = after) -> None:
            _diagonal(axes)
            _reliability(axes, before, SERIES[1], filled=False)
            _reliability(axes, after, SERIES[0], filled=True)

        name = f"position {k}"
        pictures.append(picture(draw, f"{title}: {name}", 165, 180, title=name, **labels, **ticks))
    return Chart(title, caption, pictures)


def _diagonal(axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle="--", alpha=0.6)
    axes.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04))


def _reliability(axes: Axes, bins: Sequence[Bin], color: str, filled: bool) -> None:
    """Dots whose area is the share of predictions; lines between them would make much of bins that are almost empty."""
    most = max((b.count for b in bins), default=1)
    x, y = [b.confidence for b in bins], [b.acceptance for b in bins]
    sizes = [4 + 44 * b.count / most for b in bins]
    axes.scatter(x, y, sizes, facecolors=color if filled else "none", edgecolors=color, linewidths=1.2, zorder=3)
