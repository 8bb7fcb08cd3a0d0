"""Markov heads, the confidence head, and sampling through them."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dspark_lightning.decoding.sampling import logits_to_probs, sample_tokens
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.heads import (
    AcceptRatePredictor,
    GatedMarkovHead,
    MarkovHead,
    RNNHead,
    VanillaMarkov,
    build_markov_head,
)
from helpers import seeded, tiny_qwen3_config

V, H, R, K = 11, 6, 4, 5
KINDS = {"vanilla": VanillaMarkov, "gated": GatedMarkovHead, "rnn": RNNHead}


def build_head(kind: str, seed: int = 0) -> MarkovHead:
    with seeded(seed):
        return build_markov_head(SimpleNamespace(vocab_size=V, hidden_size=H, markov_rank=R, markov_head_type=kind))


def blocks(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Base logits, previous tokens and hidden states of [2, 3] blocks."""
    with seeded(seed):
        return torch.randn(2, 3, K, V), torch.randint(0, V, (2, 3, K)), torch.randn(2, 3, K, H)


def build_draft(kind: str = "vanilla", rank: int = 8, scale: float = 1.0) -> DSparkDraft:
    """A draft whose Markov bias is of the size of the logits."""
    heads = {"markov_rank": rank, "markov_head_type": kind}
    with seeded(0):
        draft = build_draft_model(tiny_qwen3_config(), mask_token_id=96, num_draft_layers=1, **heads)
        for parameter in draft.markov_head.parameters() if rank else ():
            torch.nn.init.normal_(parameter, std=scale)
    return draft


def chi_square_excess(counts: Tensor, probs: Tensor) -> float:
    """How many standard deviations the chi-square statistic lies above its mean."""
    expected, freedom = probs * counts.sum(), counts.numel() - 1
    return float((((counts - expected).square() / expected).sum() - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_build_markov_head(kind: str) -> None:
    assert type(build_head(kind)) is KINDS[kind]


def test_no_rank_no_head() -> None:
    assert build_markov_head(SimpleNamespace(vocab_size=V, hidden_size=H, markov_rank=0)) is None


def test_the_type_defaults_to_vanilla() -> None:
    assert type(build_markov_head(SimpleNamespace(vocab_size=V, hidden_size=H, markov_rank=R))) is VanillaMarkov


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(ValueError, match=r"vanilla, gated, rnn, got 'lstm'"):
        build_head("lstm")


@pytest.mark.parametrize("kind", KINDS)
def test_latents_equal_single_steps(kind: str) -> None:
    head, (_, prev, hidden) = build_head(kind), blocks()
    state, stepped = head.initial_state(hidden[..., 0, :]), []
    for slot in range(K):
        latent, state = head.step(prev[..., slot], hidden[..., slot, :], state)
        stepped.append(latent)
    assert_close(head.latents(prev, hidden), torch.stack(stepped, dim=-2))


@pytest.mark.parametrize("kind", KINDS)
def test_the_bias_is_w2_of_the_latent(kind: str) -> None:
    head, (base, prev, hidden) = build_head(kind), blocks()
    bias = head.latents(prev, hidden) @ head.markov_w2.weight.T
    assert_close(head(base, prev, hidden), base + bias)


@pytest.mark.parametrize("kind", KINDS)
def test_later_slots_do_not_reach_back(kind: str) -> None:
    head, (_, prev, hidden) = build_head(kind), blocks()
    before = head.latents(prev, hidden)
    prev[..., 2] = (prev[..., 2] + 1) % V
    hidden[..., 2, :] += 1
    after = head.latents(prev, hidden)
    assert torch.equal(before[..., :2, :], after[..., :2, :])
    assert not torch.equal(before[..., 2, :], after[..., 2, :])
    assert torch.equal(before[..., 3:, :], after[..., 3:, :]) == (kind != "rnn")


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_starts_afresh(kind: str) -> None:
    head, (_, prev, hidden) = build_head(kind), blocks()
    alone = head.latents(prev[1, 2], hidden[1, 2])
    assert_close(head.latents(prev, hidden)[1, 2], alone)


def test_vanilla_by_hand() -> None:
    head = build_head("vanilla")
    head.markov_w1.weight.data = torch.arange(V * R).view(V, R).float()
    head.markov_w2.weight.data = torch.eye(V, R)
    base, prev, hidden = blocks()
    bias = head(base, prev, hidden) - base
    assert_close(bias[..., :R], 4.0 * prev.unsqueeze(-1) + torch.arange(4.0))
    assert bias[..., R:].abs().max() == 0


@pytest.mark.parametrize(("gate_bias", "share"), [(0.0, 0.5), (math.log(3), 0.75), (-math.log(3), 0.25)])
def test_gated_by_hand(gate_bias: float, share: float) -> None:
    head, (_, prev, hidden) = build_head("gated"), blocks()
    torch.nn.init.zeros_(head.gate_proj.weight)
    torch.nn.init.constant_(head.gate_proj.bias, gate_bias)
    assert_close(head.latents(prev, hidden), share * head.markov_w1(prev))


def test_the_gate_reads_hidden_first_then_the_token() -> None:
    head, (_, prev, hidden) = build_head("gated"), blocks()
    torch.nn.init.zeros_(head.gate_proj.bias)
    torch.nn.init.zeros_(head.gate_proj.weight)
    head.gate_proj.weight.data[:, 0] = 1.0
    token = head.markov_w1(prev)
    assert_close(head.latents(prev, hidden), torch.sigmoid(hidden[..., :1]) * token)


def test_rnn_by_hand() -> None:
    """With constant gate g and candidate c, the state is (1 - g^k) tanh(c) before slot k; the output shows it."""
    head, (_, prev, hidden) = build_head("rnn"), blocks()
    torch.nn.init.zeros_(head.joint_proj.weight)
    head.joint_proj.bias.data = torch.cat([torch.full((R,), math.log(3)), torch.full((R,), 0.8), torch.zeros(R)])
    head.joint_proj.weight.data[2 * R :, :R] = torch.eye(R)  # output part reads the state
    slots = torch.arange(K)
    state = (1 - 0.75**slots) * math.tanh(0.8)
    assert_close(head.latents(prev, hidden), torch.tanh(state).view(K, 1).expand(2, 3, K, R))


def test_rnn_inputs_are_state_token_hidden() -> None:
    head, (_, prev, hidden) = build_head("rnn"), blocks()
    torch.nn.init.zeros_(head.joint_proj.weight)
    torch.nn.init.zeros_(head.joint_proj.bias)
    head.joint_proj.weight.data[2 * R :, R : 2 * R] = torch.eye(R)
    head.joint_proj.weight.data[2 * R, 2 * R] = 1.0
    expected = head.markov_w1(prev) + hidden[..., :1] * torch.eye(R)[0]
    assert_close(head.latents(prev, hidden), torch.tanh(expected))


def test_confidence_by_hand() -> None:
    head = AcceptRatePredictor(3)
    head.proj.weight.data, head.proj.bias.data = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0.5])
    assert head(torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, -1.0]])).tolist() == [6.5, -0.5]


@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16])
def test_confidence_is_fp32_everywhere(cast: torch.dtype) -> None:
    head = AcceptRatePredictor(64).to(cast)
    features = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(cast)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(features)
    exact = features.double() @ head.proj.weight.double().T.squeeze(-1) + head.proj.bias.double()
    assert logits.dtype == torch.float32
    assert_close(logits.double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_probabilities_by_hand(temperature: float) -> None:
    probs = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    sharpened = probs ** (1 / temperature)
    assert_close(logits_to_probs(probs.log(), temperature), (sharpened / sharpened.sum()).float())


def test_greedy_probabilities_are_one_hot() -> None:
    assert logits_to_probs(torch.tensor([[0.0, 2.0, 1.0]]).bfloat16(), 0.0).tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("sample", [logits_to_probs, sample_tokens])
def test_a_negative_temperature_is_refused(sample: object) -> None:
    with pytest.raises(ValueError, match=r"got -0\.5"):
        sample(torch.zeros(1, 3), -0.5)


@pytest.mark.parametrize(("planted", "low", "high"), [(0.0, -4, 4), (0.15, 8, 1e9)])
def test_sampling_follows_the_softmax(planted: float, low: float, high: float) -> None:
    """The second case draws from logits that are slightly off, to show that the test would see it."""
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0])
    drawn_from = logits + planted * torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    tokens = sample_tokens(drawn_from.expand(20000, -1), 0.8, torch.Generator().manual_seed(0))
    excess = chi_square_excess(tokens.bincount(minlength=5).float(), torch.softmax(logits / 0.8, dim=-1))
    assert low < excess < high


def test_blocks_are_sampled_from_the_chain() -> None:
    """P(x1, x2) = softmax(base1 + bias(first))[x1] * softmax(base2 + bias(x1))[x2]."""
    draft = build_draft(rank=2)
    base = torch.full((1, 2, 97), -1e4)
    base[..., :3] = torch.tensor([[0.0, 0.5, -0.5], [0.3, 0.0, 0.0]])
    first = torch.tensor([7])
    head, generator = draft.markov_head, torch.Generator().manual_seed(0)
    tokens, _ = draft.sample_draft_tokens(base.expand(9000, -1, -1), first.expand(9000), 1.0, generator=generator)
    bias = head.markov_w2(head.markov_w1(torch.tensor([7, 0, 1, 2])))[:, :3].detach()
    chain = torch.softmax(base[0, 0, :3] + bias[0], -1).unsqueeze(-1) * torch.softmax(base[0, 1, :3] + bias[1:], -1)
    counts = (tokens[:, 0] * 3 + tokens[:, 1]).bincount(minlength=9).float()
    assert chi_square_excess(counts, chain.flatten()) < 4
    independent = chain.sum(1, keepdim=True) * chain.sum(0)
    assert chi_square_excess(counts, independent.flatten()) > 8


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_logits_equal_teacher_forcing_on_the_sample(kind: str, temperature: float) -> None:
    draft = build_draft(kind)
    with seeded(1):
        base, hidden, first = torch.randn(2, K, 97), torch.randn(2, K, 32), torch.tensor([3, 90])
    generator = torch.Generator().manual_seed(0)
    tokens, corrected = draft.sample_draft_tokens(base, first, temperature, hidden, generator)
    prev = torch.cat([first.unsqueeze(1), tokens[:, :-1]], dim=1)
    assert_close(corrected, draft.markov_head(base, prev, hidden), rtol=1e-5, atol=1e-5)
    assert temperature or torch.equal(tokens, corrected.argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_one_step_equals_the_first_slot(kind: str, temperature: float) -> None:
    draft = build_draft(kind)
    with seeded(1):
        base, hidden, first = torch.randn(2, K, 97), torch.randn(2, K, 32), torch.tensor([3, 90])
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    block = draft.sample_draft_tokens(base, first, temperature, hidden, generators[0])
    step = draft.sample_draft_token_step(base[:, 0], first, temperature, hidden[:, 0], generators[1])
    assert torch.equal(step[0], block[0][:, 0])
    assert_close(step[1], block[1][:, 0])


def test_the_generator_decides_the_block() -> None:
    draft = build_draft()
    base, first = torch.zeros(2, K, 97), torch.tensor([3, 90])
    draws = [
        draft.sample_draft_tokens(base, first, 1.0, generator=torch.Generator().manual_seed(seed))[0]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_heads_that_read_hidden_states_ask_for_them(kind: str) -> None:
    with pytest.raises(ValueError, match=f"hidden_states must be given: the {kind} head"):
        build_draft(kind).sample_draft_tokens(torch.zeros(1, K, 97), torch.tensor([0]))


def test_without_a_head_the_logits_stay() -> None:
    base = torch.randn(2, K, 97, generator=torch.Generator().manual_seed(0))
    tokens, corrected = build_draft(rank=0).sample_draft_tokens(base, torch.tensor([3, 90]))
    assert torch.equal(corrected, base)
    assert torch.equal(tokens, base.argmax(-1))
