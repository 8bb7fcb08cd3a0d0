"""What two ranks hold, refuse and agree upon, under every strategy."""

from pathlib import Path
from typing import Any

import pytest

from ranks_facts import fit_uneven
from ranks_helpers import STRATEGIES, read_json, run_on_two_ranks

pytestmark = pytest.mark.distributed

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
SHARDED = ("fsdp1", "fsdp2")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("facts")
    run_on_two_ranks("ranks_facts.py", folder)
    return [read_json(folder / f"rank{rank}.json") for rank in (0, 1)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rope_and_loss_stay_fp32(ranks: list[dict[str, Any]], strategy: str, precision: str) -> None:
    weights = "torch.bfloat16" if precision == "bf16-true" else "torch.float32"
    for facts in ranks:
        seen = facts[f"{strategy} {precision}"]
        assert (seen["rope"], seen["loss"], seen["weights"]) == ([], ["torch.float32"], [weights])


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lightnings_own_policy_would_round_rope_and_is_refused(ranks: list[dict[str, Any]], precision: str) -> None:
    for facts in ranks:
        error = facts[f"Lightning's {precision}"]["error"]
        assert error.startswith("ValueError: RoPE frequencies of the draft are wrong: rotary_emb.inv_freq is bfloat16")
        assert "dspark_lightning.strategies.DSparkFSDPStrategy" in error


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("run, like", [("replicated", "bf16-mixed"), ("recomputed", "32-true")])
def test_neither_a_whole_target_nor_recomputation_changes_a_number(
    ranks: list[dict[str, Any]], strategy: str, run: str, like: str
) -> None:
    assert ranks[0][f"{strategy} {run}"]["tau"] == ranks[0][f"{strategy} {like}"]["tau"]


def test_lightnings_model_parallel_strategy_trains_with_its_sizes_set(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["fsdp2 by hand"] == ranks[0]["fsdp2 bf16-true"]


def test_only_rank_0_reads_the_target(ranks: list[dict[str, Any]]) -> None:
    assert [facts["loads"] for facts in ranks] == [5 * len(STRATEGIES), 0]


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_sharded_pair_is_held_in_parts(ranks: list[dict[str, Any]], strategy: str) -> None:
    """The embedded target has 1 443 840 weights, of which the head's 131 072 are the draft's."""
    for facts in ranks:
        sharded, whole = facts[f"{strategy} 32-true"], facts[f"{strategy} replicated"]
        assert whole["target_share"] == 1_443_840
        assert sharded["target_share"] == (1_443_840 - 131_072) / 2  # the root's weights too
        assert sharded["whole_vocabularies"] == 0  # between two steps; inside one the loss needs the head


@pytest.mark.parametrize("strategy", SHARDED)
def test_no_rank_ever_holds_the_whole_target(ranks: list[dict[str, Any]], strategy: str) -> None:
    """While it is split, the memory of rank 1 grows by its half; with each unit kept whole it would by three halves."""
    half = 4 * (1_443_840 - 131_072) / 2
    assert 0.5 * half < ranks[1][f"{strategy} loading"] < 1.3 * half


def test_ranks_that_hold_all_hold_embedding_and_head(ranks: list[dict[str, Any]]) -> None:
    """So what is counted above can be found."""
    assert ranks[0]["ddp 32-true"]["whole_vocabularies"] == 2


@pytest.mark.parametrize(
    "run, error",
    [
        ("default sizes", "the strategy has tensor_parallel_size 2, must be 1: set data_parallel_size to 2 and"),
        ("tensor parallel", "the strategy has tensor_parallel_size 2, must be 1: set data_parallel_size to 2 and"),
        ("training batches", "rank 1 has 2 training batches, rank 0 has 3: every rank must have as many"),
        ("validation batches", "rank 1 has 3 validation batches, rank 0 has 2: every rank must have as many"),
        ("optimizers", "configure_optimizers gives 2 optimizers, must give 1"),
        ("unreadable", "cannot read the target 'embedded': damaged"),
    ],
)
def test_every_rank_refuses_before_the_first_step(ranks: list[dict[str, Any]], run: str, error: str) -> None:
    assert all(facts[run]["error"].startswith(f"ValueError: {error}") for facts in ranks)


@pytest.mark.parametrize("run, val_rows", [("uneven", 5), ("one row", 1)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_that_do_not_come_out_even_count_once(
    ranks: list[dict[str, Any]], strategy: str, run: str, val_rows: int, tmp_path: Path
) -> None:
    alone = fit_uneven(tmp_path, "alone", val_rows)
    assert alone["steps"] == 4  # of 11 rows, two global batches of 4 in each of 2 epochs
    for facts in ranks:
        assert facts[f"{strategy} {run}"] == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_a_rank_without_a_batch_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="within local rank has zero length"):
        run_on_two_ranks("ranks_facts.py", tmp_path, "no-batch", timeout=60)
