"""Anchors: which positions qualify, how they are drawn, what their blocks predict."""

from itertools import combinations, product

import pytest
import torch
from torch import Tensor, nn

from dspark_lightning.anchors import (
    block_label_indices,
    build_anchor_candidate_mask,
    build_eval_mask,
    context_doc_ids,
    create_noise_embed,
    create_position_ids,
    row_generator,
    sample_anchor_positions,
)

S, K = 20, 4
DOC_LENGTHS = (7, 9)  # two documents in a row of S tokens, then four of padding


def random_loss_mask(rows: int = 3, seed: int = 0) -> Tensor:
    return (torch.rand(rows, S, generator=torch.Generator().manual_seed(seed)) < 0.7).long()


def doc_remaining(rows: int = 3) -> Tensor:
    row = [length - 1 - i for length in DOC_LENGTHS for i in range(length)]
    return torch.tensor(row + [0] * (S - len(row))).expand(rows, -1)


def mask_with(candidates: int, seq_len: int) -> Tensor:
    """One row whose candidates are exactly the positions 0..candidates-1."""
    return (torch.arange(seq_len) <= candidates).long().unsqueeze(0)


def draw(loss_mask: Tensor, num_anchors: int, *generators: torch.Generator) -> tuple[Tensor, Tensor]:
    return sample_anchor_positions(loss_mask.shape[1], loss_mask, num_anchors, "cpu", generators=generators)


def chi_square_excess(counts: Tensor) -> float:
    """How many standard deviations the chi-square statistic of equally likely cells lies above its mean."""
    expected, freedom = counts.sum() / counts.numel(), counts.numel() - 1
    return float(((counts - expected).square().sum() / expected - freedom) / (2 * freedom) ** 0.5)


def test_candidates_by_hand() -> None:
    loss_mask = torch.tensor([[0, 1, 1, 1, 0, 1]])
    assert build_anchor_candidate_mask(6, loss_mask).tolist() == [[False, True, True, False, False]]
    last_of_document = torch.tensor([[2, 1, 0, 2, 1, 0]])
    packed = build_anchor_candidate_mask(6, loss_mask, last_of_document)
    assert packed.tolist() == [[False, True, False, False, False]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_candidates_for_any_mask_dtype(dtype: torch.dtype) -> None:
    loss_mask = random_loss_mask()
    candidates = build_anchor_candidate_mask(S, loss_mask.to(dtype))
    assert candidates.dtype == torch.bool
    assert torch.equal(candidates, build_anchor_candidate_mask(S, loss_mask))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("packed", [False, True])
def test_eval_mask_equals_the_definition(packed: bool, seed: int) -> None:
    loss_mask, remaining = random_loss_mask(seed=seed), doc_remaining()
    anchors = torch.arange(S).expand(3, -1)
    keep = torch.rand(3, S, generator=torch.Generator().manual_seed(seed)) < 0.8
    labels, safe = block_label_indices(anchors, K, S)
    extra = {"doc_remaining": remaining, "anchor_positions": anchors} if packed else {}
    mask = build_eval_mask(S, loss_mask, labels, safe, keep, **extra)
    for row, anchor, slot in product(range(3), range(S), range(K)):
        reachable = min(S - 1 - anchor, int(remaining[row, anchor]) if packed else S)
        supervised = all(anchor + j + 1 < S and loss_mask[row, anchor + j + 1] for j in range(slot + 1))
        assert mask[row, anchor, slot] == bool(keep[row, anchor] and slot < reachable and supervised)


def test_a_supervised_slot_behind_a_gap_does_not_count() -> None:
    loss_mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1]])
    labels, safe = block_label_indices(torch.tensor([[0]]), K, 7)
    mask = build_eval_mask(7, loss_mask, labels, safe, torch.tensor([[True]]))
    assert mask.tolist() == [[[True, True, False, False]]]


def test_labels_past_the_end_are_clamped_for_gathering() -> None:
    labels, safe = block_label_indices(torch.tensor([[0, 4]]), 3, 6)
    assert labels.tolist() == [[[1, 2, 3], [5, 6, 7]]]
    assert safe.tolist() == [[[1, 2, 3], [5, 5, 5]]]


def test_packed_eval_mask_needs_the_anchors() -> None:
    anchors = torch.tensor([[0]])
    labels, safe = block_label_indices(anchors, K, S)
    with pytest.raises(ValueError, match="anchor_positions"):
        build_eval_mask(S, random_loss_mask(1), labels, safe, anchors.bool(), doc_remaining=doc_remaining(1))


@pytest.mark.parametrize("seed", range(3))
def test_drawn_anchors_are_sorted_distinct_candidates(seed: int) -> None:
    loss_mask = random_loss_mask(seed=seed)
    candidates = build_anchor_candidate_mask(S, loss_mask)
    positions, keep = draw(loss_mask, 6, *(row_generator(seed, 0, row) for row in range(3)))
    for row in range(3):
        kept = positions[row][keep[row]].tolist()
        assert len(kept) == min(6, int(candidates[row].sum()))
        assert kept == sorted(set(kept))
        assert candidates[row][kept].all()


def test_packed_anchors_leave_out_the_last_token_of_a_document() -> None:
    everything = torch.ones(1, S, dtype=torch.int64)
    positions, keep = sample_anchor_positions(S, everything, S, "cpu", doc_remaining=doc_remaining(1))
    last = {DOC_LENGTHS[0] - 1, *range(sum(DOC_LENGTHS) - 1, S)}
    assert positions[keep].tolist() == [i for i in range(S) if i not in last]


@pytest.mark.parametrize("num_anchors", [5, 6, 12])
def test_enough_slots_take_every_candidate(num_anchors: int) -> None:
    positions, keep = draw(mask_with(5, S), num_anchors, torch.Generator())
    dummies = num_anchors - 5
    assert positions.tolist() == [[0, 1, 2, 3, 4] + [0] * dummies]
    assert keep.tolist() == [[True] * 5 + [False] * dummies]


@pytest.mark.parametrize("loss_mask", [torch.zeros(1, 8), torch.tensor([[1, 0, 1, 0, 1]]), torch.ones(1, 1)])
def test_a_row_without_candidates_gives_dummies(loss_mask: Tensor) -> None:
    positions, keep = draw(loss_mask, 3, torch.Generator())
    assert positions.tolist() == [[0, 0, 0]]
    assert not keep.any()


def subset_counts(num_draws: int, bias: bool = False) -> Tensor:
    """How often each 2-subset of 6 candidates is drawn."""
    subsets = {pair: i for i, pair in enumerate(combinations(range(6), 2))}
    counts = torch.zeros(len(subsets))
    for row in range(num_draws):
        positions, _ = draw(mask_with(6, S), 2, row_generator(0, 0, row))
        a, b = sorted({0, 1}) if bias and row % 20 == 0 else positions[0].tolist()
        counts[subsets[a, b]] += 1
    return counts


def test_every_subset_is_equally_likely() -> None:
    assert chi_square_excess(subset_counts(3000)) < 4


def test_the_uniformity_test_sees_a_bias_of_five_percent() -> None:
    assert chi_square_excess(subset_counts(3000, bias=True)) > 8


def test_every_candidate_of_a_long_row_is_equally_likely() -> None:
    counts = torch.zeros(40)
    for row in range(1000):
        counts[draw(mask_with(40, 64), 10, row_generator(1, 2, row))[0][0]] += 1
    assert chi_square_excess(counts) < 4


def test_padding_does_not_change_the_draw() -> None:
    short = mask_with(12, 16)
    padded = nn.functional.pad(short, (0, 24))
    for row in range(20):
        one, other = (draw(mask, 4, row_generator(3, 1, row))[0] for mask in (short, padded))
        assert torch.equal(one, other)


def test_neighbours_in_the_batch_do_not_change_the_draw() -> None:
    loss_mask = random_loss_mask(rows=4)
    together, keep = draw(loss_mask, 5, *(row_generator(0, 0, row) for row in range(4)))
    for rows in ([2], [3, 0], [1, 2, 3, 0]):
        apart, keep_apart = draw(loss_mask[rows], 5, *(row_generator(0, 0, row) for row in rows))
        assert torch.equal(apart, together[rows])
        assert torch.equal(keep_apart, keep[rows])


def test_generators_leave_the_global_one_alone() -> None:
    before = torch.random.get_rng_state()
    draw(mask_with(12, S), 4, row_generator(0, 0, 0))
    assert torch.equal(before, torch.random.get_rng_state())


def test_without_generators_the_global_one_decides() -> None:
    with torch.random.fork_rng(devices=[]):
        draws = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            draws.append(sample_anchor_positions(64, mask_with(60, 64), 8, "cpu")[0])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_one_generator_for_each_row() -> None:
    with pytest.raises(ValueError, match="3 rows, got 1"):
        draw(random_loss_mask(3), 4, torch.Generator())


def test_row_generator_tells_seed_epoch_and_row_apart() -> None:
    keys = [*product(range(4), range(4), range(30)), (1, 23, 4), (12, 3, 4), (1, 2, 34)]
    seeds = {row_generator(*key).initial_seed() for key in keys}
    assert len(seeds) == len(keys)


@pytest.mark.parametrize("other", [(8, 5, 3), (7, 6, 3), (7, 5, 4), (5, 7, 3)])
def test_seed_epoch_and_row_each_change_the_draw(other: tuple[int, int, int]) -> None:
    loss_mask = mask_with(60, 64)
    first, same = (draw(loss_mask, 8, row_generator(7, 5, 3))[0] for _ in range(2))
    assert torch.equal(first, same)
    assert not torch.equal(first, draw(loss_mask, 8, row_generator(*other))[0])


def test_document_ids_by_hand() -> None:
    ids = context_doc_ids(torch.tensor([[2, 3, 0], [1, 1, 4]]), 7, "cpu")
    assert ids[:, :6].tolist() == [[0, 0, 1, 1, 1, ids[0, 5]], [0, 1, 2, 2, 2, 2]]
    assert (ids[0, 5:] > 1).all()
    assert ids[1, 6] > 2


def test_block_input_by_hand() -> None:
    embed = nn.Embedding.from_pretrained(torch.arange(10.0).unsqueeze(-1))
    input_ids = torch.tensor([[3, 4, 5, 6]])
    anchors, keep = torch.tensor([[1, 2, 0]]), torch.tensor([[True, True, False]])
    noise = create_noise_embed(embed, input_ids, anchors, keep, mask_token_id=9, block_size=3)
    assert noise.flatten().tolist() == [4, 9, 9, 5, 9, 9, 9, 9, 9]


def test_block_positions_by_hand() -> None:
    anchors = torch.tensor([[1, 4]])
    assert create_position_ids(anchors, 3).tolist() == [[1, 2, 3, 4, 5, 6]]
    inside_documents = torch.tensor([[0, 1, 0, 1, 2]])
    assert create_position_ids(anchors, 3, inside_documents).tolist() == [[1, 2, 3, 2, 3, 4]]
