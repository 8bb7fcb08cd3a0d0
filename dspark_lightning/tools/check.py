"""`dspark check`: what would go wrong at serving, before it is served."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any, Literal, get_args

from dspark_lightning.datamodules.tokenizer import load_tokenizer
from dspark_lightning.layouts.files import CONFIG, WEIGHTS
from dspark_lightning.layouts.saved import read_draft_config
from dspark_lightning.loading import target_source
from dspark_lightning.replace import write_text
from dspark_lightning.serving.card import card_target
from dspark_lightning.serving.check import Target, check_folder
from dspark_lightning.serving.engines import serve_command
from dspark_lightning.serving.findings import Finding
from dspark_lightning.serving.record import ExportRecord, read_record
from dspark_lightning.serving.tables import print_findings
from dspark_lightning.tools.target import Dtype, launch_processes, load_placed_target


def check(
    draft: Path,
    target: str | None = None,
    gguf_file: str | None = None,
    engine: Literal["vllm", "sglang", "llamacpp", "all"] = "all",
    json: str | None = None,
    accelerator: str = "auto",
    dtype: Dtype | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Check the folder of a draft: what would go wrong at serving, before it is served.

    `dspark check DIR` is enough. Every check is ok, a warning, an error, or skipped, which says what it lacks; the exit
    code is 1 when there is an error. The folder is loaded anew and decodes the prompts that its export kept, which
    must give the tokens per target pass that they gave then.

    Args:
        draft: folder of an exported draft.
        target: model folder, hub id, or "embedded"; default: the one the folder names, where that can be loaded.
        gguf_file: name of a GGUF file in the target's folder.
        engine: that will serve. What it cannot serve is an error; with "all" that is a warning for each engine.
        json: file to write the findings to; "-" prints them in place of the table.
        accelerator: auto, cpu, cuda or another that Lightning knows.
        dtype: of target and draft; default: the one that the export measured in, else float32 on the CPU, bfloat16
            elsewhere.
        device_map: "auto" spreads the target over all devices.
        trust_remote_code: whether code that comes with the target may run.
    """
    if not any((draft / name).is_file() for name in (WEIGHTS, CONFIG)):
        raise ValueError(f"{str(draft)!r} holds no draft: give a folder with {WEIGHTS} and {CONFIG}")
    record, unreadable = _record(draft)
    named = target or (record.target if record and record.target else card_target(draft))
    if record and named == record.target:
        gguf_file = gguf_file or record.gguf_file
    dtype = dtype or _measured_in(record)

    def load() -> Target:
        fabric = launch_processes(accelerator, 1, device_map)
        model = load_placed_target(fabric, str(named), gguf_file, dtype, device_map, None, trust_remote_code)
        try:
            return Target(model, load_tokenizer(target_source(str(named)), gguf_file, trust_remote_code))
        except ValueError as error:
            return Target(model, str(error))

    findings = [*check_folder(draft, _target(named, load, given=target is not None), record, engine), *unreadable]
    passed = all(each.outcome != "error" for each in findings)
    about = {"folder": str(draft), "target": named, "engine": engine, "passed": passed}
    _show(about | {"checks": [asdict(each) for each in findings]}, findings, json)
    if not passed:
        sys.exit(1)
    if named is not None and json != "-":
        print(f"Next: {serve_command(draft, named, read_draft_config(draft)['block_size'])}")


def _record(draft: Path) -> tuple[ExportRecord | None, list[Finding]]:
    """The record of the export, and what is wrong with it."""
    try:
        return read_record(draft), []
    except ValueError as error:
        return None, [Finding("record", "warning", str(error))]


def _measured_in(record: ExportRecord | None) -> Dtype | None:
    """The dtype that the export decoded in, where it did."""
    stored = record.decoded.dtype if record and record.decoded else None
    return next((dtype for dtype in get_args(Dtype) if dtype == stored), None)


def _target(named: str | None, load: Callable[[], Target], given: bool) -> Target | str:
    """The target, or why there is none; one that the user gave must load."""
    if named is None:
        return "the folder names no target: give it with --target"
    try:
        return load()
    except ValueError as error:
        if given:
            raise
        return f"{error}; give another with --target"


def _show(content: dict[str, Any], findings: Sequence[Finding], json: str | None) -> None:
    text = dumps(content, indent=2) + "\n"
    if json == "-":
        print(text, end="")
        return
    print_findings(findings)
    if json is not None:
        write_text(Path(json), text)
        print(f"Written to {json}")
