"""A row decoded with made-up distributions: what comes out is the target's, at any temperature, with any threshold."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import dspark_lightning.decoding.row as row_module
from dspark_lightning.decoding.generate import end_tokens, speculative_generate
from dspark_lightning.decoding.row import DecodedRow
from dspark_lightning.decoding.verify import verify_draft
from dspark_lightning.heads import VanillaMarkov
from family_helpers import build_pair, shake
from test_speculative_generate import p_value

WORDS, BLOCK = 4, 3


class TableTarget:
    """Stands for `CachedTarget`: what follows a token is drawn from its row of a table of logits."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def feed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, len(tokens), 1), tokens[None, :, None].float()

    feed_on_trial = feed

    def keep(self, count: int) -> None:
        pass

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[..., 0].long()]


def table_draft(table: Tensor, confidence: Tensor) -> Any:
    """A draft whose Markov head is a table, and whose confidence is one of the previous token."""
    head = VanillaMarkov(WORDS, WORDS, 1)
    head.markov_w1.weight.data.copy_(table)
    head.markov_w2.weight.data.copy_(torch.eye(WORDS))
    return SimpleNamespace(
        markov_head=head,
        block_size=BLOCK,
        compute_logits=lambda hidden: torch.zeros(1, BLOCK, WORDS),
        predict_confidence_step=lambda hidden, previous: confidence[previous],
    )


def beginnings(cells: dict[tuple[int, ...], Any], length: int) -> dict[tuple[int, ...], Any]:
    """Counts or probabilities of the first `length` tokens."""
    summed: dict[tuple[int, ...], Any] = {}
    for cell, value in cells.items():
        summed[cell[:length]] = summed.get(cell[:length], 0) + value
    return summed


@pytest.mark.parametrize(("temperature", "threshold"), [(0.7, 0.5), (1.0, 0.0)])
def test_rows_are_distributed_as_the_target_at_any_temperature(
    temperature: float, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    truth = 1.2 * torch.randn(WORDS, WORDS, generator=generator)
    guess = truth + 0.7 * torch.randn(WORDS, WORDS, generator=generator)
    draft = table_draft(guess, torch.tensor([3.0, 3.0, -3.0, 0.0]))  # unsure of what follows word 2; 0.0 is exactly 0.5
    monkeypatch.setattr(row_module, "CachedTarget", lambda target: TableTarget(truth))
    monkeypatch.setattr(row_module, "draft_block", lambda *_: torch.zeros(1, BLOCK, 1))
    counts: dict[tuple[int, ...], int] = {}
    lengths: dict[tuple[int, int], int] = {}
    for _ in range(800):
        row = DecodedRow(None, draft, torch.tensor([0]), temperature, threshold, generator)  # type: ignore[arg-type]
        row.run(6, set())
        assert len(row.tokens) == 6
        cell = tuple(row.tokens[:4])
        counts[cell] = counts.get(cell, 0) + 1
        for each in row.rounds:
            lengths[each.proposed, each.accepted] = lengths.get((each.proposed, each.accepted), 0) + 1
    probs = torch.softmax(truth / temperature, -1)
    expected = {
        cell: float(torch.stack([probs[a, b] for a, b in itertools.pairwise((0, *cell))]).prod())
        for cell in itertools.product(range(WORDS), repeat=4)
    }
    assert lengths[BLOCK, BLOCK] > 100 and ((0, 0) in lengths or not threshold)  # whole blocks, and cut ones
    for length in (1, 2, 4):
        assert p_value(beginnings(counts, length), beginnings(expected, length)) > 0.001


def test_behind_a_whole_block_the_target_alone_speaks() -> None:
    p, q = torch.tensor([[0.9, 0.05, 0.05]]), torch.tensor([[0.9, 0.05, 0.05], [0.6, 0.2, 0.2]])
    generator = torch.Generator().manual_seed(0)
    seen = torch.zeros(3)
    for _ in range(600):
        accepted, following = verify_draft(torch.tensor([0]), p, q, generator)
        assert accepted == 1
        seen[following] += 1
    assert seen[0] / 600 == pytest.approx(0.6, abs=0.08)  # four standard deviations


def test_a_threshold_keeps_what_is_just_as_sure() -> None:
    target, draft = build_pair("qwen3")
    shake(draft)
    assert draft.confidence_head is not None
    with torch.no_grad():
        draft.confidence_head.proj.weight.zero_()
        draft.confidence_head.proj.bias.zero_()
    row = DecodedRow(target, draft, torch.tensor([7, 8, 9]), 0.0, 0.5)
    row.run(8, set())
    assert row.rounds[0].proposed == draft.block_size  # sigmoid(0) is 0.5


def test_a_threshold_cuts_before_the_first_unsure_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Confidences of the previous words 0, 1, 2, 3 along the block: sure, sure, unsure, sure."""
    ring = torch.full((WORDS, WORDS), -50.0)
    for word in range(WORDS):
        ring[word, (word + 1) % WORDS] = 50.0
    monkeypatch.setattr(row_module, "CachedTarget", lambda target: TableTarget(ring))
    monkeypatch.setattr(row_module, "draft_block", lambda *_: torch.zeros(1, BLOCK, 1))
    draft = table_draft(ring, torch.tensor([3.0, -3.0, 3.0, 3.0]))
    row = DecodedRow(None, draft, torch.tensor([3]), 0.0, 0.5)  # type: ignore[arg-type]
    assert row.tokens == [0]
    row.advance(9, set())  # behind words 0, 1, 2 come 1, 2, 3; behind 1 it is unsure
    assert row.rounds == [(1, 1, 1, [3.0, -3.0, 3.0])]


def test_each_of_several_end_tokens_ends_a_row() -> None:
    target, draft = build_pair("qwen3")
    prompt = torch.tensor([[7, 8, 9, 10]])
    free = speculative_generate(target.model, draft, prompt, max_new_tokens=12, stop_token_ids=[]).sequences[0, 4:]
    last = int(free[5])
    unused = next(token for token in range(200, 250) if token not in free)
    target.model.generation_config.eos_token_id = [unused, last]
    assert end_tokens(target.model) == [unused, last]
    ours = speculative_generate(target.model, draft, prompt, max_new_tokens=12).sequences[0, 4:].tolist()
    assert ours == free[: free.tolist().index(last) + 1].tolist()


def ring_row(monkeypatch: pytest.MonkeyPatch, confidence: Tensor) -> DecodedRow:
    """Behind word 3: each word is followed by the next, and the draft knows it."""
    ring = torch.full((WORDS, WORDS), -50.0)
    for word in range(WORDS):
        ring[word, (word + 1) % WORDS] = 50.0
    monkeypatch.setattr(row_module, "CachedTarget", lambda target: TableTarget(ring))
    monkeypatch.setattr(row_module, "draft_block", lambda *_: torch.zeros(1, BLOCK, 1))
    return DecodedRow(None, table_draft(ring, confidence), torch.tensor([3]), 0.0)  # type: ignore[arg-type]


def test_the_confidence_of_each_slot_is_of_the_token_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ring_row(monkeypatch, torch.tensor([0.0, 1.0, 2.0, 3.0]))
    row.advance(9, set())  # words 1, 2, 3 behind the anchor 0
    assert row.rounds[0].confidence == [0.0, 1.0, 2.0]


def test_a_stop_token_among_the_accepted_ends_what_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ring_row(monkeypatch, torch.zeros(WORDS))
    row.run(9, {2})
    assert row.tokens == [0, 1, 2]
    assert [each[:3] for each in row.rounds] == [(3, 2, 2)]


def test_a_stop_token_behind_the_accepted_leaves_all_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ring_row(monkeypatch, torch.zeros(WORDS))
    row.draft.markov_head.markov_w1.weight.data[1] = torch.tensor([9.0, 0, 0, 0])  # wrong behind word 1
    row.run(9, {2})
    assert row.tokens == [0, 1, 2]
    assert [each[:3] for each in row.rounds] == [(3, 3, 1)]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_generator_is_all_that_is_random(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The global one is neither read nor moved."""
    generator = torch.Generator().manual_seed(1)
    tables = torch.randn(2, WORDS, WORDS, generator=generator)
    monkeypatch.setattr(row_module, "CachedTarget", lambda target: TableTarget(tables[0]))
    monkeypatch.setattr(row_module, "draft_block", lambda *_: torch.zeros(1, BLOCK, 1))
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        draft = table_draft(tables[1], torch.zeros(WORDS))
        torch.set_rng_state(before)
        own = torch.Generator().manual_seed(7)
        row = DecodedRow(None, draft, torch.tensor([0]), temperature, 0.0, own)  # type: ignore[arg-type]
        row.run(40, set())
        runs.append(row.tokens)
        assert torch.equal(torch.get_rng_state(), before)
    assert runs[0] == runs[1]


def test_a_draft_in_train_mode_is_put_into_eval_mode() -> None:
    target, draft = build_pair("qwen3")
    draft.train()
    speculative_generate(target.model, draft, torch.tensor([[7, 8, 9]]), max_new_tokens=2)
    assert not draft.training
