"""Decoding by the target alone, one token at a time: what speculative decoding is compared with.

Shapes: S prompt length, V vocabulary.
"""

from collections.abc import Set

import torch
from torch import Tensor

from dspark_lightning.decoding.cached_target import CachedTarget
from dspark_lightning.decoding.sampling import sample_tokens
from dspark_lightning.target import HFDSparkTargetModel


@torch.no_grad()
def decode_plainly(
    target: HFDSparkTargetModel,
    prompt: Tensor,  # int64 [S]
    max_new_tokens: int,
    temperature: float = 0.0,
    stops: Set[int] = frozenset(),
    generator: torch.Generator | None = None,
) -> list[int]:
    """Continue one prompt with the target's cache and nothing else.

    Args:
        target: its feature layers are not captured.
        prompt: without padding, on the target's device.
        max_new_tokens: at most.
        temperature: 0 is greedy.
        stops: the first of these is the last token.
        generator: source of randomness, on the prompt's device.

    Returns:
        the new tokens, a stop token included.
    """
    # The last layer's feature is the state that the head reads, so it is all there is to capture.
    cached = CachedTarget(HFDSparkTargetModel(target.model, [target.num_layers - 1]))
    tokens: list[int] = []
    fed = prompt
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in stops):
        _, hidden = cached.feed(fed)
        fed = sample_tokens(cached.logits(hidden[:, -1]), temperature, generator)
        tokens.append(int(fed))
    return tokens
