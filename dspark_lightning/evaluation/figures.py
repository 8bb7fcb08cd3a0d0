"""An evaluation in pictures."""

from typing import Any

from matplotlib.figure import Figure


def evaluation_figures(results: dict[str, Any]) -> dict[str, Figure]:
    """Placeholder until the report's charts are there."""
    del results
    return {}
