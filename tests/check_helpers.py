"""A trained draft for the embedded target, and ways to break a copy of its folder, for the tests of `dspark check`."""

import json
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dspark_lightning.cli import main

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
DRAFT = {"num_draft_layers": 1, "block_size": 4, "num_anchors": 12, "markov_rank": 16}


def train(folder: Path, **settings: Any) -> Path:
    """Train for a moment; returns the run's folder."""
    values = {
        "trainer.logger.init_args.save_dir": folder,
        "trainer.val_check_interval": settings.get("trainer.max_steps", 60),
        "trainer.limit_val_batches": 2,
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
        "trainer.max_steps": 60,
        "data.init_args.max_length": 96,
        **{f"model.init_args.{name}": value for name, value in DRAFT.items()},
    }
    values |= settings
    main(["fit", "--config", str(QUICKSTART), *(f"--{name}={value}" for name, value in values.items())])
    return folder / "quickstart" / "version_0"


def copy_draft(draft: Path, folder: Path, keep_record: bool = True) -> Path:
    """A copy to break; without its record and card nothing names its target."""
    copy = Path(shutil.copytree(draft, folder / "my-dspark"))
    if not keep_record:
        (copy / "dspark.json").unlink()
        (copy / "README.md").unlink()
    return copy


def set_fields(folder: Path, **fields: Any) -> None:
    """Change config.json; None in `fields` takes a field out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: config[name] for name in config if fields.get(name, "") is not None}))


def set_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Change model.safetensors, double underscores for dots, as its author would; None takes a tensor out."""
    path = folder / "model.safetensors"
    state = load_file(path) | {name.replace("__", "."): value for name, value in tensors.items()}
    save_file({name: value for name, value in state.items() if value is not None}, path, metadata={"format": "pt"})
    set_fields(folder, weights_hash=None)


def read_tensor(folder: Path, name: str) -> torch.Tensor:
    return load_file(folder / "model.safetensors")[name]


def run_check(folder: Path, *options: str) -> tuple[int, str]:
    """The exit code, and what was printed."""
    with redirect_stdout(StringIO()) as printed:
        try:
            main(["check", str(folder), "--accelerator", "cpu", *options])
        except SystemExit as exit_:
            assert isinstance(exit_.code, int)
            return exit_.code, printed.getvalue()
    return 0, printed.getvalue()


def check(folder: Path, *options: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and outcome and line of every check."""
    code, printed = run_check(folder, "--json", "-", *options)
    return code, {each["check"]: (each["outcome"], each["line"]) for each in json.loads(printed)["checks"]}
