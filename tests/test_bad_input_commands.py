"""Command lines that are refused: the whole line that each ends with."""

import subprocess
import sys
from pathlib import Path

import pytest

from bad_input_helpers import CONFIG, FIT, refusal, write_files
from dspark_lightning.cli import main, run_lightning
from dspark_lightning.usage import UsageError, explain

COMMANDS = (
    "fit, validate, test, regenerate, export, check, evaluate, calibrate, schedule, report, data inspect, precompute"
)
DRAFT = ["--draft", "d", "--target", "t", "--data", "embedded"]

CASES: dict[str, tuple[list[str], str]] = {
    "no command": ([], f"give a command: {COMMANDS}"),
    "unknown command": (["trian"], f"there is no command 'trian'; known are {COMMANDS}"),
    "half a command": (["data", "show"], f"there is no command 'data'; known are {COMMANDS}"),
    "option before the command": (["--nope"], "there is no option --nope"),
    "fit: nothing": (
        ["fit"],
        "--data and --model must be given, in a configuration (--config my.yaml) or each by itself",
    ),
    "fit: unknown option": ([*FIT, "--nope", "1"], "there is no option --nope"),
    "fit: misspelt option": (
        [*FIT, "--trainer.max_stepz=3"],
        "there is no option --trainer.max_stepz; did you mean '--trainer.max_steps'?",
    ),
    "fit: misspelt argument of the model": (
        [*FIT, "--model.init_args.blocksize=4"],
        "--model.init_args.blocksize: Qwen3DSpark has no 'blocksize'; did you mean 'block_size'?",
    ),
    "fit: misspelt argument of the optimizer": (
        [*FIT, "--model.init_args.optimizer.init_args.lrr=1"],
        "--model.init_args.optimizer.init_args.lrr: AdamW has no 'lrr'; did you mean 'lr'?",
    ),
    "fit: no value": ([*FIT, "--trainer.max_steps"], "--trainer.max_steps is given without a value"),
    "fit: no value for an argument": (
        [*FIT, "--data.init_args.train_data"],
        "--data.init_args.train_data is given without a value",
    ),
    "fit: no whole number": ([*FIT, "--trainer.max_steps=many"], "--trainer.max_steps: 'many' must be a whole number"),
    "fit: half a step": ([*FIT, "--trainer.max_steps=1.5"], "--trainer.max_steps: '1.5' must be a whole number"),
    "fit: no list of whole numbers": (
        [*FIT, "--model.init_args.target_layer_ids=[a]"],
        "--model.init_args.target_layer_ids: 'a' must be a whole number",
    ),
    "fit: none of the words": (
        [*FIT, "--model.init_args.attention=fast"],
        "--model.init_args.attention: 'fast' must be 'auto', 'dense', 'split' or 'flex'",
    ),
    "fit: a stray word": (
        [*FIT, "stray"],
        "'stray' belongs to no option: an option takes one value, several are given as '[a, b]'",
    ),
    "fit: no such model": (
        [*FIT, "--model=Qwen3DSprk"],
        "--model: there is no class 'Qwen3DSprk'; did you mean 'Qwen3DSpark'?",
    ),
    "fit: no such data": (
        [*FIT, "--data=ChatDataModul"],
        "--data: there is no class 'ChatDataModul'; did you mean 'ChatDataModule'?",
    ),
    "fit: data without what it needs": (
        [*FIT, "--data=CachedFeatureDataModule"],
        "--data: CachedFeatureDataModule needs cache, which is not given",
    ),
    "fit: no such configuration": (["fit", "--config"], "--config is given without a value"),
    "fit: seed": (
        [*FIT, "--seed_everything=-1"],
        "seed_everything: -1 is not in bounds, numpy accepts from 0 to 4294967295",
    ),
    "fit: devices": (
        [*FIT, "--trainer.devices=x"],
        "the trainer cannot be built: `devices` selected with `CPUAccelerator` should be an int > 0.",
    ),
    "fit: no batch to a step": (
        [*FIT, "--trainer.accumulate_grad_batches=0"],
        "trainer.accumulate_grad_batches must be at least 1, got 0",
    ),
    "fit: no batch between validations": (
        [*FIT, "--trainer.val_check_interval=0"],
        "trainer.val_check_interval must be at least 1 batch, or a share in 0.0..1.0, got 0",
    ),
    "fit: no list": (
        [*FIT, "--data.init_args.supervise_roles=assistant"],
        "--data.init_args.supervise_roles: 'assistant' must be a list",
    ),
    "fit: a seed for the draft": (
        [*FIT, f"--model.init_args.seed={2**64}"],
        f"seed must fit into 64 bits, got {2**64}",
    ),
    "validate: unknown option": (["validate", "--config", CONFIG, "--nope"], "there is no option --nope"),
    "test: wrong type": (
        ["test", "--config", CONFIG, "--trainer.limit_test_batches=all"],
        "--trainer.limit_test_batches: 'all' must be a number or null",
    ),
    "export: nothing": (["export"], "--ckpt_path and --output must be given"),
    "export: no value": (["export", "--ckpt_path"], "--ckpt_path is given without a value"),
    "export: unknown option": (["export", "--nope=1"], "there is no option --nope"),
    "export: a name that engines misread": (
        ["export", "--ckpt_path=a.ckpt", "--output=mine"],
        "the folder name 'mine' must contain 'dspark' and not 'dflash': engines tell the method by it, for example "
        "'my-dspark'",
    ),
    "export: twice": (
        ["export", "--ckpt_path=a", "--ckpt_path=b", "--output=my-dspark"],
        "--ckpt_path is given 2 times; where several values are taken, give --ckpt_path+ for more",
    ),
    "evaluate: wrong type": (
        ["evaluate", *DRAFT, "--max_new_tokens=abc"],
        "--max_new_tokens: 'abc' must be a whole number",
    ),
    "evaluate: misspelt": (
        ["evaluate", *DRAFT, "--max_new_tokenz=1"],
        "there is no option --max_new_tokenz; did you mean '--max_new_tokens'?",
    ),
    "evaluate: none of the words": (
        ["evaluate", *DRAFT, "--dtype=float7"],
        "--dtype: 'float7' must be 'float32', 'bfloat16', 'float16' or null",
    ),
    "evaluate: no draft": (
        ["evaluate", *DRAFT],
        "'d' is no folder with an exported draft: it has no config.json",
    ),
    "calibrate: wrong type": (["calibrate", "--records=r", "--holdout=half"], "--holdout: 'half' must be a number"),
    "calibrate: out of range": (
        ["calibrate", "--records=r", "--holdout=2"],
        "holdout must lie between 0 and 1, got 2.0",
    ),
    "schedule: nothing": (["schedule"], "--records must be given"),
    "report: nothing": (["report"], "--run must be given"),
    "regenerate: none of the words": (
        ["regenerate", "--data=embedded", "--output=o.jsonl", "--turns=some"],
        "--turns: 'some' must be 'all' or 'last'",
    ),
    "regenerate: no target": (
        ["regenerate", "--data=embedded", "--output=o.jsonl"],
        "there is no target: give --target FOLDER to answer in this process, or --server URL",
    ),
    "precompute: wrong type": (
        ["precompute", "--config", CONFIG, "--limit_gb", "abc"],
        "--limit_gb 'abc' must be a number",
    ),
    "precompute: no value": (["precompute", "--config", CONFIG, "--cache"], "--cache is given without a value"),
    "precompute: no cache": (["precompute", "--config", CONFIG], "cache is not set: give --cache, the folder to fill"),
    "data inspect: wrong type": (
        ["data", "inspect", "--config", CONFIG, "--rows", "abc"],
        "--rows 'abc' must be a whole number",
    ),
    "data inspect: out of range": (
        ["data", "inspect", "--config", CONFIG, "--rows", "-1"],
        "--rows must be 0 or more, got -1",
    ),
    "data inspect: two that exclude each other": (
        ["data", "inspect", "--config", CONFIG, "--row", "1", "--random", "2"],
        "--random is not allowed with argument --row",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_command_line_is_refused_in_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    args, line = CASES[case]
    assert refusal(args, capsys) == line


def test_a_file_in_the_place_of_a_cache_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files({"README.md": "mine"})
    line = refusal(["precompute", "--config", CONFIG, "--cache", "README.md"], capsys)
    assert line == "cannot write to 'README.md': 'README.md' is a file, give a folder"
    assert Path("README.md").read_text() == "mine"


def test_what_a_parser_says_in_words_of_its_own_is_one_line_too() -> None:
    """Another version of jsonargparse may put things in another way."""
    error = UsageError('Parser key "trainer.max_steps":\n  is out\n    of this world\n')
    assert explain(error, []) == 'Parser key "trainer.max_steps": is out of this world'


def test_a_long_value_is_shortened() -> None:
    argv = [*FIT, f"--trainer.max_steps={'x' * 1000}"]
    with pytest.raises(UsageError) as error:
        run_lightning(argv)
    assert explain(error.value, argv) == f"--trainer.max_steps: '{'x' * 57}...' must be a whole number"


@pytest.mark.parametrize("args", [["fit"], ["export"], ["precompute"], ["data", "inspect"], []])
def test_the_usage_is_shown_on_request(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*args, "--help"])
    assert ended.value.code == 0 and "usage: " in capsys.readouterr().out


def test_a_real_process_ends_the_same_way(tmp_path: Path) -> None:
    args = ["fit", "--config", CONFIG, "--model.init_args.blocksize=4"]
    ended = subprocess.run(
        [sys.executable, "-m", "dspark_lightning", *args], cwd=tmp_path, capture_output=True, text=True
    )
    line = "--model.init_args.blocksize: Qwen3DSpark has no 'blocksize'; did you mean 'block_size'?"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"dspark: error: {line}\n")
    assert list(tmp_path.iterdir()) == []
