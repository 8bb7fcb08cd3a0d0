"""Configuration files: checked as a whole before they are read, and looked up in when something in them is wrong."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

_PLAIN = "tag:yaml.org,2002:"
_MOST_VALUES = 100_000  # written out; aliases of aliases would make more than any machine holds


class Given(NamedTuple):
    """A value that the user gave."""

    key: str  # such as "trainer.callbacks[0].init_args.window"
    value: Any
    place: str  # for people: "my.yaml: KEY", or the option


def check_config_file(path: str) -> None:
    """Refuse a file that is no configuration, or one of which a part would silently be passed over.

    Raises:
        ValueError: it cannot be read, is not UTF-8 or no YAML, holds no keys, gives a key twice, refers to itself, or
            asks for Python objects, or grows beyond measure by its aliases; names the file and the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the configuration {path!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the configuration {path!r} is not UTF-8: byte {error.start + 1} is {error.reason}"
        ) from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise ValueError(f"the configuration {path!r} is no YAML: {line}{error.problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        reason = str(error).splitlines()[0] if isinstance(error, yaml.YAMLError) else "it is nested too deeply"
        raise ValueError(f"the configuration {path!r} is no YAML: {reason}") from error
    if not isinstance(root, yaml.MappingNode) or not root.value:
        found = "is empty" if root is None or not root.value else "holds no keys"
        raise ValueError(f"the configuration {path!r} {found}: give keys such as trainer, model and data")
    try:
        _check_node(root, path, (), {})
    except RecursionError as error:
        raise ValueError(f"the configuration {path!r} is nested too deeply") from error


def given_values(argv: Sequence[str]) -> Iterator[Given]:
    """Everything that a command line gives, in its order; files that cannot be read are passed over."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        option, equals, value = argument.partition("=")
        value = value if equals else following
        if option in ("--config", "-c"):
            try:
                content = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
            except (OSError, ValueError, yaml.YAMLError):
                continue
            for key, each in _leaves(content, ""):
                yield Given(key, each, f"{value}: {key}")
        elif option.startswith("--"):
            name = option.removesuffix("+")
            yield Given(name.removeprefix("--"), value, name)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The values in nested mappings and lists, each also as a whole."""
    if key:
        yield key, value
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _leaves(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from _leaves(each, f"{key}[{i}]")


def _check_node(node: yaml.Node, path: str, above: tuple[yaml.Node, ...], sizes: dict[int, int]) -> int:
    """Check a node and what is in it; returns how many values that is, which `sizes` keeps for its aliases."""
    if id(node) in sizes:
        return sizes[id(node)]
    line = f"the configuration {path!r}, line {node.start_mark.line + 1}"
    if node in above:
        raise ValueError(f"{line}: it refers to itself")
    if not node.tag.startswith(_PLAIN) or node.tag.startswith(f"{_PLAIN}python"):
        tag = re.sub(f"^{_PLAIN}", "!!", node.tag)
        raise ValueError(
            f"{line}: {tag} is not read, a configuration holds plain values: give class_path and init_args"
        )
    above, size = (*above, node), 1
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            size += _check_node(each, path, above, sizes)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"{line}: a key must be a word")
            if len(above) <= 2 and key.tag not in (f"{_PLAIN}str", f"{_PLAIN}merge"):
                raise ValueError(f"{line}: the key {key.value!r} must be a word")
            name, place = key.value, key.start_mark.line + 1
            if name in seen and key.tag != f"{_PLAIN}merge":
                raise ValueError(
                    f"the configuration {path!r}, line {place}: {name!r} is given twice, first in line {seen[name]}: "
                    "leave one out"
                )
            seen[name] = place
            size += _check_node(value, path, above, sizes)
    if size > _MOST_VALUES:
        raise ValueError(f"{line}: with what its aliases stand for it holds more than {_MOST_VALUES:,} values")
    sizes[id(node)] = size
    return size
