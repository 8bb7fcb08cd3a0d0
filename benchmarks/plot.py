"""Bars of time and memory relative to the dense baseline, from the numbers that `step.py` wrote.

python -m benchmarks.plot step.json real.json --figure step.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.measure import Spread, ratio

BAR_WIDTH = 0.38


def main() -> None:
    """Draw one panel for the loss and one for the whole step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("numbers", nargs="+", help="JSON files of benchmarks.step")
    parser.add_argument("--figure", required=True, help="image file to write")
    args = parser.parse_args()
    results = [one for path in args.numbers for one in json.loads(Path(path).read_text(encoding="utf-8"))["results"]]
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, part, title in zip(
        figure.subplots(1, 2, sharey=True), ("loss", "step"), ("the loss alone", "the whole step"), strict=True
    ):
        _draw(axes, [result for result in results if result["part"] == part])
        axes.set_title(title)
    figure.savefig(args.figure, dpi=150)


def _draw(axes: Axes, results: list[dict[str, Any]]) -> None:
    places = list(range(len(results)))
    times = [ratio(result["seconds"]["ours"], result["seconds"]["dense"]) for result in results]
    axes.bar(
        [place - BAR_WIDTH / 2 for place in places],
        [time.median for time in times],
        BAR_WIDTH,
        yerr=_whiskers(times),
        label="time",
    )
    peaks = [result["peak_bytes"] for result in results]
    if all(None not in peak.values() for peak in peaks):
        shares = [peak["ours"] / peak["dense"] for peak in peaks]
        axes.bar([place + BAR_WIDTH / 2 for place in places], shares, BAR_WIDTH, label="peak memory")
    for place, result in zip(places, results, strict=True):
        if "floor" in result["seconds"]:
            floor = ratio(result["seconds"]["floor"], result["seconds"]["dense"]).median
            label = "" if place else "matrix products alone"
            axes.hlines(floor, place - BAR_WIDTH, place, colors="black", linestyles="dashed", label=label)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xticks(places, [f"{result['size']}\n{result['rows']} rows" for result in results])
    axes.set_ylabel("relative to dense")
    axes.legend()


def _whiskers(spreads: list[Spread]) -> list[list[float]]:
    """How far the least and the largest run lie from the median."""
    return [[one.median - one.low for one in spreads], [one.high - one.median for one in spreads]]


if __name__ == "__main__":
    main()
