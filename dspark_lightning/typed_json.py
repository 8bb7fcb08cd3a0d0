"""From JSON to dataclasses, by their type hints: every place that does not fit is named."""

import json
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

_LARGEST = 2**63
"""Numbers from here on are no counts, times or probabilities, and fit no array."""


def parse(text: str | bytes) -> Any:
    """`json.loads`, for text that may be anything.

    Raises:
        ValueError: it is no JSON, or nested so deeply that it cannot be read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("holds JSON that is nested too deeply") from error


def build(kind: type[T], value: Any, where: str = "") -> T:
    """Turn what `json.load` gave into a record.

    Args:
        kind: a dataclass; what may be None may be missing, everything else must be there.
        value: the parsed JSON; keys that the record has no field for are ignored.
        where: the place of `value` in the file, for errors.

    Raises:
        ValueError: a key that is missing, or a value of another kind; names its place in the file.
    """
    record: T = _build(kind, value, where)
    return record


def _build(kind: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is UnionType:  # X | None
        return None if value is None else _build(args[0], value, where)
    if origin is list and isinstance(value, list):
        return [_build(args[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is tuple and isinstance(value, list) and len(value) == len(args):
        return tuple(_build(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, value, strict=True)))
    if origin is dict and isinstance(value, dict):
        return {key: _build(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(kind) and isinstance(value, dict):
        return _build_record(kind, value, where)
    if kind is bool and isinstance(value, bool):
        return value
    numbers = (int, float) if kind is float else kind
    if isinstance(kind, type) and isinstance(value, numbers) and not isinstance(value, bool):
        if kind in (int, float) and not abs(value) < _LARGEST:  # not NaN either
            raise ValueError(f"has {where} {_shortened(value)}, must be a finite number")
        return value
    raise ValueError(f"has {where or 'as its content'} {_shortened(value)}, must be {_described(kind)}")


def _build_record(kind: Any, value: dict[str, Any], where: str) -> Any:
    arguments = {}
    for name, hint in get_type_hints(kind).items():
        place = f"{where}.{name}" if where else name
        if name not in value and get_origin(hint) is not UnionType:
            raise ValueError(f"has no {place}")
        arguments[name] = _build(hint, value.get(name), place)
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"has {where + '.' if where else ''}{error}") from error


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _described(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers"
    names = {float: "a number", int: "a whole number", str: "a string", bool: "true or false", list: "a list"}
    return names.get(get_origin(kind) or kind, "an object")
