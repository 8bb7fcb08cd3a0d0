"""The sections of the page: which charts and tables each shows, and what it says in their place."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark_lightning.report.confidence_charts import confidence_charts
from dspark_lightning.report.data import CALIBRATION, EVALUATION, SCHEDULE, Run
from dspark_lightning.report.decoding_charts import acceptance_charts, threshold_charts
from dspark_lightning.report.drawing import Chart
from dspark_lightning.report.headline import DASH, TIMES, Fact, number, value_range
from dspark_lightning.report.records import Calibration, Evaluation, Summary
from dspark_lightning.report.schedule_charts import schedule_charts
from dspark_lightning.report.training_charts import training_charts
from dspark_lightning.serving.engines import serve_command


@dataclass(frozen=True)
class Missing:
    """What a section lacks, the command that gives it, and what the command then does."""

    what: str
    command: str
    then: str = "writes it"


@dataclass(frozen=True)
class Table:
    """Rows under column heads; the first cell of a row is its head."""

    heads: list[str]
    rows: list[list[str]]
    title: str = ""  # a titled table is folded under its title


@dataclass(frozen=True)
class Section:
    """A part of the page; everything but its name may be absent."""

    name: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    missing: Sequence[Missing] = ()
    folded: str | None = None
    commands: Sequence[Fact] = ()

    @property
    def anchor(self) -> str:
        """The section's id in the page."""
        return self.name.lower().replace(" ", "-")


def sections(run: Run) -> list[Section]:
    """All sections, in the order of the page."""
    return [
        _training(run),
        _acceptance(run),
        _data_sets(run),
        _confidence(run),
        _thresholds(run),
        _schedule(run),
        _configuration(run),
        _commands(run),
    ]


def _lacking(run: Run, file: str) -> Missing:
    """What to say where a file is not there, or is of other records than the evaluation."""
    draft, records = run.folder / "dspark-draft", shlex.quote(str(run.folder / "evaluation" / "records.jsonl"))
    target = shlex.quote(str(run.settings.get("target", "TARGET")))
    commands = {
        EVALUATION: f"dspark evaluate --draft {shlex.quote(str(draft))} --target {target} --data FILE",
        CALIBRATION: f"dspark calibrate --records {records}",
        SCHEDULE: f"dspark schedule --records {records} --profile {target}",
    }
    if file in run.stale:
        return Missing(f"{file} was made from other records than {EVALUATION}", commands[file], "makes it anew")
    return Missing(f"There is no {file} yet", commands[file])


def _training(run: Run) -> Section:
    none = Missing("There are no TensorBoard events in this folder", "dspark fit", "writes them")
    return Section("Training", training_charts(run.scalars), missing=[] if run.scalars else [none])


def _acceptance(run: Run) -> Section:
    name = "Acceptance"
    if run.evaluation is None:
        return Section(name, missing=[_lacking(run, EVALUATION)])
    return Section(name, acceptance_charts(run.evaluation), [_positions_table(run.evaluation)])


def _positions_table(evaluation: Evaluation) -> Table:
    heads = ["", "", *(f"{k}" for k in range(1, evaluation.block_size + 1))]
    rows = []
    for name, summary in evaluation.summaries():
        rows += [
            [name, "conditional", *map(number, summary.conditional_acceptance)],
            [name, "survival", *map(number, summary.survival)],
            [name, "rounds counted", *(f"{count:,}" for count in summary.conditional_counts)],
        ]
    return Table(heads, rows, "The numbers by position")


def _data_sets(run: Run) -> Section:
    name = "Data sets"
    if run.evaluation is None:
        return Section(name, missing=[_lacking(run, EVALUATION)])
    heads = [
        "Data set",
        "tau",
        "95 % interval",
        "acceptance at\N{NO-BREAK SPACE}1",
        "speed\N{NON-BREAKING HYPHEN}up",
        "spread",
        "tokens/s",
        "without draft",
        "conversations",
        "answers",
        "rounds",
        "new tokens",
        "drafted",
        "verified",
        "accepted",
    ]
    return Section(name, tables=[Table(heads, [_row(n, s) for n, s in run.evaluation.summaries()])])


def _row(name: str, summary: Summary) -> list[str]:
    speedup, first = summary.speedup, (*summary.conditional_acceptance, None)[0]
    speed = [DASH] * 4
    if speedup is not None:
        speed = [
            f"{speedup.ratio:.2f}{TIMES}",
            value_range((speedup.low, speedup.high)),
            f"{speedup.tokens_per_second:,.1f}",
            f"{speedup.plain_tokens_per_second:,.1f}",
        ]
    counts = (
        summary.conversations,
        summary.answers,
        summary.rounds,
        summary.new_tokens,
        summary.tokens_drafted,
        summary.tokens_verified,
        summary.tokens_accepted,
    )
    counted = [f"{count:,}" for count in counts]
    return [name, number(summary.tau), value_range(summary.tau_interval), number(first), *speed, *counted]


def _confidence(run: Run) -> Section:
    name, missing, evaluation, calibration = "Confidence", [], run.evaluation, run.calibration
    confidence = None if evaluation is None else evaluation.overall.confidence
    if evaluation is None:
        missing.append(_lacking(run, EVALUATION))
    elif confidence is None:
        missing.append(_unmeasured("confidence"))
    if calibration is None:
        missing.append(_lacking(run, CALIBRATION))
    tables = [] if calibration is None else [_temperatures_table(calibration)]
    return Section(name, confidence_charts(confidence, calibration), tables, missing)


def _temperatures_table(calibration: Calibration) -> Table:
    heads = ["Position", *(str(k + 1) for k in range(len(calibration.temperatures)))]
    rows = [
        ["temperature", *(f"{value:.2f}" for value in calibration.temperatures)],
        ["ECE before", *(number(value, 3) for value in calibration.ece_before_by_position)],
        ["ECE after", *(number(value, 3) for value in calibration.ece_after_by_position)],
    ]
    title = f"The temperatures, from {calibration.num_samples:,} samples of {calibration.dataset}"
    return Table(heads, rows, title)


def _thresholds(run: Run) -> Section:
    name = "Threshold"
    if run.evaluation is None:
        return Section(name, missing=[_lacking(run, EVALUATION)])
    thresholds = run.evaluation.overall.thresholds
    if not thresholds:
        return Section(name, missing=[_unmeasured("thresholds")])
    heads = ["Threshold", "tau", "verified per round", "accepted share"]
    rows = [
        [f"{t.threshold:g}", f"{t.tau:.2f}", f"{t.verified_per_round:.2f}", number(t.accepted_share)]
        for t in thresholds
    ]
    return Section(name, threshold_charts(thresholds), [Table(heads, rows, "The numbers by threshold")])


def _unmeasured(key: str) -> Missing:
    return Missing(f"{EVALUATION} has no {key}", "dspark evaluate", "measures them for a draft with a confidence head")


def _schedule(run: Run) -> Section:
    if run.schedule is None or not run.schedule.results:
        return Section("Schedule", missing=[_lacking(run, SCHEDULE)])
    heads = ["Policy", "concurrent", "tokens/s", "tokens/s per user", "verified per request", "accepted per request"]
    rows = [
        [
            result.policy,
            f"{result.concurrency:,}",
            f"{result.tokens_per_second:,.1f}",
            f"{result.tokens_per_second_per_user:,.1f}",
            f"{result.verified_per_request:.2f}",
            f"{result.accepted_per_request:.2f}",
        ]
        for result in run.schedule.results
    ]
    return Section("Schedule", schedule_charts(run.schedule), [Table(heads, rows, "The numbers by policy and load")])


def _configuration(run: Run) -> Section:
    missing = [] if run.config is not None else [Missing("There is no config.yaml in this folder", "dspark fit")]
    return Section("Configuration", missing=missing, folded=run.config)


def _commands(run: Run) -> Section:
    """The commands as the files record them, and those that follow from what lies in the folder."""
    folder, commands = run.folder, {}
    if run.config is not None:
        commands["Train"] = f"dspark fit --config {shlex.quote(str(folder / 'config.yaml'))}"
    records = {"Evaluate": run.evaluation, "Calibrate": run.calibration, "Schedule": run.schedule}
    commands |= {name: record.command for name, record in records.items() if record is not None}
    checkpoint = folder / "checkpoints" / "last.ckpt"
    if checkpoint.exists():
        commands["Export"] = f"dspark export --ckpt_path {shlex.quote(str(checkpoint))} --output my-dspark"
    draft, target, block_size = folder / "dspark-draft", run.settings.get("target"), run.settings.get("block_size")
    if run.evaluation is not None:
        draft, target = Path(run.evaluation.draft), run.evaluation.target
        block_size = run.evaluation.block_size
    if isinstance(target, str) and isinstance(block_size, int) and (run.evaluation is not None or draft.exists()):
        commands["Serve"] = serve_command(draft, target, block_size)
    none = Missing("No file in this folder says how it was made", "dspark fit", "saves its config.yaml")
    facts = [Fact(name, command) for name, command in commands.items()]
    return Section("Commands", missing=[] if facts else [none], commands=facts)
