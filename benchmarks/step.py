"""Time and memory of the training step and of its loss, against the dense baseline and the bare matrix products.

python -m benchmarks.step --sizes small large --json step.json
"""

import argparse
from functools import partial
from statistics import median
from typing import Any, get_args

import torch

from benchmarks import report
from benchmarks.measure import Run, alternate, peak_memory, ratio
from benchmarks.passes import Bench, Part, Setup, build_pass, check_equal
from benchmarks.rows import load_rows
from benchmarks.sizes import SIZES
from dspark_lightning.machine import describe_machine

HEADER = (
    "size",
    "part",
    "slots",
    "teachers",
    "ours ms",
    "dense ms",
    "time/dense",
    "floor ms",
    "time/floor",
    "ours MiB",
    "dense MiB",
    "memory/dense",
)


def main() -> None:
    """Measure the sizes asked for, print the table and write the numbers."""
    args = _arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    machine = {**describe_machine(device), "dtype": str(dtype).removeprefix("torch.")}
    results: list[dict[str, Any]] = []
    for name in args.sizes:
        size = SIZES[name]
        rows = load_rows(args.data, args.target, args.gguf_file, size) if args.data else None
        results += measure_size(name, Setup(size, args.device, dtype, rows), args.repeats)
    report.print_table(machine, HEADER, [_row(result) for result in results])
    _print_flat_memory(results)
    if args.json:
        report.write_json(args.json, machine, results)


def measure_size(name: str, setup: Setup, repeats: int) -> list[dict[str, Any]]:
    """Check that both passes agree, then measure them.

    Returns:
        for each part its seconds per batch, by run, and its peak bytes, each by name.

    Raises:
        ValueError: they do not agree.
    """
    warm_up = Setup(SIZES["tiny"], setup.device, setup.dtype)
    results = []
    for part in get_args(Part):
        bench = Bench(setup)
        passes = bench.passes(part)
        check_equal(passes, setup.dtype)
        runs: dict[str, Run] = {**passes}
        if part == "loss":
            runs["floor"] = bench.floor()
        seconds = alternate(runs, repeats)
        counts, states = bench.counts(), bench.states_bytes()
        del bench, passes, runs
        peaks = {
            one: peak_memory(
                partial(build_pass, setup, part, one),
                partial(build_pass, warm_up, part, one),
                torch.device(setup.device),
            )
            for one in ("ours", "dense")
        }
        results.append(
            {
                "size": name,
                "part": part,
                "rows": "real" if setup.rows else "random",
                "slots": sum(n for n, _ in counts) / len(counts),
                "teacher_positions": sum(u for _, u in counts) / len(counts),
                "seconds": {one: [s / len(counts) for s in times] for one, times in seconds.items()},
                "peak_bytes": peaks,
                "states_bytes": states,
            }
        )
    return results


def _row(result: dict[str, Any]) -> list[str]:
    seconds, peaks = result["seconds"], result["peak_bytes"]
    floor = seconds.get("floor")
    return [
        result["size"],
        result["part"],
        f"{result['slots']:.0f}",
        f"{result['teacher_positions']:.0f}",
        report.milliseconds(median(seconds["ours"])),
        report.milliseconds(median(seconds["dense"])),
        report.spread(ratio(seconds["ours"], seconds["dense"])),
        report.milliseconds(median(floor)) if floor else "",
        report.spread(ratio(seconds["ours"], floor)) if floor else "",
        report.mebibytes(peaks["ours"]),
        report.mebibytes(peaks["dense"]),
        report.size_ratio(peaks["ours"], peaks["dense"]),
    ]


def _print_flat_memory(results: list[dict[str, Any]]) -> None:
    """Compare the loss's memory at few and at many anchors, where both were measured."""
    loss = {result["size"]: result for result in results if result["part"] == "loss"}
    few, many = (loss.get(f"anchors{anchors}") for anchors in (32, 512))
    if few is None or many is None or few["peak_bytes"]["ours"] is None:
        return
    for what, without in (("", 0), (" without hidden states, latents and their gradients", 1)):
        few_bytes, many_bytes = (one["peak_bytes"]["ours"] - without * one["states_bytes"] for one in (few, many))
        amounts = f"{report.mebibytes(few_bytes)} MiB with 32 anchors, {report.mebibytes(many_bytes)} MiB with 512"
        print(f"memory of our loss{what}: {amounts}, {many_bytes / few_bytes - 1:+.1%}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "large"])
    parser.add_argument("--repeats", type=int, default=7, help="runs of each, in turn")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on CUDA, else float32")
    parser.add_argument("--data", help="chat rows that give ids and loss masks, instead of fully supervised ones")
    parser.add_argument("--target", default="embedded", help="whose tokenizer encodes them")
    parser.add_argument("--gguf-file", help="GGUF file in the target's folder")
    parser.add_argument("--json", help="file to write the numbers to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
