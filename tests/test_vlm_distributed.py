"""Pictures on one rank only, and rows shared out between ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiny_vlm import write_tiny_vlm

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("ddp")
    write_tiny_vlm("qwen3_vl", folder / "target")
    script = Path(__file__).with_name("ddp_vlm.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*launcher, str(script), str(folder / "target"), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_a_rank_without_pictures_keeps_step(ranks: list[dict[str, Any]]) -> None:
    assert [rank["steps"] for rank in ranks] == [4, 4]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    # Every row has a picture, its own or a white one, so that both run the vision tower on the same number.
    assert all(len(rank["pixels"]) == 2 and all(rows > 0 for rows, _ in rank["pixels"]) for rank in ranks)


@pytest.mark.parametrize("sharing", ["world", "mesh"])
def test_ranks_share_the_rows_in_as_many_steps(ranks: list[dict[str, Any]], sharing: str) -> None:
    first, second = (rank[sharing] for rank in ranks)
    assert len(first) == len(second) == 2
    rows = [row for batch in first + second for row in batch]
    assert sorted(rows) == [0, 0, 1, 2, 3, 4]  # one comes twice to make it even


def test_a_loader_for_itself_gives_every_rank_all_rows(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["alone"] == ranks[1]["alone"] == [[0, 1], [2, 3], [4]]
