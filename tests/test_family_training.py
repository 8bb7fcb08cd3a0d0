"""Every family from its tiny configuration, through the command line: it fits, resumes, exports, in every precision."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from dspark_lightning import load_pretrained_draft
from dspark_lightning.cli import main, run_lightning
from dspark_lightning.rope import rope_errors
from dspark_lightning.target import DSparkTargetBatch, HFDSparkTargetModel
from helpers import seeded
from tiny_target import write_tiny_target

TINY = sorted((Path(__file__).parent.parent / "configs" / "tiny").glob("*.yaml"))
CONFIGS = [path for path in TINY if "ChatDataModule" in path.read_text()]
ROWS, LENGTH, STEPS = 4, 40, 60


@dataclass(frozen=True)
class Family:
    """A tiny configuration, the folder of its target, and a file with one batch of rows."""

    config: Path
    target: Path
    rows: Path

    def command(self, subcommand: str, save_dir: Path, **changes: Any) -> list[str]:
        """Command line for one fixed batch a step; more anchors than places, so that all of them are drawn."""
        settings = {
            "model.init_args.target": self.target,
            "model.init_args.num_anchors": LENGTH,
            "data.init_args.train_data": self.rows,
            # Rows that are validated would be left out of training.
            "data.init_args.val_data": "null" if subcommand == "fit" else self.rows,
            "data.init_args.batch_size": ROWS,
            "data.init_args.min_supervised_tokens": 4,
            "trainer.max_epochs": STEPS,
            "trainer.log_every_n_steps": 1,
            "trainer.val_check_interval": 1.0,
            "trainer.enable_progress_bar": "false",
            "trainer.enable_model_summary": "false",
            "trainer.logger.init_args.save_dir": save_dir,
        } | {name.replace("__", "."): value for name, value in changes.items()}
        return [subcommand, "--config", str(self.config), *(f"--{name}={value}" for name, value in settings.items())]


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda path: path.stem)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    config, home = request.param, tmp_path_factory.mktemp(request.param.stem)
    target = yaml.safe_load(config.read_text())["model"]["init_args"]["target"]
    write_tiny_target(target.removeprefix("targets/tiny-"), home / "target")
    with seeded(0):
        ids = torch.randint(6, 900, (ROWS, LENGTH)).tolist()
    rows = [{"input_ids": row, "loss_mask": [0] * 4 + [1] * (LENGTH - 4)} for row in ids]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Family(config, home / "target", home / "rows.jsonl")


@pytest.fixture(scope="module")
def fitted(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run of 60 steps."""
    save_dir = tmp_path_factory.mktemp("runs")
    main(family.command("fit", save_dir))
    yield next(save_dir.glob("*/version_0"))


def logged(run: Path, tag: str) -> list[float]:
    accumulator = EventAccumulator(str(run)).Reload()
    return [event.value for event in accumulator.Scalars(tag)]


def draft_weights(checkpoint: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(checkpoint, weights_only=True)["state_dict"]
    return weights


def validated_loss(family: Family, checkpoint: Path, save_dir: Path) -> float:
    cli = run_lightning(family.command("validate", save_dir, ckpt_path=checkpoint))
    return float(cli.trainer.callback_metrics["val/loss"])


def test_the_loss_falls_and_the_context_is_why(
    family: Family, fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = logged(fitted, "train/loss")
    assert len(losses) == STEPS
    assert losses[-1] < 0.7 * losses[0]
    last = fitted / "checkpoints" / "last.ckpt"
    true = validated_loss(family, last, tmp_path)
    assert true < 1.05 * losses[-1]  # the same rows and anchors
    capture = HFDSparkTargetModel.generate_batch

    def permuted(self: HFDSparkTargetModel, *args: Any, **kwargs: Any) -> DSparkTargetBatch:
        batch = capture(self, *args, **kwargs)
        with seeded(1):
            order = torch.randperm(batch.target_hidden_states.shape[1])
        batch.target_hidden_states = batch.target_hidden_states[:, order]
        return batch

    monkeypatch.setattr(HFDSparkTargetModel, "generate_batch", permuted)
    assert validated_loss(family, last, tmp_path) > 1.2 * true


def test_a_resumed_run_ends_with_the_same_weights(family: Family, fitted: Path, tmp_path: Path) -> None:
    (middle,) = (fitted / "checkpoints").glob("*step=30.ckpt")
    main(family.command("fit", tmp_path, ckpt_path=middle))
    (resumed,) = tmp_path.glob("*/version_0/checkpoints/last.ckpt")
    ours, expected = draft_weights(resumed), draft_weights(fitted / "checkpoints" / "last.ckpt")
    assert ours.keys() == expected.keys()
    assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []
    start = draft_weights(middle)
    assert any(not torch.equal(ours[name], start[name]) for name in ours)


def test_the_export_has_the_weights_of_the_checkpoint(fitted: Path, tmp_path: Path) -> None:
    last = fitted / "checkpoints" / "last.ckpt"
    main(["export", f"--ckpt_path={last}", f"--output={tmp_path / 'my-dspark'}"])
    expected = {name.removeprefix("draft."): value for name, value in draft_weights(last).items()}
    for folder in (tmp_path / "my-dspark", fitted / "dspark-draft"):
        exported = load_file(folder / "model.safetensors")
        assert exported.keys() == expected.keys()
        assert all(torch.equal(exported[name], expected[name].to(torch.bfloat16)) for name in expected)
        assert rope_errors(load_pretrained_draft(folder)) == []


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_rope_stays_fp32_in_every_precision(family: Family, tmp_path: Path, precision: str) -> None:
    """`RopePrecisionCheck`, which is in the configuration, looks during the run; this looks behind it."""
    arguments = family.command("fit", tmp_path, trainer__precision=precision, trainer__max_epochs=2)
    cli = run_lightning(arguments)
    assert cli.trainer.global_step == 2
    assert next(cli.model.draft.fc.parameters()).dtype == (
        torch.bfloat16 if precision == "bf16-true" else torch.float32
    )
    assert next(cli.model.target.model.parameters()).dtype == torch.bfloat16
    assert rope_errors(cli.model.draft) == [] and rope_errors(cli.model.target.model) == []
    (run,) = tmp_path.glob("*/version_0")
    assert all(torch.tensor(logged(run, "train/loss")).isfinite())


def test_the_wrong_module_is_refused(family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = "Gemma4DSpark" if family.config.stem == "qwen3" else "Qwen3DSpark"
    arguments = family.command("fit", tmp_path, trainer__max_epochs=1)
    with pytest.raises(SystemExit) as error:
        main([*arguments, f"--model.class_path=dspark_lightning.{other}"])
    assert error.value.code == 2
    assert f"{other} does not serve a" in capsys.readouterr().err.splitlines()[-1]
