"""Speculative decoding gives what the target alone would, in every family, whatever the draft proposes."""

import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import dspark_lightning.decoding.row
from dspark_lightning import speculative_generate
from dspark_lightning.decoding.context_memory import ContextMemory
from dspark_lightning.decoding.draft_block import draft_block
from dspark_lightning.decoding.sample_block import SampledBlock
from dspark_lightning.decoding.sampling import logits_to_probs
from dspark_lightning.decoding.verify import verify_draft
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.outputs import DSparkHiddenOutput
from dspark_lightning.target import HFDSparkTargetModel
from family_helpers import ARGS, FAMILIES, VARIANTS, build_pair, shake, token_ids
from helpers import seeded
from tiny_target import build_tiny_target

ALL = [*FAMILIES, *VARIANTS]
NEW = 30


def prompts(count: int) -> list[Tensor]:
    """Of several lengths, [1, S]."""
    return [torch.randint(6, 240, (1, 4 + 6 * i), generator=torch.Generator().manual_seed(i)) for i in range(count)]


def greedy(model: PreTrainedModel, prompt: Tensor, new: int = NEW, end: int | None = None) -> Tensor:
    """What transformers itself generates."""
    with torch.no_grad():
        sequences: Tensor = model.generate(
            input_ids=prompt, max_new_tokens=new, do_sample=False, eos_token_id=end, pad_token_id=0
        )
    return sequences


class Oracle:
    """Stands for the sampling of a draft that knows the target's output, and is wrong at chosen slots.

    Args:
        draft: whose method it takes the place of.
        future: all tokens that the target will give, [S + L].
        right: how many slots are right, round after round, over and over.
    """

    def __init__(self, draft: DSparkDraft, future: Tensor, right: list[int]) -> None:
        self.size, self.vocabulary = draft.block_size, draft.config.vocab_size
        self.future, self.right, self.rounds = future, right, 0

    def at(self, position: int) -> tuple[Tensor, Tensor]:
        """Tokens [1, K] behind an anchor, and logits [1, K, V] that are sure of them."""
        tokens = torch.full((1, self.size), 5)
        known = self.future[position + 1 : position + 1 + self.right[self.rounds % len(self.right)]]
        tokens[0, : len(known)] = known[: self.size]
        self.rounds += 1
        return tokens, 100.0 * torch.nn.functional.one_hot(tokens, self.vocabulary)


def install(monkeypatch: pytest.MonkeyPatch, oracle: Oracle, start: int) -> list[tuple[int, Tensor]]:
    """Have the draft propose what the oracle says; lists position and block states [1, K, H] of the anchors."""
    blocks: list[tuple[int, Tensor]] = []
    next_anchor = [start]

    def sample(
        markov: Any, logits: Tensor, anchor: Tensor, temperature: float, hidden: Tensor, *_: Any
    ) -> SampledBlock:
        position = next_anchor[0]
        blocks.append((position, hidden))
        next_anchor[0] += 1 + oracle.right[oracle.rounds % len(oracle.right)]
        return SampledBlock(*oracle.at(position), None)

    monkeypatch.setattr(dspark_lightning.decoding.row, "sample_block", sample)
    return blocks


@pytest.mark.parametrize("family", ALL)
def test_greedy_tokens_are_those_of_the_target(family: str) -> None:
    target, draft = build_pair(family)
    shake(draft)
    for prompt in prompts(3):
        ours = speculative_generate(target.model, draft, prompt, max_new_tokens=NEW, stop_token_ids=[])
        assert torch.equal(ours.sequences, greedy(target.model, prompt))


@pytest.mark.parametrize("family", ALL)
def test_every_number_of_accepted_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches lose 4 to 0 tokens: behind windows that are full, and of compressed and recurrent states."""
    target, draft = build_pair(family)
    shake(draft)
    prompt, right = prompts(3)[2], [2, 4, 0, 3, 1]
    expected = greedy(target.model, prompt, new=41)
    blocks = install(monkeypatch, Oracle(draft, expected[0], right), start=prompt.shape[1])
    ours = speculative_generate(target.model, draft, prompt, max_new_tokens=41, stop_token_ids=[])
    assert torch.equal(ours.sequences, expected)
    accepted = ours.accepted_lengths[0]
    assert accepted[:-1] == (right * 3)[: len(accepted) - 1] and len(accepted) == 14
    assert 1 + sum(count + 1 for count in accepted) == 41
    # A draft that saw too little or too much would cost acceptance and nothing else.
    trained = trained_blocks(target, draft, expected, [position for position, _ in blocks])
    for (_, hidden), there in zip(blocks, trained, strict=True):
        torch.testing.assert_close(hidden[0], there, atol=1e-4, rtol=1e-3)


def trained_blocks(target: HFDSparkTargetModel, draft: DSparkDraft, ids: Tensor, anchors: list[int]) -> Tensor:
    """Block states [N, K, H] at anchors of ids [1, S], all in one pass as in training."""
    ones, places = torch.ones_like(ids), torch.tensor([anchors])
    batch = target.generate_batch(ids, ones, ones)
    with torch.no_grad():
        output = draft(
            **vars(batch), anchor_positions=places, block_keep_mask=torch.ones_like(places).bool(), output="hidden"
        )
    assert isinstance(output, DSparkHiddenOutput)
    return output.hidden[0]


@pytest.mark.parametrize("family", ALL)
def test_a_draft_with_memory_computes_what_it_was_trained_to(family: str) -> None:
    """Anchors of one row, one after the other, against all of them in one pass as in training."""
    target, draft = build_pair(family)
    shake(draft)
    ids, anchors = token_ids(1, 24), [3, 4, 9, 15]
    trained = trained_blocks(target, draft, ids, anchors)
    features = target.generate_batch(ids, torch.ones_like(ids), torch.ones_like(ids)).target_hidden_states
    memory, seen = ContextMemory(), 0
    with torch.no_grad():
        for block, anchor in enumerate(anchors):
            memory.next_block()
            hidden = draft_block(draft, ids[0, anchor : anchor + 1], anchor, features[:, seen:anchor], memory)
            torch.testing.assert_close(hidden[0], trained[block], atol=2e-5, rtol=1e-4)
            seen = anchor


def test_rows_of_a_batch_are_decoded_alike_however_they_are_padded() -> None:
    target, draft = build_pair("qwen3")
    short, long = prompts(2)
    room = long.shape[1] - short.shape[1]
    fill = torch.zeros(1, room, dtype=torch.int64)
    for left in (True, False):
        parts = (fill, short) if left else (short, fill)
        ids = torch.cat([torch.cat(parts, dim=1), long])
        mask = torch.cat([torch.cat([torch.zeros_like(p) if p is fill else torch.ones_like(p) for p in parts], 1)] * 2)
        mask[1] = 1
        ours = speculative_generate(target.model, draft, ids, attention_mask=mask, max_new_tokens=9, stop_token_ids=[])
        assert torch.equal(ours.sequences[:, : ids.shape[1]], ids)
        for row, prompt in enumerate((short, long)):
            assert torch.equal(ours.sequences[row, -9:], greedy(target.model, prompt, new=9)[0, -9:])


@pytest.mark.parametrize("place", [0, 1, 4, 7])
def test_a_stop_token_ends_a_row_wherever_it_comes(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first token, as an accepted one inside a block, and behind one."""
    target, draft = build_pair("qwen3")
    prompt = prompts(1)[0]
    free = greedy(target.model, prompt)[0, prompt.shape[1] :]
    stop = int(free[place])
    first = free.tolist().index(stop)
    install(monkeypatch, Oracle(draft, torch.cat([prompt[0], free]), [4, 1]), start=prompt.shape[1])
    ours = speculative_generate(target.model, draft, prompt, max_new_tokens=NEW, stop_token_ids=[stop])
    assert ours.sequences[0, prompt.shape[1] :].tolist() == free[: first + 1].tolist()


def test_stop_tokens_come_from_the_target_and_short_rows_are_padded() -> None:
    target, draft = build_pair("qwen3")
    prompt = torch.cat([prompts(1)[0]] * 2)
    prompt[1, 0] += 1
    free = [greedy(target.model, row.unsqueeze(0))[0, prompt.shape[1] :].tolist() for row in prompt]
    end = next(token for token in free[0] if token not in free[1])
    target.model.generation_config.eos_token_id = end
    ours = speculative_generate(target.model, draft, prompt, max_new_tokens=NEW)
    length = free[0].index(end) + 1
    assert ours.sequences[0, prompt.shape[1] :].tolist() == free[0][:length] + [0] * (NEW - length)
    assert ours.sequences[1, prompt.shape[1] :].tolist() == free[1]


def test_a_threshold_cuts_blocks_and_changes_no_token() -> None:
    target, draft = build_pair("qwen3")
    shake(draft)
    prompt = prompts(2)[1]
    assert draft.confidence_head is not None
    for bias, proposed in ((-20.0, 0), (20.0, 4)):
        draft.confidence_head.proj.bias.data.fill_(bias)
        ours = speculative_generate(
            target.model, draft, prompt, max_new_tokens=12, confidence_threshold=0.5, stop_token_ids=[]
        )
        assert torch.equal(ours.sequences, greedy(target.model, prompt, new=12))
        if not proposed:
            assert ours.accepted_lengths == [[0] * 11]  # a round for each token behind the first


def joint(logits_of: Any, first: Tensor, length: int, vocabulary: int) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of `length` tokens."""
    probabilities = {}
    for tokens in product(range(vocabulary), repeat=length):
        sequence = torch.cat([first, torch.tensor(tokens)])
        probs = logits_to_probs(logits_of(sequence), 1.0)
        places = torch.arange(len(first) - 1, len(sequence) - 1)
        probabilities[tokens] = float(probs[places, sequence[1:][places]].prod())
    return probabilities


def p_value(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> float:
    """Of a chi-square test, cells that are expected less than five times taken together."""
    total = sum(counts.values())
    big = [cell for cell, share in expected.items() if share * total >= 5]
    seen = [counts.get(cell, 0) for cell in big]
    wanted = [expected[cell] * total for cell in big]
    rest = total - sum(seen), total - sum(wanted)
    if rest[1] > 1:
        seen, wanted = [*seen, rest[0]], [*wanted, rest[1]]
    statistic = sum((s - w) ** 2 / w for s, w in zip(seen, wanted, strict=True))
    half = torch.tensor([(len(seen) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*half))


def draw_blocks(verify: Any, draws: int) -> tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], float]]:
    """Pairs of tokens through a block of two, with draft and target distributions that depend on the token before."""
    generator = torch.Generator().manual_seed(0)
    draft, target = (torch.softmax(1.5 * torch.randn(5, 4, generator=generator), dim=-1) for _ in range(2))
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(draws):
        x = [int(torch.multinomial(draft[4], 1, generator=generator))]
        x.append(int(torch.multinomial(draft[x[0]], 1, generator=generator)))
        p, q = draft[[4, x[0]]], target[[4, x[0], x[1]]]
        accepted, following = verify(torch.tensor(x), p, q, generator)
        tokens = [*x[:accepted], int(following)]
        while len(tokens) < 2:  # what the next round would give
            tokens.append(int(torch.multinomial(target[tokens[-1]], 1, generator=generator)))
        counts[tuple(tokens[:2])] = counts.get(tuple(tokens[:2]), 0) + 1
    expected = {(a, b): float(target[4, a] * target[a, b]) for a, b in product(range(4), repeat=2)}
    return counts, expected


def without_residual(tokens: Tensor, p: Tensor, q: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The mistake to be found: behind a rejection, drawing from the target itself."""
    accepted, _ = verify_draft(tokens, p, q, generator)
    return accepted, torch.multinomial(q[accepted], 1, generator=generator)


def test_verified_tokens_are_distributed_as_the_targets() -> None:
    assert p_value(*draw_blocks(verify_draft, 6000)) > 0.01


def test_the_test_finds_a_missing_residual() -> None:
    assert p_value(*draw_blocks(without_residual, 6000)) < 1e-6


@pytest.mark.slow
def test_sampled_sequences_are_distributed_as_the_targets() -> None:
    """End to end: three tokens of a target with twelve words, against all that it could say."""
    model = build_tiny_target("qwen3", vocab_size=12)
    with seeded(1):
        draft = build_draft_model(model.config, **ARGS)
    draft.initialize_embeddings_and_head(model.get_input_embeddings(), model.get_output_embeddings())
    shake(draft)
    prompt, generator = torch.tensor([[6, 2, 7]]), torch.Generator().manual_seed(3)
    counts: dict[tuple[int, ...], int] = {}
    options: dict[str, Any] = {"max_new_tokens": 3, "temperature": 1.0, "stop_token_ids": []}
    for _ in range(3000):
        ours = speculative_generate(model, draft, prompt, **options, generator=generator)
        cell = tuple(ours.sequences[0, 3:].tolist())
        counts[cell] = counts.get(cell, 0) + 1
    with torch.no_grad():
        expected = joint(lambda ids: model(ids.unsqueeze(0)).logits[0], prompt[0], 3, 12)
    assert sum(expected.values()) == pytest.approx(1)
    assert p_value(counts, expected) > 0.01


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more, got 0"),
        ({"temperature": -0.5}, "temperature must be 0 (greedy) or at least 0.001, got -0.5"),
        ({"confidence_threshold": 1.5}, "confidence_threshold must lie in 0..1, got 1.5"),
        ({"attention_mask": torch.zeros(1, 4)}, "the prompt of row 0 is empty"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], error: str) -> None:
    target, draft = build_pair("qwen3")
    with pytest.raises(ValueError, match=re.escape(error)):
        speculative_generate(target.model, draft, prompts(1)[0], **({"max_new_tokens": 4} | options))


def test_arguments_in_the_wrong_place_are_named() -> None:
    target, draft = build_pair("qwen3")
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((draft, target.model, prompts(1)[0]), "target must be a PreTrainedModel, got a Qwen3DSparkModel"),
        ((target.model, target.model, prompts(1)[0]), "draft must be a DSparkDraft, got a Qwen3ForCausalLM"),
        ((target.model, draft, prompts(1)[0][0]), "input_ids must be a tensor [rows, tokens], got (4,)"),
    ]
    for arguments, error in wrong:
        with pytest.raises(ValueError, match=re.escape(error)):
            speculative_generate(*arguments, max_new_tokens=4)


def test_a_threshold_needs_a_confidence_head() -> None:
    target, draft = build_pair("qwen3", confidence_head_alpha=0.0)
    with pytest.raises(ValueError, match=r"confidence_threshold 0\.5 needs a draft with a confidence head"):
        speculative_generate(target.model, draft, prompts(1)[0], max_new_tokens=4, confidence_threshold=0.5)
