"""Vision-language targets from their tiny configurations, through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dspark_lightning import load_pretrained_draft
from dspark_lightning.cli import main, run_lightning
from dspark_lightning.rope import rope_errors
from tiny_vlm import write_tiny_vlm
from vlm_helpers import FAMILIES as BUILDABLE
from vlm_helpers import picture

CONFIGS = sorted((Path(__file__).parent.parent / "configs" / "tiny").glob("*.yaml"))
FAMILIES = [
    pytest.param(path, marks=parameter.marks, id=path.stem)
    for path in CONFIGS
    for parameter in BUILDABLE
    if parameter.values[0] == path.stem
]
STEPS = 60


def test_every_family_has_a_configuration() -> None:
    assert {path.stem for parameter in FAMILIES for path in parameter.values} == {
        "gemma4_vl",
        "minimax_m3_vl",
        "qwen2_5_vl",
        "qwen3_vl",
    }


@pytest.fixture(scope="module", params=FAMILIES)
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes command lines that train on one batch: two rows with pictures, one of them with two, and two of text."""
    config, home = request.param, tmp_path_factory.mktemp(request.param.stem)
    target = yaml.safe_load(config.read_text())["model"]["init_args"]["target"]
    write_tiny_vlm(target.removeprefix("targets/tiny-"), home / "target")
    rows = []
    for number, count in enumerate((1, 2, 0, 0)):
        parts: list[dict[str, str]] = [{"type": "text", "text": f"What is number {number}?"}]
        for i in range(count):
            picture(56, 56, seed=10 * number + i).save(home / f"{number}{i}.png")
            parts.insert(0, {"type": "image", "path": f"{number}{i}.png"})
        answer = f"It is number {number}, of {count} pictures, as anyone can see who looks."
        rows.append({"conversation": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]})
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(subcommand: str, save_dir: Path, **changes: Any) -> list[str]:
        settings = {
            "model.init_args.target": home / "target",
            "model.init_args.num_anchors": 64,
            "data.init_args.train_data": home / "rows.jsonl",
            "data.init_args.val_data": "null" if subcommand == "fit" else home / "rows.jsonl",
            "trainer.max_epochs": STEPS,
            "trainer.max_steps": STEPS,
            "trainer.log_every_n_steps": 1,
            "trainer.val_check_interval": 1.0,
            "trainer.enable_progress_bar": "false",
            "trainer.enable_model_summary": "false",
            "trainer.logger.init_args.save_dir": save_dir,
        } | {name.replace("__", "."): value for name, value in changes.items()}
        return [subcommand, "--config", str(config), *(f"--{name}={value}" for name, value in settings.items())]

    return make


@pytest.fixture(scope="module")
def run_folder(command: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_dir = tmp_path_factory.mktemp("runs")
    main(command("fit", save_dir))
    return next(save_dir.glob("*/version_0"))


def test_the_loss_falls(run_folder: Path) -> None:
    losses = [event.value for event in EventAccumulator(str(run_folder)).Reload().Scalars("train/loss")]
    assert len(losses) == STEPS and losses[-1] < 0.75 * losses[0]


def test_the_exported_draft_has_plain_positions(run_folder: Path) -> None:
    config = json.loads((run_folder / "dspark-draft" / "config.json").read_text())
    assert "mrope" not in json.dumps(config)
    assert rope_errors(load_pretrained_draft(run_folder / "dspark-draft")) == []


def test_validation_and_resume(command: Any, run_folder: Path, tmp_path: Path) -> None:
    last = run_folder / "checkpoints" / "last.ckpt"
    cli = run_lightning(command("validate", tmp_path, ckpt_path=last))
    losses = [event.value for event in EventAccumulator(str(run_folder)).Reload().Scalars("train/loss")]
    assert float(cli.trainer.callback_metrics["val/loss"]) < 1.1 * losses[-1]
    main(command("fit", tmp_path, ckpt_path=last, trainer__max_epochs=STEPS + 2, trainer__max_steps=STEPS + 2))
    (resumed,) = tmp_path.glob("*/version_*/dspark-draft/../checkpoints/last.ckpt")
    assert torch.load(resumed, weights_only=True)["global_step"] == STEPS + 2


def test_bf16_trains(command: Any, tmp_path: Path) -> None:
    cli = run_lightning(command("fit", tmp_path, trainer__precision="bf16-mixed", trainer__max_epochs=2))
    assert cli.trainer.global_step == 2
    assert rope_errors(cli.model.draft) == [] and rope_errors(cli.model.target.model) == []
