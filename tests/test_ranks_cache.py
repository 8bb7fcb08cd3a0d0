"""Two ranks share the work of a feature cache, and train from it as one rank with the target does."""

from pathlib import Path

import pytest

from dspark_lightning.features.cache import FeatureCache
from feature_helpers import new_source, shards
from ranks_cache import train
from ranks_helpers import STRATEGIES, read_json, run_on_two_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == "fsdp2" else pytest.mark.slow) for name in STRATEGIES],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks wrote under a strategy."""
    folder = tmp_path_factory.mktemp("cache")
    run_on_two_ranks("ranks_cache.py", folder, request.param)
    return folder


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    return train("alone", new_source(batch_size=4), tmp_path_factory.mktemp("online"))


@pytest.mark.parametrize("kind", ["cached", "hybrid"])
def test_losses_are_those_of_one_rank_with_the_target(kind: str, folder: Path, online: list[list[float]]) -> None:
    ranks = [read_json(folder / f"rank{rank}.json")[kind] for rank in (0, 1)]

    assert ranks[0] == ranks[1] and len(ranks[0]) == len(online) == 2 * (10 + 2)
    for (ours, our_weights), (theirs, their_weights) in zip(ranks[0], online, strict=True):
        assert our_weights == pytest.approx(their_weights, rel=1e-5)
        assert ours / our_weights == pytest.approx(theirs / their_weights, abs=1e-3)


def test_each_rank_writes_files_of_its_own(folder: Path) -> None:
    cache = FeatureCache(folder / "cache")
    held = cache._splits["train"].row_ids.tolist()

    assert cache.complete and len(shards(folder / "cache")) == 2
    assert len(held) == len(set(held)) == 40
