"""The benchmarks run, and stop when the two sides they compare do not compute the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    what = ["-c", code] if code else ["-m", *arguments]
    return subprocess.run([sys.executable, *what], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_the_step_is_compared_with_the_dense_baseline(tmp_path: Path) -> None:
    """Loss and all gradients are held against the baseline, which shares no code with the draft's fast paths."""
    done = run("benchmarks.step", "--sizes", "tiny", "--repeats", "1", "--json", str(tmp_path / "step.json"))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "step.json").read_text())["results"]
    assert [result["part"] for result in results] == ["loss", "step"]
    assert all(seconds > 0 for result in results for runs in result["seconds"].values() for seconds in runs)


def test_the_attention_is_compared_with_the_dense_mask() -> None:
    done = run("benchmarks.attention", "--points", "tiny", "--repeats", "1")
    assert done.returncode == 0, done.stderr


def test_a_round_is_compared_with_a_plain_step(tmp_path: Path) -> None:
    options = ("--contexts", "9", "--heads", "vanilla", "none", "--repeats", "1", "--threads", "1")
    done = run("benchmarks.decode", *options, "--json", str(tmp_path / "decode.json"))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "decode.json").read_text())["results"]
    assert [result["head"] for result in results] == ["vanilla", "none"]
    assert all(seconds > 0 for result in results for runs in result["seconds"].values() for seconds in runs)
    with_head, without = (result["bytes"]["round"] for result in results)
    assert with_head - without == 7 * 4 * 256 * 1024  # W2 once for each Markov step


@pytest.mark.slow
def test_a_cache_is_compared_with_the_target(tmp_path: Path) -> None:
    done = run("benchmarks.cache", "--repeats", "1", "--threads", "1", "--json", str(tmp_path / "cache.json"))
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "cache.json").read_text())["results"]
    assert sorted(result["seconds"]) == ["cached", "capture", "online", "store"]
    assert all(seconds > 0 for runs in result["seconds"].values() for seconds in runs)


@pytest.mark.slow
def test_packs_are_compared_with_the_same_documents_one_a_row(tmp_path: Path) -> None:
    options = ("--rows", "20", "--batch", "4", "--max-length", "256", "--anchors", "6", "--repeats", "1")
    done = run("benchmarks.packing", *options, "--threads", "1", "--json", str(tmp_path / "packing.json"))
    assert done.returncode == 0, done.stderr
    unpacked, packed = json.loads((tmp_path / "packing.json").read_text())["results"]
    assert unpacked["tokens"] == packed["tokens"] <= packed["places"] < unpacked["places"]
    assert unpacked["kept_anchors"] == 20 * 6
    assert packed["kept_anchors"] == pytest.approx(20 * 6, rel=0.1)


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ("chunked_loss._add_product = lambda *_: None", "differs by"),
        pytest.param(
            "split_attention.MIN_SPREAD = 9; split_attention._hide = lambda *_: None",
            "differs by",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_result_is_not_timed(planted: str, message: str) -> None:
    done = run(
        code="import sys; from dspark_lightning import chunked_loss, split_attention; from benchmarks import step; "
        f"{planted}; sys.argv = ['step', '--sizes', 'tiny', '--repeats', '1']; step.main()"
    )
    assert done.returncode != 0 and message in done.stderr
