"""The target alone, one token at a time, gives what transformers generates."""

import pytest
import torch

from dspark_lightning.decoding.plain import decode_plainly
from family_helpers import FAMILIES, VARIANTS, build_pair
from test_speculative_generate import greedy, prompts


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    target, _ = build_pair(family)
    for prompt in prompts(2):
        expected = greedy(target.model, prompt, new=20)[0, prompt.shape[1] :].tolist()
        assert decode_plainly(target, prompt[0], 20) == expected


def test_a_stop_token_is_the_last() -> None:
    target, _ = build_pair("qwen3")
    prompt = prompts(1)[0]
    free = greedy(target.model, prompt)[0, prompt.shape[1] :].tolist()
    stop = free[5]
    assert decode_plainly(target, prompt[0], 30, stops={stop}) == free[: free.index(stop) + 1]


def test_a_seed_draws_the_same_tokens() -> None:
    target, _ = build_pair("qwen3")
    drawn = [
        decode_plainly(target, prompts(1)[0][0], 12, temperature=1.0, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 12
