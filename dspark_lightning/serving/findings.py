"""What a check found."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Outcome = Literal["ok", "warning", "error", "skipped"]


class Verdict(NamedTuple):
    """What came out, and one line with the value found and the right one, or why nothing could be checked."""

    outcome: Outcome
    line: str


def ok(line: str) -> Verdict:
    """All is well."""
    return Verdict("ok", line)


def warning(line: str) -> Verdict:
    """It can be served, but look at it."""
    return Verdict("warning", line)


def error(line: str) -> Verdict:
    """It would go wrong at serving."""
    return Verdict("error", line)


def skipped(line: str) -> Verdict:
    """It could not be checked."""
    return Verdict("skipped", line)


@dataclass(frozen=True)
class Finding:
    """The verdict of one check."""

    check: str
    outcome: Outcome
    line: str


def first_difference(found: Mapping[str, Any], right: Mapping[str, Any]) -> Verdict | None:
    """The first field that does not have its right value, as an error.

    Args:
        found: what a file holds; further fields do not matter.
        right: what it must hold.
    """
    for name, value in right.items():
        given = found.get(name)  # for engines a field that is missing is None
        if given is None and value is not None:
            return error(f"{name} is missing, must be {value!r}")
        if given != value or isinstance(given, bool) != isinstance(value, bool):  # True == 1
            return error(f"{name} is {given!r}, must be {value!r}")
    return None
