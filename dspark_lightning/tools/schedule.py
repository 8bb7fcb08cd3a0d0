"""`dspark schedule`: what confidence-scheduled verification gains under load."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from dspark_lightning.decoding.records import AnswerRecord, block_size, read_records, records_digest
from dspark_lightning.decoding.schedule_figure import schedule_figure
from dspark_lightning.decoding.simulate import ServingResult, simulate_serving
from dspark_lightning.decoding.sps import SpsCurve, measure_sps, read_sps, write_sps
from dspark_lightning.decoding.traces import build_traces
from dspark_lightning.evaluation.calibration import read_temperatures
from dspark_lightning.loading import load_target
from dspark_lightning.replace import check_folder, write_finished, write_text
from dspark_lightning.tools.command import command_line

_WITH_VALUE = ("fixed", "threshold")  # kinds of policies of which there are several


def schedule(
    records: Path,
    sps: Path | None = None,
    profile: str | None = None,
    gguf_file: str | None = None,
    temperatures: Path | None = None,
    output: Path | None = None,
    max_concurrency: int = 256,
    seed: int = 0,
) -> None:
    """Simulate serving 1 to 256 users and compare ways to choose how many drafted tokens are verified.

    What drafting itself costs is left out, so "no draft" is better in comparison than it looks here.

    Args:
        records: records.jsonl of `dspark evaluate`, decoded with whole blocks.
        sps: JSON file with the target's steps per second; or give profile.
        profile: target to measure them of on this machine, behind contexts as long as the records' on average, into
            sps.json: model folder, hub id or "embedded"; in bf16 on a GPU, else in fp32.
        gguf_file: name of a GGUF file inside that folder.
        temperatures: JSON file of `dspark calibrate`; without it confidences are taken as they are.
        output: folder to write to; the folder of the records if not given.
        max_concurrency: users at most.
        seed: of the answers drawn for each user.
    """
    if (sps is None) == (profile is None):
        given = "none" if sps is None else "both"
        raise ValueError(f"give either --sps FILE or --profile TARGET for the steps per second, got {given}")
    if sps is not None and gguf_file is not None:
        raise ValueError(f"gguf_file {gguf_file!r} belongs to --profile, but --sps is given")
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed}")
    answers, folder = read_records(records), output or records.parent
    check_folder(folder)
    scales = None if temperatures is None else read_temperatures(temperatures)
    traces = build_traces(answers, scales)  # what is wrong with them shows before anything is measured
    if sps is not None:
        curve = read_sps(sps)
    else:
        curve = _measure(str(profile), gguf_file, answers, max_concurrency)
        write_sps(folder / "sps.json", curve)
        print(f"Steps per second of {profile}: {folder / 'sps.json'}")
    results = simulate_serving(traces, curve, max_concurrency, seed)
    _write(folder, records, curve, scales, results)
    _print_table(results)
    if max_concurrency > curve.max_batch_tokens:
        print(f"Up to {curve.max_batch_tokens} users only, the curve's max_batch_tokens")
    print(f"Results: {folder / 'schedule.json'}, drawn in {folder / 'schedule.png'}")
    if traces.confidence is None:
        print("No thresholds and no schedulers: there are no confidences in the records")
    elif scales is None:
        print("The confidences are not calibrated")
        print(f"Next: dspark calibrate --records {records}, then this again with --temperatures")
    elif folder.name == "evaluation":
        print(f"Next: dspark report {folder.parent}")


def _measure(target: str, gguf_file: str | None, answers: Sequence[AnswerRecord], users: int) -> SpsCurve:
    """The curve of a target behind contexts as long as those of the answers, on average."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    context = round(sum(each.prompt_tokens + each.new_tokens / 2 for each in answers) / len(answers))
    model = load_target(target, gguf_file, dtype)
    cast(nn.Module, model).to(device)
    return measure_sps(model, users, block_size(answers), context)


def _write(
    folder: Path, records: Path, curve: SpsCurve, temperatures: list[float] | None, results: Sequence[ServingResult]
) -> None:
    content = {
        "command": command_line(),
        "records_digest": records_digest(records),
        "curve": asdict(curve),
        "records": str(records),
        "temperatures": temperatures,
        "max_batch_tokens": curve.max_batch_tokens,
        "results": [asdict(result) for result in results],
    }
    write_text(folder / "schedule.json", json.dumps(content, indent=2) + "\n")
    figure = schedule_figure(results)
    write_finished(folder / "schedule.png", lambda path: figure.savefig(path, format="png", dpi=150))


def _print_table(results: Sequence[ServingResult]) -> None:
    """One line for each number of users; of fixed lengths and thresholds the best, with its value."""
    table = Table("users", title="Tokens per second, all users (* = best)")
    kinds = list(dict.fromkeys(_kind(result.policy) for result in results))
    for kind in kinds:
        table.add_column(f"best {kind}" if kind in _WITH_VALUE else kind, justify="right")
    for users in dict.fromkeys(result.concurrency for result in results):
        here = [result for result in results if result.concurrency == users]
        top = max(here, key=_speed)
        cells = [max((r for r in here if _kind(r.policy) == kind), key=_speed) for kind in kinds]
        table.add_row(str(users), *(_cell(result, result is top) for result in cells))
    Console().print(table)


def _cell(result: ServingResult, best: bool) -> str:
    kind = _kind(result.policy)
    value = f" ({result.policy.removeprefix(kind).strip()})" if kind in _WITH_VALUE else ""
    return f"{'*' if best else ''}{result.tokens_per_second:,.0f}{value}"


def _kind(policy: str) -> str:
    first = policy.split()[0]
    return first if first in _WITH_VALUE else policy


def _speed(result: ServingResult) -> float:
    return result.tokens_per_second
