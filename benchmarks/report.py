"""Results as a table and as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Spread


def print_table(machine: dict[str, Any], header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print an aligned table under the line of the machine."""
    table = Table(*header, title=", ".join(f"{name} {value}" for name, value in machine.items()))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    # Piped output has no width of its own; the table may be as wide as it needs.
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    console.print(table)


def write_json(path: str, machine: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
    """Write the numbers behind the table."""
    text = json.dumps({"machine": machine, "results": list(results)}, indent=2)
    Path(path).write_text(text + "\n", encoding="utf-8")


def milliseconds(seconds: float) -> str:
    """Such as "12.3"."""
    return f"{1000 * seconds:.1f}"


def spread(ratio: Spread) -> str:
    """Such as "0.31 (0.30-0.33)"."""
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def mebibytes(size: int | None) -> str:
    """Such as "245", or a note that the memory was not measured on this system."""
    return "not measured" if size is None else f"{size / 2**20:.0f}"


def size_ratio(size: int | None, reference: int | None) -> str:
    """Such as "0.22"; empty if one was not measured."""
    return "" if size is None or reference is None else f"{size / reference:.2f}"
