"""`dspark precompute`: the command, and what is left of it when it is killed."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dspark_lightning.features.writer as writer_file
from dspark_lightning.cli import main
from dspark_lightning.datamodules.missing_rows import length_batches
from dspark_lightning.features.cache import FeatureCache
from feature_helpers import assert_same_rows, shards
from precompute_run import run

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
SMALL = [
    "--data.init_args.train_split=train[:24]",
    "--data.init_args.val_split=train[:4]",
    "--trainer.enable_progress_bar=false",
    "--model.init_args.num_draft_layers=2",
]


def dspark(*args: str) -> int:
    """Run the command in this process; its exit code."""
    try:
        main(list(args))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_command_takes_the_configuration_of_a_fit(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    assert dspark("precompute", "--config", str(CONFIG), "--cache", "features", *SMALL) == 0
    assert "Feature cache features: 28 rows, 2,031 tokens of 773 bytes: 1.57 MB" in caplog.text
    assert "Feature cache features is complete: 28 rows\nNext: dspark fit --config" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["features"]

    data = ("--data", "CachedFeatureDataModule", "--data.init_args.cache", "features", "--data.init_args.batch_size=8")
    fit = ["--trainer.max_steps=2", "--trainer.log_every_n_steps=1", "--trainer.val_check_interval=2", *SMALL[2:]]
    assert dspark("fit", "--config", str(CONFIG), *data, *fit) == 0
    assert "Held-out rows: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "cache is not set: give --cache, the folder to fill"),
        (["--cache", "here", "--limit_gb", "0.001"], "would take 28 rows, "),
        (["--cache", "here", "--limit_gb", "nan"], "limit_gb must be above 0, got nan"),
        (["--cache", "yours"], "'yours' holds '"),
        (["--cache", "taken"], "'taken' holds 'notes.txt' and no manifest.json: give a folder for the feature cache"),
        (
            ["--cache", "here", "--data", "CachedFeatureDataModule", "--data.init_args.cache=x"],
            "data is a CachedFeatureDataModule, which has no rows to compute features for",
        ),
    ],
)
def test_what_cannot_be_filled_is_refused_in_one_line(
    args: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    yours = [
        tmp_path / "yours" / name for name in ("target/config.json", "target/model.safetensors", "rows/train/a.txt")
    ]
    for path in yours:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    small = SMALL[2:] if "--data" in args else SMALL

    assert dspark("precompute", "--config", str(CONFIG), *args, *small) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("dspark: error: ") and message in last
    assert not (tmp_path / "here").exists()
    assert [path.read_text() for path in yours] == ["mine"] * 3


def test_a_run_that_leaves_rows_out_does_not_say_that_the_cache_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = str(tmp_path / "cache")

    assert (
        dspark("precompute", "--config", str(CONFIG), "--cache", cache, *SMALL, "--trainer.limit_predict_batches=1")
        == 2
    )
    assert re.search(r"is incomplete, it lacks \d+ train rows: run dspark precompute without", capsys.readouterr().err)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("unbroken") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_file, "SHARD_BYTES", writer_file.SHARD_BYTES)
        run(cache)
    return cache


@pytest.mark.parametrize(
    "after", [0, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 22))]
)  # shards written
def test_a_killed_run_goes_on_where_it_was(
    after: int, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    assert len(shards(unbroken)) > 25
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("precompute_run.py")
    process = subprocess.Popen(
        [sys.executable, str(script), str(cache)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while len(shards(cache)) < after and process.poll() is None:
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.03) if after else 4)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = {path: path.stat().st_mtime_ns for path in shards(cache)}
    assert len(kept) >= after

    monkeypatch.setattr(writer_file, "SHARD_BYTES", writer_file.SHARD_BYTES)
    run(cache)

    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # nothing is computed twice
    assert_same_rows(FeatureCache(cache), FeatureCache(unbroken))
    assert not [path for path in cache.rglob("*") if "writing" in path.name]


def test_a_full_disk_is_named_and_leaves_a_cache_that_can_be_completed(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, written = tmp_path / "cache", []
    real = writer_file.write_shard

    def write(*args: object) -> None:
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(real(*args))  # type: ignore[arg-type]

    monkeypatch.setattr(writer_file, "SHARD_BYTES", writer_file.SHARD_BYTES)
    monkeypatch.setattr(writer_file, "write_shard", write)
    with pytest.raises(ValueError, match=r"cannot write a shard to '.*/features/(train|val)': No space left on device"):
        run(cache)

    monkeypatch.setattr(writer_file, "write_shard", real)
    run(cache)
    assert_same_rows(FeatureCache(cache), FeatureCache(unbroken))


def test_a_cache_that_was_begun_and_not_finished_is_begun_anew(unbroken: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(unbroken, cache)
    (cache / "manifest.json").unlink()
    (cache / "target" / "config.json").write_text("{")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_file, "SHARD_BYTES", writer_file.SHARD_BYTES)
        run(cache)

    assert_same_rows(FeatureCache(cache), FeatureCache(unbroken))


def test_batches_of_like_length_stay_within_the_tokens_of_a_batch() -> None:
    import numpy as np

    lengths = np.array([5, 100, 7, 50, 49, 8, 120])
    batches = length_batches(np.arange(10, 17), lengths, max_tokens=100)

    assert batches == [[16], [11], [13, 14], [15, 12, 10]]  # 120 and 100 alone, 2 x 50, 3 x 8
    assert sorted(place for batch in batches for place in batch) == list(range(10, 17))
