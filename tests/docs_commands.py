"""What a command line of the documentation asks for: carried out in a workspace, or read by what would parse it."""

import json
import re
import runpy
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import jsonargparse
import pytest
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser as torchrun_parser

from docs_helpers import ROOT
from dspark_lightning import cli
from dspark_lightning.tools.inspect_data import parse_shown
from dspark_lightning.tools.precompute import parse_filling

# What a page leaves at its default takes minutes; here it takes seconds.
SHORTER = {
    "evaluate": {"--limit": "2", "--max_new_tokens": "6"},
    "regenerate": {"--max_new_tokens": "32"},
    "schedule": {"--max_concurrency": "2"},
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run_command(command: list[str], folder: Path) -> None:
    """Carry it out in this process; of other programs than `dspark` and the scripts, the command line is read."""
    program, *args = command
    if program == "dspark":
        if args[0] == "regenerate":  # what other pages take for granted is made here
            (folder / args[args.index("--output") + 1]).unlink()
        extra = SHORTER.get(args[0], {})
        cli.main([*args, *(part for option in extra.items() if option[0] not in args for part in option)])
    elif program == "python" and args[0].startswith("scripts/"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", args)
            runpy.run_path(args[0], run_name="__main__")
    else:
        read_command(command, folder)


def read_command(command: list[str], folder: Path) -> None:
    """Parse it; what cannot be parsed raises an error of any kind. A program that is not listed is a KeyError."""
    program, *args = command
    _READERS[program](args, folder)


def read_dspark(args: list[str], folder: Path) -> None:
    """The parser of the subcommand takes it, and what the configurations become."""
    del folder
    if args[0] in cli.TOOLS:
        jsonargparse.auto_parser(cli.TOOLS[args[0]], as_positional=False).parse_args(args[1:])
        return
    if args[:2] == ["data", "inspect"]:
        args = ["fit", *parse_shown(args[2:])[1]]
    elif args[0] == "precompute":
        args = ["fit", *parse_filling(args[1:])[1]]
    with pytest.raises(SystemExit) as left:
        cli.run_lightning([*args, "--print_config"])
    assert left.value.code == 0


def _read_torchrun(args: list[str], folder: Path) -> None:
    options = torchrun_parser().parse_args(args)
    assert options.module and options.training_script == "dspark_lightning"
    read_dspark(options.training_script_args, folder)


def _read_python(args: list[str], folder: Path) -> None:
    """The file exists and knows the options; inline code compiles."""
    if args[0] == "-c":
        compile(args[1], "-c", "exec")
        return
    text = (folder / (f"{args[1].replace('.', '/')}.py" if args[0] == "-m" else args[0])).read_text()
    assert [arg for arg in args if arg.startswith("--") and arg not in text] == []


def _read_pip(args: list[str], folder: Path) -> None:
    """What is asked for is well-formed, and of this project there are the extras."""
    del folder
    for wanted in (arg for arg in args[1:] if not arg.startswith("-")):
        requirement = Requirement(re.sub(r"^\.", PROJECT["name"], wanted))
        if requirement.name == PROJECT["name"]:
            assert requirement.extras <= set(PROJECT["optional-dependencies"])


def _read_make(args: list[str], folder: Path) -> None:
    del folder
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets and set(args) <= set(targets[1].split())


def _read_vllm(args: list[str], folder: Path) -> None:
    del folder
    speculative = json.loads(args[args.index("--speculative-config") + 1])
    assert sorted(speculative) == ["model", "num_speculative_tokens"] and "dspark" in speculative["model"]


def _read_tensorboard(args: list[str], folder: Path) -> None:
    del folder
    assert args[0] == "--logdir" and len(args) == 2


def _read_pre_commit(args: list[str], folder: Path) -> None:
    del folder
    assert args == ["install"]


_READERS: dict[str, Callable[[list[str], Path], None]] = {
    "dspark": read_dspark,
    "torchrun": _read_torchrun,
    "srun": read_command,  # the rest is a command of its own
    "python": _read_python,
    "pip": _read_pip,
    "make": _read_make,
    "vllm": _read_vllm,
    "tensorboard": _read_tensorboard,
    "pre-commit": _read_pre_commit,
}
