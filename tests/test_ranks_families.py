"""Every family, in text and with pictures, split over two ranks."""

from pathlib import Path
from typing import Any

import pytest

from ranks_families import TEXT_FAMILIES, train
from ranks_helpers import STRATEGIES, read_json, run_on_two_ranks
from tiny_target import write_tiny_target
from tiny_vlm import write_tiny_vlm
from vlm_helpers import FAMILIES as PICTURE_FAMILIES

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target of every family."""
    folder = tmp_path_factory.mktemp("families")
    for family in TEXT_FAMILIES:
        write_tiny_target(family, folder / family)
    return folder


@pytest.fixture(scope="module")
def two_ranks(targets: Path) -> dict[str, Any]:
    run_on_two_ranks("ranks_families.py", targets)
    values: dict[str, Any] = read_json(targets / "families.json")
    return values


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_two_ranks_reach_what_one_does(family: str, targets: Path, two_ranks: dict[str, Any]) -> None:
    alone = train(family, "alone", "32-true", targets)
    for strategy in STRATEGIES:
        there = two_ranks[f"{family} {strategy} 32-true"]
        assert there["rope"] == alone["rope"] == []
        assert [there["loss"], there["tau"]] == pytest.approx([alone["loss"], alone["tau"]], rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_half_precision_is_alike_under_every_strategy(family: str, precision: str, two_ranks: dict[str, Any]) -> None:
    """Sums of gradients are rounded in different orders, no more."""
    ddp = two_ranks[f"{family} ddp {precision}"]
    for strategy in ("fsdp1", "fsdp2"):
        there = two_ranks[f"{family} {strategy} {precision}"]
        assert there["rope"] == ddp["rope"] == []
        assert [there["loss"], there["tau"]] == pytest.approx([ddp["loss"], ddp["tau"]], rel=1e-3)


@pytest.mark.parametrize("family", PICTURE_FAMILIES)
def test_pictures_on_one_rank_only(family: str, tmp_path: Path) -> None:
    write_tiny_vlm(family, tmp_path / "target")
    run_on_two_ranks("ranks_vlm.py", tmp_path / "target", tmp_path, *STRATEGIES)
    seen = read_json(tmp_path / "rank0.json")
    assert [seen[strategy]["steps"] for strategy in STRATEGIES] == [4, 4, 4]
    for strategy in ("fsdp1", "fsdp2"):
        assert seen[strategy]["weights"] == pytest.approx(seen["ddp"]["weights"], rel=1e-6)
