"""Two ranks with two rows each compute what one rank with four does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ranks_helpers import STRATEGIES, run_on_two_ranks
from ranks_numbers import SCENARIOS, train

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run_on_two_ranks("ranks_numbers.py", folder)
    return folder


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return {scenario: train(scenario, "alone", folder) for scenario in SCENARIOS}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_and_logs_are_those_of_one_rank(
    strategy: str, scenario: str, two_ranks: Path, one_rank: dict[str, dict[str, Any]]
) -> None:
    theirs, ours = torch.load(two_ranks / f"{strategy}-{scenario}.pt"), one_rank[scenario]
    assert theirs["weights"].keys() == ours["weights"].keys()
    for name, weight in ours["weights"].items():
        torch.testing.assert_close(theirs["weights"][name], weight, rtol=0, atol=1e-5, msg=name)
    steps, values = zip(*ours["records"], strict=True)
    assert tuple(step for step, _ in theirs["records"]) == steps == (3, 7, 3, 7)
    for (_, there), here in zip(theirs["records"], values, strict=True):
        assert there == pytest.approx(here, rel=1e-5, abs=1e-7)


def test_the_scenarios_train_the_draft(one_rank: dict[str, dict[str, Any]]) -> None:
    """Were weights to stand still, the test above could not fail."""
    learned = {name: one_rank[name]["weights"]["fc.weight"] for name in SCENARIOS}
    moved = {name: (learned[name] - learned["unequal"]).abs().max().item() for name in SCENARIOS}
    assert all(moved[name] > 1e-3 for name in SCENARIOS if name != "unequal"), moved
    assert (learned["weighted"] - learned["plain"]).abs().max() > 1e-3
