"""Draw training tau and acceptance by position of several runs from their TensorBoard logs.

    python scripts/plot_runs.py curves.png "with Markov head=runs/a" "without=runs/b"

Prints each run's tau averaged over its last 60 optimizer steps.
"""

import sys
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LAST_STEPS = 60


def read_curves(folder: str) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of every training scalar of a run."""
    log = EventAccumulator(folder, size_guidance={"scalars": 0})
    log.Reload()
    tags = [tag for tag in log.Tags()["scalars"] if tag.startswith("train/")]
    # Lightning logs the n-th optimizer step as step n - 1.
    return {tag: ([e.step + 1 for e in log.Scalars(tag)], [e.value for e in log.Scalars(tag)]) for tag in tags}


def last_mean(curve: tuple[list[int], list[float]]) -> float:
    """Mean over the windows that lie in the last `LAST_STEPS` steps."""
    steps, values = curve
    recent = [value for step, value in zip(steps, values, strict=True) if step > steps[-1] - LAST_STEPS]
    return sum(recent) / len(recent)


def draw(runs: dict[str, dict[str, tuple[list[int], list[float]]]]) -> Figure:
    """One chart of tau for all runs, and one of accept_rate@k for each."""
    figure = Figure(figsize=(5 * (1 + len(runs)), 4), layout="constrained")
    tau, *rates = figure.subplots(1, 1 + len(runs))
    for name, curves in runs.items():
        tau.plot(*curves["train/tau"], label=name)
    tau.set(title="tau", xlabel="optimizer step", ylabel="tokens per target pass")
    tau.legend()
    for axes, (name, curves) in zip(rates, runs.items(), strict=True):
        tags = sorted(tag for tag in curves if "accept_rate@" in tag)
        for i, tag in enumerate(tags):
            axes.plot(*curves[tag], color=colormaps["viridis"](i / len(tags)), label=tag.removeprefix("train/"))
        axes.set(title=f"acceptance by position, {name}", xlabel="optimizer step", ylim=(0, None))
        axes.legend(fontsize="small")
    for axes in (tau, *rates):
        axes.grid(alpha=0.3)
    return figure


def main() -> None:
    """Read the arguments, draw, print the averages."""
    output, *named = sys.argv[1:]
    runs = {name: read_curves(folder) for name, _, folder in (argument.partition("=") for argument in named)}
    draw(runs).savefig(Path(output), dpi=110)
    for name, curves in runs.items():
        print(f"{name}: tau over the last {LAST_STEPS} steps {last_mean(curves['train/tau']):.3f}")


if __name__ == "__main__":
    main()
