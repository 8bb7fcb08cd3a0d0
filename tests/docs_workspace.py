"""Where the examples of the documentation run: a checkout with small configurations, and the files they speak of."""

import shutil
from pathlib import Path
from typing import Any

import yaml

from dspark_lightning.embedded import embedded_data, embedded_path, embedded_pictures_data

ROOT = Path(__file__).parent.parent
SMALL_TRAINER = {"max_steps": 2, "val_check_interval": 1, "enable_progress_bar": False, "enable_model_summary": False}


def make_workspace(folder: Path) -> Path:
    """Fill a folder. `my.yaml` is the quickstart under another name; all configurations train for two steps.

    Args:
        folder: to fill.
    """
    for name in ("scripts", "benchmarks", "tests"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "configs", folder / "configs")
    for path in (folder / "configs").rglob("*.yaml"):
        if path.parent.name != "strategy":
            path.write_text(yaml.safe_dump(_small(yaml.safe_load(path.read_text()))))
    mine = yaml.safe_load((folder / "configs/quickstart.yaml").read_text())
    mine["trainer"]["logger"]["init_args"]["name"] = "my"
    (folder / "my.yaml").write_text(yaml.safe_dump(mine))
    _first_rows(embedded_data("train"), folder / "answers.jsonl", 16)
    _first_rows(embedded_data("heldout"), folder / "heldout.jsonl", 4)
    _first_rows(embedded_data("train"), folder / "prompts.jsonl", 8)
    _first_rows(embedded_pictures_data("train"), folder / "pictures.jsonl", 16)
    _first_rows(embedded_pictures_data("heldout"), folder / "heldout_pictures.jsonl", 4)
    shutil.copytree(embedded_path(), folder / "my-target")
    return folder


def _small(config: dict[str, Any]) -> dict[str, Any]:
    config["trainer"] |= SMALL_TRAINER
    data = config["data"]["init_args"]
    if data["train_data"] == "embedded":
        pictures = config["data"]["class_path"].endswith("VLMDataModule")
        files = ("pictures.jsonl", "heldout_pictures.jsonl") if pictures else ("answers.jsonl", "heldout.jsonl")
        data["train_data"], data["val_data"] = files
    for callback in config["trainer"]["callbacks"]:
        if callback["class_path"].endswith("DecodeAcceptance"):
            callback["init_args"] |= {"limit": 1, "max_new_tokens": 4}
    return config


def _first_rows(source: Path, path: Path, count: int) -> None:
    path.write_text("".join(source.read_text().splitlines(keepends=True)[:count]))


def copy_runs(trained: Path, folder: Path) -> None:
    """Let the run of `trained` lie where pages take a finished one for granted: as `my` and as `quickstart`."""
    for name in ("my", "quickstart"):
        shutil.copytree(trained / "runs" / "my", folder / "runs" / name)
