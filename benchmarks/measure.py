"""Times and peak memory of functions that are to be compared."""

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

Run = Callable[[], object]
"""One forward and backward pass."""

Build = Callable[[], Run]
"""Allocates the inputs of a pass and returns it. Measured in another process, so it must pickle."""

# Without these glibc keeps freed memory for later, and a peak would depend on what ran before. Read at process start.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Spread(NamedTuple):
    """Median, least and largest of several values."""

    median: float
    low: float
    high: float


def alternate(runs: Mapping[str, Run], repeats: int) -> dict[str, list[float]]:
    """Time the runs in turn, after one warm-up each, so that drift of the machine hits all of them alike.

    Returns:
        seconds by name, one for each repeat.
    """
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(_time(run))
    return seconds


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> Spread:
    """Compare two lists of `alternate` run by run."""
    ratios = [a / b for a, b in zip(seconds, reference, strict=True)]
    return Spread(statistics.median(ratios), min(ratios), max(ratios))


def _time(run: Run) -> float:
    _synchronize()
    start = time.perf_counter()
    run()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory(build: Build, warm_up: Build, device: torch.device) -> int | None:
    """Measure the bytes that a pass needs at its peak, beyond what is held before it.

    On CUDA this asks torch's allocator. On the CPU it reads the resident set of a fresh process.

    Args:
        build: of the pass.
        warm_up: of a small one that runs first, so that what libraries allocate once does not count.
        device: where the pass runs.

    Returns:
        bytes, or None on the CPU of a system other than Linux: not measured there.
    """
    if device.type == "cuda":
        return _peak_on_cuda(build)
    if sys.platform != "linux":
        return None
    with _environment(RETURN_FREED_MEMORY):
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as child:
            return child.submit(_peak_in_this_process, build, warm_up, torch.get_num_threads()).result()


def _peak_on_cuda(build: Build) -> int:
    run = build()
    run()  # compiles its kernels
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held


def _peak_in_this_process(build: Build, warm_up: Build, threads: int) -> int:
    torch.set_num_threads(threads)
    warm_up()()
    run = build()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again at the present size
    held = _status("VmRSS")
    run()
    return _status("VmHWM") - held


def _status(name: str) -> int:
    """Bytes behind a name in /proc/self/status, which counts in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
