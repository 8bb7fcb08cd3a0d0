"""Decoding by the target alone, one token at a time: what speculative decoding is compared with."""

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
    temperature: float,
    stops: set[int],
    generator: torch.Generator | None = None,
) -> list[int]:
    """Continue one prompt until a stop token, or until there are `max_new_tokens`."""
    cached, feed = CachedTarget(target), prompt
    tokens: list[int] = []
    while len(tokens) < max_new_tokens:
        hidden = cached.feed(feed)[1]
        feed = sample_tokens(cached.logits(hidden[:, -1]), temperature, generator)
        tokens.append(int(feed))
        if tokens[-1] in stops:
            break
    return tokens
