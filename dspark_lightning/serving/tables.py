"""Findings as a table for the terminal."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark_lightning.serving.findings import Finding, Outcome

_STYLES: dict[Outcome, str] = {"ok": "green", "warning": "yellow", "error": "bold red", "skipped": "dim"}


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a row for each check, and how many came out how."""
    table = Table("check", "outcome", "found, and what is right", title_justify="left")
    for each in findings:
        table.add_row(each.check, Text(each.outcome, style=_STYLES[each.outcome]), Text(each.line))
    console = Console()
    console = console if console.is_terminal else Console(width=160)  # piped output has no width of its own
    console.print(table)
    counts = Counter(each.outcome for each in findings)
    console.print(", ".join(f"{counts[outcome]} {outcome}" for outcome in _STYLES if counts[outcome]))
