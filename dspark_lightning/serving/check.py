"""All checks of a draft's folder, in order."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dspark_lightning.serving.decode_check import check_decode
from dspark_lightning.serving.engines import ENGINES, Engine
from dspark_lightning.serving.findings import Finding, Verdict, error, skipped
from dspark_lightning.serving.folder import DraftFolder, read_folder
from dspark_lightning.serving.record import ExportRecord
from dspark_lightning.serving.static_checks import HEADER_CHECKS, check_name, check_values, engine_check
from dspark_lightning.serving.target_checks import check_copied, check_family, check_mask_in_text, check_target_rope
from dspark_lightning.target import HFDSparkTargetModel

Checks = dict[str, Callable[[], Verdict]]
_LOADED = ("tensors", "mask token", "target")
"""Checks without which no draft can decode."""


class Target(NamedTuple):
    """What a draft is compared with."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | str  # or why there is none


def check_folder(
    path: Path, target: Target | str, record: ExportRecord | None, engine: Engine | Literal["all"] = "all"
) -> list[Finding]:
    """Check everything that would go wrong when a draft is served.

    Args:
        path: folder of the draft.
        target: it is for, or why there is none to compare it with.
        record: of its export; None where the folder has none.
        engine: that will serve, for which what it cannot do is an error; of "all" it is a warning.

    Returns:
        one finding for each check.
    """
    findings = [Finding("folder name", *check_name(path))]
    try:
        folder = read_folder(path)
    except ValueError as refusal:
        unread = skipped("the files cannot be used")
        others = [Finding(name, *unread) for name in (*list(HEADER_CHECKS)[1:], "values", "target", "decode")]
        return [*findings, Finding("files", *error(str(refusal))), *others]
    findings += run_checks(_own_checks(folder, engine))
    if isinstance(target, str):
        return [*findings, *(Finding(name, *skipped(target)) for name in ("target", "decode"))]
    findings.append(Finding("target", *_run(partial(check_family, folder, target.model))))
    broken = [each.check for each in findings if each.outcome == "error" and each.check in _LOADED]
    if broken:
        return [
            *findings,
            Finding("decode", *skipped(f"the draft cannot be loaded beside this target: see {broken[0]}")),
        ]
    return [*findings, *run_checks(_target_checks(folder, target, record))]


def run_checks(checks: Checks) -> Iterator[Finding]:
    """Run checks one after the other."""
    for name, check in checks.items():
        yield Finding(name, *_run(check))


def _own_checks(folder: DraftFolder, engine: Engine | Literal["all"]) -> Checks:
    checks: Checks = {name: partial(check, folder) for name, check in HEADER_CHECKS.items()}
    checks["values"] = partial(check_values, folder)
    for name, label in ENGINES.items():
        if engine in (name, "all"):
            checks[label] = partial(engine_check(name, wanted=engine == name), folder)
    return checks


def _target_checks(folder: DraftFolder, target: Target, record: ExportRecord | None) -> Checks:
    model, tokenizer = target
    captured = HFDSparkTargetModel(model, [0])  # names its embedding and head in every family
    reason = f"the tokenizer cannot be read: {tokenizer}"
    return {
        "target RoPE": partial(check_target_rope, folder, model),
        "embedding": partial(check_copied, folder, captured, "embed_tokens"),
        "head": partial(check_copied, folder, captured, "lm_head"),
        "mask token in text": partial(skipped, reason)
        if isinstance(tokenizer, str)
        else partial(check_mask_in_text, folder, model, tokenizer),
        "decode": partial(check_decode, model, folder.path, record),
    }


def _run(check: Callable[[], Verdict]) -> Verdict:
    try:
        return check()
    except ValueError as refusal:
        return error(str(refusal))
