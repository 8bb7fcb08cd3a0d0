"""Sampling of `dspark regenerate`: settings, and that tokens are distributed as they should be."""

import re
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from dspark_lightning.decoding.sampling import place_generator
from dspark_lightning.regeneration.sampling import RowNoise, SampleByRow, Sampling
from helpers import tiny_qwen3

CPU = torch.device("cpu")


def generators(*places: str) -> list[torch.Generator]:
    return [place_generator(0, place, CPU) for place in places]


def test_the_largest_noisy_score_is_a_sample() -> None:
    """Frequencies of 4,000 rows against the probabilities: chi-squared is below its 99.99 % quantile, 21.1."""
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    rows = 4000
    noisy = RowNoise(generators(*map(str, range(rows))))(torch.zeros(rows, 1), probs.log().expand(rows, -1))
    counts = noisy.argmax(dim=-1).bincount(minlength=5)
    assert counts[4] == 0
    expected = probs[:4] * rows
    assert ((counts[:4] - expected) ** 2 / expected).sum() < 21.1


def test_generate_samples_from_the_targets_distribution() -> None:
    """First tokens of 3,000 answers against the target's own probabilities, temperature and top-k included."""
    model = tiny_qwen3(pad_token_id=0)
    prompt = torch.tensor([[5, 9, 17]])
    with torch.no_grad():
        logits = model(prompt).logits[0, -1]
    likely = (logits / 0.7).topk(4)
    probs = likely.values.softmax(-1)
    rows = 3000
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 4, "top_p": 1.0, "max_new_tokens": 1}
    sampler: Any = SampleByRow(generators(*map(str, range(rows))))
    tokens = model.generate(
        prompt.expand(rows, -1), attention_mask=torch.ones(rows, 3), custom_generate=sampler, **settings
    )[:, -1]
    counts = (tokens[:, None] == likely.indices).sum(0)
    assert counts.sum() == rows
    assert ((counts - probs * rows) ** 2 / (probs * rows)).sum() < 21.1


def test_noise_belongs_to_the_row() -> None:
    scores = torch.zeros(1, 11)
    alone = RowNoise(generators("b"))
    batch = RowNoise(generators("a", "b", "c"))
    ids = torch.zeros(1, 1)
    for _ in range(3):  # steps
        assert torch.equal(batch(ids.expand(3, 1), scores.expand(3, -1))[1], alone(ids, scores)[0])
    assert not torch.equal(RowNoise(generators("a"))(ids, scores), RowNoise(generators("b"))(ids, scores))


RECOMMENDED = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 99}


@pytest.mark.parametrize(
    ("recommended", "asked", "expected"),
    [
        (RECOMMENDED, Sampling(), (True, 0.6, 0.95, 20, 99)),
        (RECOMMENDED, Sampling(temperature=0), (False, None, None, None, 99)),
        (RECOMMENDED, Sampling(temperature=1.0, top_k=0, max_new_tokens=7), (True, 1.0, 0.95, 0, 7)),
        ({}, Sampling(), (False, None, None, None, 1024)),
        ({}, Sampling(top_p=0.5), (True, 1.0, 0.5, 0, 1024)),
        ({"do_sample": True, "temperature": 0.6}, Sampling(), (True, 0.6, 1.0, 0, 1024)),  # not generate's top_k 50
    ],
)
def test_what_is_given_wins_over_what_is_recommended(
    recommended: dict[str, Any], asked: Sampling, expected: tuple[Any, ...]
) -> None:
    config = asked.resolve(GenerationConfig(**recommended))
    names = ("do_sample", "temperature", "top_p", "top_k", "max_new_tokens")
    assert tuple(getattr(config, name) for name in names) == expected


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": -1.0}, "temperature must be 0 (greedy) or at least 0.001, got -1.0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_k": -1}, "top_k must be 0 (all tokens) or more, got -1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more, got 0"),
        ({"temperature": 0.0, "top_p": 0.9}, "top_p 0.9 has no effect at temperature 0"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        Sampling(**options)
