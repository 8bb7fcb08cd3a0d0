"""Matplotlib charts as SVG that lies inside a page: it scales, and its ink is the page's.

A chart is drawn for a width of about 340 CSS pixels, so that its text can still be read on a phone; the page puts
several in a row where there is room.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

INK = "#010203"
"""Stands for the colour of the page's text."""

SERIES = ("#1a80cc", "#d55e00", "#009e73", "#c46a9d")
"""Told apart by the colour-blind; each has a contrast of at least 3 to the light and to the dark page."""

MARKERS = "osD^vPX"
DASHES = ("-", "--", ":", "-.")

_WIDTH, _HEIGHT, _LEGEND_ROW = 340, 235, 15  # CSS pixels
_POINTS = 72  # per inch: matplotlib counts an SVG in points, the page takes them for pixels

_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.2,
    "legend.labelspacing": 0.25,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a $ in a name is a $
}

Draw = Callable[[Axes], None]


@dataclass(frozen=True)
class Chart:
    """A figure of the page: one picture, or several small ones of the same kind.

    The caption says in one sentence what is seen and which way is better.
    """

    title: str
    caption: str
    pictures: list[Markup]


def chart(draw: Draw, title: str, caption: str, **settings: Any) -> Chart:
    """A chart of one picture. Arguments as for `picture`; title and caption are read out in its place."""
    return Chart(title, caption, [picture(draw, f"{title}. {caption}", **settings)])


def picture(draw: Draw, alt: str, width: int = _WIDTH, height: int = _HEIGHT, **settings: Any) -> Markup:
    """Draw one pair of axes; what has a label gets a legend above.

    Args:
        draw: puts the data into the axes.
        alt: what people hear who cannot see the picture.
        width: in CSS pixels at scale 1.
        height: the same, without the legend.
        **settings: of `Axes.set`.
    """
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": alt}):  # the same page each time; no id twice in a page
        figure = Figure(layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set(**settings)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            columns = max(1, min(len(labels), int(width / (6 * max(map(len, labels)) + 32))))
            figure.legend(handles, labels, loc="outside upper left", ncols=columns)
            height += _LEGEND_ROW * -(-len(labels) // columns)
        figure.set_size_inches(width / _POINTS, height / _POINTS)
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has other fonts
            figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _inline(buffer.getvalue(), alt)


def _inline(svg: str, alt: str) -> Markup:
    """Take what a page has no use for out of matplotlib's file, and the colour and font of the text."""
    view_box = svg.partition('viewBox="')[2].partition('"')[0]
    body = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)  # would be the whole page's
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r" font-family: [^;\"]*;?", "", body)
    body = re.sub(r"\s*\n\s*", " ", body).replace(INK, "currentColor")
    head = f'<svg viewBox="{view_box}" role="img" aria-label="{escape(alt)}">'
    return Markup(f"{head}{body}</svg>")  # matplotlib escapes the text in it


def chart_name(text: str) -> str:
    """A user's name as a legend takes it: cut in its middle, and with nothing in front that matplotlib drops it for."""
    text = text if len(text) <= 26 else f"{text[:12]}\N{HORIZONTAL ELLIPSIS}{text[-13:]}"
    return f" {text}" if text.startswith("_") else text


def look(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the n-th series: they repeat at different paces."""
    return {
        "color": SERIES[index % len(SERIES)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(SERIES) % len(DASHES)],
    }


def position_color(index: int, count: int) -> str:
    """Colour of a position in the block: from blue at the first to vermilion at the last."""
    share = index / max(1, count - 1)
    mixed = [(1 - share) * a + share * b for a, b in zip(to_rgb(SERIES[0]), to_rgb(SERIES[1]), strict=True)]
    return to_hex((mixed[0], mixed[1], mixed[2]))


def count_steps(axes: Axes) -> None:
    """Few round numbers on an axis of optimizer steps."""
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def positions(axes: Axes, count: int) -> None:
    """Whole numbers from 1 on the axis of the positions in a block."""
    axes.set_xlim(0.5, count + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(min(count, 9), integer=True))


def defined(values: Sequence[float | None]) -> list[float]:
    """NaN for None: matplotlib leaves a gap there."""
    return [float("nan") if value is None else value for value in values]
