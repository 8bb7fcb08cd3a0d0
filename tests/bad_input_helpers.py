"""Running the command on something it must refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_lightning.cli import main

CONFIG = str(Path(__file__).parent.parent / "configs" / "quickstart.yaml")
FIT = ["fit", "--config", CONFIG]
OPENED = {"config.yaml", "checkpoints"}
"""What is in the folder of a run that was refused while its target was loaded; beside TensorBoard's empty events."""


def small_fit(**changes: Any) -> list[str]:
    """A fit on `rows.jsonl` that would take a moment; double underscores in the names of `changes` are dots."""
    settings = {
        "data.init_args.train_data": "rows.jsonl",
        "data.init_args.val_data": "null",
        "model.init_args.num_draft_layers": 1,
        "model.init_args.num_anchors": 4,
        "trainer.max_steps": 1,
        "trainer.val_check_interval": "1.0",
        "trainer.limit_val_batches": 0,
        "trainer.enable_progress_bar": "false",
    }
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    return [*FIT, *(f"--{name}={value}" for name, value in settings.items())]


def chat_rows(count: int = 8) -> str:
    """JSON Lines of chats."""
    answer = "It is a number, as you can see when you count the stars, one after the other, on a clear night."
    turns = [[("user", f"What is {i}?"), ("assistant", answer)] for i in range(count)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in turns]
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_files(files: dict[str, str | bytes]) -> None:
    """Write files, with their folders, below the working folder."""
    for name, content in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def refusal(args: list[str], capsys: pytest.CaptureFixture[str], opens_run: bool = False) -> str:
    """Run a command in the working folder that must be refused in one line and leave nothing behind.

    Args:
        args: the command line.
        capsys: of the test.
        opens_run: whether the folder of the run is opened before it is refused.

    Returns:
        the line, behind "dspark: error: ".
    """
    before = tree()
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert sum("dspark: error: " in line for line in lines) == 1 and not any("usage:" in line for line in lines)
    assert "dspark: error: " in lines[-1]  # and nothing behind it
    left = tree() - before
    if opens_run:
        assert all(path.parts[0] == "runs" for path in left)
        assert {path.name for path in left if len(path.parts) > 3 and "tfevents" not in path.name} <= OPENED
    else:
        assert not left
    return lines[-1].partition("dspark: error: ")[2]


def tree() -> set[Path]:
    """Everything below the working folder."""
    return set(Path().rglob("*"))
