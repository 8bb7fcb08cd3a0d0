"""The `dspark` command, as a user types it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, Trainer
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dspark_lightning import DSparkModule, load_pretrained_draft
from dspark_lightning.cli import main, read_whole_numbers_first, run_lightning
from dspark_lightning.embedded import embedded_path

CONFIGS = sorted(
    path for path in (Path(__file__).parent.parent / "configs").rglob("*.yaml") if path.parent.name != "strategy"
)
SMALL = {
    "model.init_args.num_draft_layers": 1,
    "model.init_args.block_size": 4,
    "model.init_args.num_anchors": 4,
    "model.init_args.markov_rank": 8,
    "data.init_args.max_length": 64,
    "data.init_args.min_supervised_tokens": 4,
    "trainer.max_steps": 4,
    "trainer.log_every_n_steps": 2,
    "trainer.val_check_interval": 2,
    "trainer.limit_val_batches": 2,
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
}


def command(subcommand: str, config: str = "quickstart", **changes: Any) -> list[str]:
    """Command line for a shipped configuration; double underscores in the names of `changes` are dots."""
    path = next(path for path in CONFIGS if path.stem == config)
    settings = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    return [subcommand, "--config", str(path), *(f"--{name}={value}" for name, value in settings.items())]


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_configuration_builds_without_weights(path: Path, in_tmp: Path) -> None:
    args = ["--config", str(path), "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.precision=32-true"]
    cli = run_lightning(args, run=False)
    assert isinstance(cli.model, DSparkModule) and isinstance(cli.datamodule, LightningDataModule)
    assert cli.model.draft is None  # nothing is loaded before a trainer asks for it
    given = yaml.safe_load(path.read_text())["model"]["init_args"]
    assert all(cli.model.hparams[name] == value for name, value in given.items() if name != "optimizer")


def test_fit_then_validate_then_export(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(command("fit"))
    printed = capsys.readouterr().out
    assert "Trained 4 steps" in printed and "tokens per target pass (tau)" in printed
    run = next((in_tmp / "runs/quickstart").iterdir())
    last = run / "checkpoints/last.ckpt"
    main([*command("validate"), f"--ckpt_path={last}"])
    table = capsys.readouterr().out
    logged = fit_values(run)
    assert len(logged) > 12 and all(name in table and str(value) in table for name, value in logged.items())
    main([*command("test"), f"--ckpt_path={last}"])
    table = capsys.readouterr().out
    assert "test/tau_decode" in table and "test/acceptance_decode@1" in table
    main(["export", f"--ckpt_path={last}", "--output=exported-dspark"])
    exported, final = load_pretrained_draft("exported-dspark"), load_pretrained_draft(run / "dspark-draft")
    torch.testing.assert_close(exported.state_dict(), final.state_dict(), atol=0, rtol=0)
    assert f"vllm serve {embedded_path()} " in capsys.readouterr().out


def fit_values(run: Path) -> dict[str, float]:
    """Last value of every validation scalar in a run's TensorBoard log."""
    events = EventAccumulator(str(run))
    events.Reload()
    return {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"] if tag.startswith("val/")}


def test_print_config_is_a_configuration(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command("fit", model__init_args__block_size=3), "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["block_size"] == 3
    objects = {name: printed[name] for name in ("trainer", "model", "data")}  # the rest belongs to the subcommand
    (in_tmp / "printed.yaml").write_text(yaml.safe_dump(objects))
    assert run_lightning(["--config", "printed.yaml"], run=False).model.hparams["block_size"] == 3


def test_later_configurations_win(in_tmp: Path) -> None:
    (in_tmp / "more.yaml").write_text("model:\n  init_args:\n    markov_rank: 0\n")
    quickstart = next(path for path in CONFIGS if path.stem == "quickstart")
    cli = run_lightning(["--config", str(quickstart), "--config", "more.yaml"], run=False)
    assert cli.model.hparams["markov_rank"] == 0 and cli.model.hparams["target"] == "embedded"


def test_the_command_line_wins_over_a_checkpoint(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(command("fit"))
    capsys.readouterr()
    last = next(in_tmp.glob("runs/quickstart/*/checkpoints/last.ckpt"))
    error = failure([*command("fit", model__init_args__block_size=5), f"--ckpt_path={last}"], capsys)
    assert error == (
        "the checkpoint has block_size 4, this run has 5: set block_size to the checkpoint's value, "
        "or start without the checkpoint"
    )


def failure(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail; returns the one line it ends with."""
    with pytest.raises(SystemExit) as exit_:
        main(args)
    assert exit_.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "dspark: error: " in line]
    assert len(lines) == 1
    return lines[0].partition("dspark: error: ")[2]


@pytest.mark.parametrize("content", [None, b"", b"junk", b"PK\x03\x04 cut off"])
def test_an_unreadable_checkpoint_is_one_line(
    content: bytes | None, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("a.ckpt").write_bytes(content)
    for args in (command("fit"), command("validate"), ["export", "--output=my-dspark"]):
        error = failure([*args, "--ckpt_path=a.ckpt"], capsys)
        assert "'a.ckpt'" in error and ("damaged" in error or "No such file" in error)
    assert not list(in_tmp.glob("runs/*/*/*"))


@pytest.mark.parametrize("subcommand", ["validate", "test"])
def test_an_untrained_draft_is_not_measured(subcommand: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "ckpt_path is not set" in failure(command(subcommand), capsys)


def test_without_a_logger_nothing_of_the_users_is_overwritten(in_tmp: Path) -> None:
    Path("config.yaml").write_text("# mine\n")
    main(command("fit", trainer__logger="false", trainer__callbacks="null"))
    assert Path("config.yaml").read_text() == "# mine\n"


REWRITES_HISTORY = """{%- for m in messages %}<|{{ m.role }}|>\
{{ m.content if loop.last else m.content | upper }}<|end|>{% endfor %}"""

BAD = {
    "no mask token": ({"model__init_args__mask_token_id": "null"}, "mask_token_id is not set"),
    "mask token outside": ({"model__init_args__mask_token_id": 4000}, "mask_token_id 4000 lies outside .* 0..1023"),
    "layer out of range": (
        {"model__init_args__target_layer_ids": "[1,9]"},
        r"target_layer_ids \[1, 9\] must lie in -1",
    ),
    "layers unsorted": (
        {"model__init_args__target_layer_ids": "[3,1]"},
        r"must be strictly increasing, such as \[1, 3\]",
    ),
    "layers empty": ({"model__init_args__target_layer_ids": "[]"}, "target_layer_ids is empty"),
    "block size 0": ({"model__init_args__block_size": 0}, "block_size must be an integer of at least 1, got 0"),
    "negative weight": ({"model__init_args__ce_loss_alpha": -1}, "ce_loss_alpha must be 0 or positive, got -1"),
    "weight that is no number": ({"model__init_args__l1_loss_alpha": ".nan"}, "l1_loss_alpha must be 0 or positive"),
    "gamma 0": ({"model__init_args__loss_decay_gamma": 0}, "loss_decay_gamma must be positive or None, got 0"),
    "learning rate": ({"model__init_args__optimizer__init_args__lr": -1}, "optimizer cannot be built: .*-1"),
    "no such target": ({"model__init_args__target": "./nowhere"}, "'./nowhere'"),
    "no such file": ({"data__init_args__train_data": "nowhere.jsonl"}, "'nowhere.jsonl'"),
    "empty file": ({"data__init_args__train_data": "empty.jsonl"}, "'?empty.jsonl"),
    "not JSON": ({"data__init_args__train_data": "broken.jsonl"}, "'?broken.jsonl"),
    "no assistant": ({"data__init_args__train_data": "silent.jsonl"}, "assistant"),
    "template": (
        {"data__init_args__chat_template": "rewrites.jinja", "data__init_args__train_data": "turns.jsonl"},
        "rewrites.jinja",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_clear_line(case: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.jsonl").write_text("")
    Path("broken.jsonl").write_text('{"messages": [\nnot json\n')
    Path("silent.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hello?"}]}) + "\n")
    turns = [{"role": role, "content": f"{role} speaks"} for role in ("user", "assistant") * 2]
    Path("turns.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    Path("rewrites.jinja").write_text(REWRITES_HISTORY)
    changes, message = BAD[case]
    error = failure(command("fit", **changes), capsys)
    assert re.search(message, error), error
    assert not list(in_tmp.rglob("*.ckpt")) and not list(in_tmp.rglob("*.safetensors"))


def test_an_unknown_architecture_is_refused(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(embedded_path(), "gpt")
    config = json.loads(Path("gpt/config.json").read_text()) | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
    }
    Path("gpt/config.json").write_text(json.dumps(config))
    error = failure(command("fit", model__init_args__target="./gpt"), capsys)
    assert "GPT2LMHeadModel" in error and "known are Llama" in error


def test_a_checkpoint_of_another_target_is_refused(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(command("fit"))
    capsys.readouterr()
    last = next(in_tmp.glob("runs/quickstart/*/checkpoints/last.ckpt"))
    other_target("other")
    error = failure([*command("validate", model__init_args__target="./other"), f"--ckpt_path={last}"], capsys)
    assert error.startswith("the checkpoint was trained for the target 'embedded' (weights ")
    assert "this run has './other' (weights " in error


def other_target(folder: str) -> None:
    """The embedded target with one weight doubled."""
    shutil.copytree(embedded_path(), folder)
    weights = load_file(Path(folder) / "model.safetensors")
    weights["model.norm.weight"] = 2 * weights["model.norm.weight"]
    save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def test_modules_beside_the_user_are_found(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A function that makes rows, in the folder where the command is typed."""
    rows = '[{"prompt": f"What is {i}?", "response": "It is a number, as you can see."} for i in range(12)]'
    (in_tmp / "rows_of_mine.py").write_text(f"def load():\n    return {rows}\n")
    arguments = command("fit", data__init_args__train_data="rows_of_mine:load", trainer__max_steps=1)
    main([*arguments, "--data.init_args.val_data=null", "--trainer.val_check_interval=1.0"])
    assert "Trained 1 steps" in capsys.readouterr().out


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    error = failure(["evaluat", "--draft", "x"], capsys)
    tools = "regenerate, export, check, evaluate, calibrate, schedule, report, data inspect, precompute"
    assert error == f"there is no command 'evaluat'; known are fit, validate, test, {tools}"


def test_a_wrong_trainer_setting_ends_with_one_line(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(command("fit", trainer__val_check_interval=100_000))
    assert error.value.code == 2
    assert "val_check_interval" in capsys.readouterr().err.splitlines()[-1]


def test_one_batch_is_not_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser takes the first type that fits, and typing may have turned Lightning's int or float around."""
    annotations = Trainer.__init__.__annotations__
    monkeypatch.setitem(annotations, "limit_val_batches", float | int | None)
    monkeypatch.setitem(annotations, "max_epochs", int | None)
    read_whole_numbers_first()
    assert get_args(annotations["limit_val_batches"]) == (int, float, type(None))
    assert annotations["max_epochs"] == int | None
