"""What is wrong with a command line or a configuration, in one line: which value, from where, what would be right.

argparse and jsonargparse find it; their many lines are read here, and the place is looked up in what the user gave.
"""

import argparse
import inspect
import pydoc
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn, cast

import jsonargparse
from lightning.pytorch.cli import LightningArgumentParser

from dspark_lightning.config_file import check_config_file, given_values

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "NoneType": "null",
    "list": "a list",
    "Sequence": "a list",
    "dict": "a mapping",
}
_UNKNOWN = re.compile(r"[Oo]ption '([^']+)'(?: is not accepted)?")
_CLASS = re.compile(r"class_path[= ]'([\w.]+)'")
_NO_SUBCLASS = re.compile(
    r"[Ii]mport path ?(?P<name>\S*) does not correspond to a subclass of (?P<base>\w+)|"
    r"Expected '(?P<other_name>[\w.]+)' to be a (?:subclass of|function that returns) <class '(?P<other_base>\w+)'>"
)
_SUB_CONFIG = re.compile(r"Invalid content in sub-config file (\S+): (.*)")
_NO_CLASS_AT_ALL = re.compile(r"'([\w.]+)' names no class")
_NO_FILE = re.compile(r"(?:File does not exist|Path is not a file): '(.+)'|Unable to load config '(.+)'")
_NO_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_NO_ATTRIBUTE = re.compile(r"module '[\w.]+' has no attribute '\w+'|No module named '[^']+'")
_NOT_NAMED = re.compile(r"Not a valid subclass of (\w+)")
_REQUIRED = re.compile(r"the following arguments are required: (.+)")
_BASE = re.compile(r"Subtypes: .*?([a-z_]\w*(?:\.\w+)+)")


class UsageError(ValueError):
    """An option or a key that cannot be used.

    Args:
        message: of the parser that noticed, any number of lines.
        options: known to it, such as "--ckpt_path".
    """

    def __init__(self, message: str, options: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.options = options


class OneLineParser(jsonargparse.ArgumentParser):
    """Prints its usage with --help alone, and checks configuration files as a whole."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise `UsageError`; of a parser that checks one of several possible types, what it raises itself."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", self)
        raise UsageError(message, list(parser._option_string_actions)) from ex

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> jsonargparse.Namespace:
        """Read a configuration file.

        Raises:
            ValueError: see `check_config_file`.
        """
        check_config_file(str(path))
        return cast(jsonargparse.Namespace, super().parse_path(path, *args, **kwargs))


class OneLineTrainingParser(OneLineParser, LightningArgumentParser):
    """The same for LightningCLI."""


class OwnOptions(argparse.ArgumentParser):
    """The parser of a command's own options, whose other options are those of `dspark fit`."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`."""
        raise UsageError(message, list(self._option_string_actions))


def check_classes(config: Any, key: str = "") -> None:
    """Refuse a function in the place of a class, which the parser would call where any callable would do.

    Args:
        config: as it was parsed.
        key: where it is.

    Raises:
        UsageError: a `class_path` in it names something else than a class.
    """
    if isinstance(config, jsonargparse.Namespace):
        name = vars(config).get("class_path")
        if isinstance(name, str) and not inspect.isclass(pydoc.locate(name)):
            raise UsageError(f"Parser key \"{key}\": '{name}' names no class")
        for each, value in vars(config).items():
            check_classes(value, f"{key}.{each}" if key else each)
    elif isinstance(config, list):
        for i, value in enumerate(config):
            check_classes(value, f"{key}[{i}]")


def explain(error: UsageError, argv: Sequence[str]) -> str:
    """Say in one line what is wrong with a command line.

    Args:
        error: that parsing it ended with.
        argv: the command line.
    """
    message = str(error)
    keys = [key for key in re.findall(r'Parser key "([^"]+)"', message) if key != "config"]
    if (line := _of_options(message, error.options, argv)) is not None:
        return line
    if (found := _UNKNOWN.search(message)) is not None:
        return _unknown_key(message, [*keys, found[1]], error.options, argv)
    if (found := _REQUIRED.search(message)) is not None:
        return f"{_place(keys, None, argv)}: {_short(_class_path(message))} needs {found[1]}, which is not given"
    if (found := _NO_SUBCLASS.search(message)) is not None:
        name, base = found["name"] or found["other_name"] or _given(message), found["base"] or found["other_base"]
        return f"{_place(keys, name, argv)}: {name!r} is no {base}, of which a subclass must be named"
    if (found := _NO_CLASS_AT_ALL.search(message)) is not None:
        return f"{_place(keys, found[1], argv)}: {found[1]!r} must be a class: functions are not called"
    if (found := _SUB_CONFIG.search(message)) is not None:
        return f"{_place(keys, found[1], argv)}: the file {found[1]!r} is no YAML: {found[2]}"
    if (found := _NO_FILE.search(message)) is not None:
        return f"cannot read the configuration {found[1] or found[2]!r}: it is no file"
    if (found := _NO_ATTRIBUTE.search(message)) is not None:
        name = _class_path(message) or _given(message)
        near = _nearest(_short(name), _known(message))
        return f"{_place(keys, name, argv)}: there is no class {name!r}: {found[0]}{near}"
    if (found := _NO_CLASS.search(message)) is not None:
        near = _nearest(_short(found[1]), _known(message))
        return f"{_place(keys, found[1], argv)}: there is no class {found[1]!r}{near}"
    if len(keys) == 1 and (found := _NOT_NAMED.search(message)) is not None:
        value = _shortened(_given(message))
        return f"{_place(keys, None, argv)}: {value!r} must name a {found[1]} by class_path and init_args"
    if keys and (line := _wrong_type(message, keys, argv)) is not None:
        return line
    first = re.search(r"^ *- (.*)", message, re.MULTILINE)
    if keys and first is not None:
        return f"{_place(keys, None, argv)}: {_shortened(_given(message))!r} cannot be used: {first[1].rstrip(':')}"
    return " ".join(re.sub(r'Parser key "config": ', "", message).split())


def _of_options(message: str, options: Sequence[str], argv: Sequence[str]) -> str | None:
    """What argparse itself says: of the options, not of what is in their values."""
    if (found := re.match(r"unrecognized arguments: (\S+)", message)) is not None:
        name = found[1].partition("=")[0]
        if name.startswith("-"):
            return f"there is no option {name}{_nearest(name, options)}"
        return f"{name!r} belongs to no option: an option takes one value, several are given as '[a, b]'"
    if (found := re.match(r"argument ([^:]+): expected (?:one|at least one) argument", message)) is not None:
        names = found[1].split("/")
        cut = [arg for arg, value in zip(argv, [*argv[1:], "--"], strict=True) if value.startswith("--")]
        own = [arg for arg in cut if arg.split(".")[0] in [name.split(".")[0] for name in names]]
        return f"{own[-1] if own else names[-1]} is given without a value"
    if (found := re.match(r"argument ([^:]+): invalid (\w+) value: (.+)", message)) is not None:
        return f"{found[1]} {found[3]} must be {_TYPES.get(found[2], found[2])}"
    if (found := re.match(r"argument ([^:]+): (not allowed with .+)", message)) is not None:
        return f"{found[1]} is {found[2]}"
    if message.startswith("the following arguments are required"):
        names = [f"--{name.rpartition('.')[2]}" for name in message.partition(": ")[2].split(", ")]
        where = ", in a configuration (--config my.yaml) or each by itself" if "--model" in names else ""
        return f"{' and '.join(names)} must be given{where}"
    return None


def _unknown_key(message: str, keys: list[str], options: Sequence[str], argv: Sequence[str]) -> str:
    name = keys[-1]
    owner = _class_path(message)
    if owner:
        known: Iterable[str] = [*_arguments(owner), "class_path", "init_args"]
        near = _nearest(name.split(".")[0], known)
        return f"{_place(keys, None, argv)}: {_short(owner)} has no {name!r}{near}"
    return f"{_place(keys, None, argv)}: there is no such key{_nearest(name, [each.lstrip('-') for each in options])}"


def _wrong_type(message: str, keys: list[str], argv: Sequence[str]) -> str | None:
    block = message.rpartition('Parser key "')[2].splitlines()[1:]
    depth = min((_indent(line) for line in block if line.strip()), default=0)
    inside = "\n".join(block[: next((i for i, line in enumerate(block) if _indent(line) < depth), len(block))])
    if (got := re.search(r"Got value: (.*)", inside)) is not None:
        inside, value = inside[: got.start()], got[1]
    else:
        value = _given(message)
    kinds: list[str] = []
    for kind in re.findall(r"Expected an? (.+?)(?:\. |, but |$)", inside, re.MULTILINE):
        literal = re.fullmatch(r"typing\.Literal\[(.*)\]", kind)
        named = re.fullmatch(r"<class '([\w.]+)'>", kind)
        kinds += literal[1].split(", ") if literal else [_TYPES.get(_short(named[1]), named[1]) if named else kind]
    if not {"null", *kinds} - {"null"}:
        return None
    if _TYPES["float"] in kinds:  # typing gives the two in the order in which the first module asked for them
        kinds = [kind for kind in kinds if kind != _TYPES["int"]]
    *others, last = dict.fromkeys(kinds)
    wanted = f"{', '.join(others)} or {last}" if others else last
    return f"{_place(keys, value, argv)}: {_shortened(value)!r} must be {wanted}"


def _place(keys: Sequence[str], value: str | None, argv: Sequence[str]) -> str:
    """Where the user gave a key: the last option or configuration that names it, or else something inside it."""
    wanted = _plain(".".join(keys))
    given = [each for each in given_values(argv) if f"{_plain(each.key)}.".startswith(f"{wanted}.")]
    exact = [each for each in given if _plain(each.key) == wanted]
    same = [each for each in exact if str(each.value) == value]
    best = next((group[-1] for group in (same, exact, given) if group), None)
    return wanted if best is None else best.place


def _plain(key: str) -> str:
    """A key without what only says how it is written down: init_args, class_path, places in lists, the command."""
    parts = [part for part in re.sub(r"\[\d+\]", "", key).split(".") if part not in ("init_args", "class_path")]
    return ".".join(parts[1:] if parts[:1] in (["fit"], ["validate"], ["test"]) else parts)


def _class_path(message: str) -> str:
    found = _CLASS.findall(message)
    return found[-1] if found else ""


def _given(message: str) -> str:
    found = re.search(r"Given value: (.*)", message)
    return "" if found is None else re.sub(r"NestedArg\(key='[^']*', val=(.*)\)", r"\1", found[1]).strip("'")


def _arguments(class_path: str) -> list[str]:
    """What a class is given."""
    module, _, name = class_path.rpartition(".")
    kind = getattr(import_module(module), name, None)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    added: list[str] = parser.add_class_arguments(kind, fail_untyped=False) if isinstance(kind, type) else []
    return added


def _known(message: str) -> list[str]:
    """The classes that could have been meant, by their short names."""
    found = _BASE.search(message)
    if found is None:
        return []
    module, _, name = found[1].rpartition(".")
    base = getattr(import_module(module), name)
    left, kinds = [base] if isinstance(base, type) else [], []
    while left:
        left += (kind := left.pop()).__subclasses__()
        kinds.append(kind.__name__)
    return kinds


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _shortened(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:57]}..."


def _short(class_path: str) -> str:
    return class_path.rpartition(".")[2]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
