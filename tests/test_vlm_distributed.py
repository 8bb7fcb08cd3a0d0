"""Pictures on one rank only, and rows shared out between ranks."""

from typing import Any

import pytest

from ranks_helpers import read_json, run_on_two_ranks
from tiny_vlm import write_tiny_vlm

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("ddp")
    write_tiny_vlm("qwen3_vl", folder / "target")
    run_on_two_ranks("ranks_vlm.py", folder / "target", folder, "ddp")
    return [read_json(folder / f"rank{rank}.json") for rank in (0, 1)]


def test_a_rank_without_pictures_keeps_step(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["ddp"] for rank in ranks)
    assert [first["steps"], second["steps"]] == [4, 4]
    assert first["weights"] == second["weights"]
    # Every row has a picture, its own or a white one, so that both run the vision tower on the same number.
    assert all(len(rank["pixels"]) == 2 and all(rows > 0 for rows, _ in rank["pixels"]) for rank in (first, second))


@pytest.mark.parametrize("sharing", ["world", "mesh"])
def test_ranks_share_the_rows_in_as_many_steps(ranks: list[dict[str, Any]], sharing: str) -> None:
    first, second = (rank[sharing] for rank in ranks)
    assert len(first) == len(second) == 2
    rows = [row for batch in first + second for row in batch]
    assert sorted(rows) == [0, 0, 1, 2, 3, 4]  # one comes twice to make it even


def test_a_loader_for_itself_gives_every_rank_all_rows(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["alone"] == ranks[1]["alone"] == [[0, 1], [2, 3], [4]]
