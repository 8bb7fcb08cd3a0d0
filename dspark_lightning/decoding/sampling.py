"""From logits to probabilities and tokens."""

import hashlib

import torch
from torch import Tensor
from torch.nn import functional as F


def logits_to_probs(
    logits: Tensor,  # [..., V]
    temperature: float,
) -> Tensor:
    """Turn logits into fp32 probabilities; temperature 0 puts all mass on the largest logit.

    Raises:
        ValueError: the temperature is negative.
    """
    if temperature < 0:
        raise ValueError(f"temperature must be 0 (greedy) or positive, got {temperature}")
    logits = logits.float()
    if temperature == 0:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(logits.dtype)
    return torch.softmax(logits / temperature, dim=-1)


def sample_tokens(
    logits: Tensor,  # [B, V]
    temperature: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one token per row; greedy at temperature 0. Returns int64 [B]."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    return torch.multinomial(logits_to_probs(logits, temperature), 1, generator=generator).squeeze(-1)


def place_seed(seed: int, place: str) -> int:
    """Seed of one answer, 0 or more: the same whatever else is decoded, in which order, and on how many processes.

    Args:
        seed: of the whole run.
        place: what tells the answer from all others.
    """
    digest = hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def place_generator(seed: int, place: str, device: torch.device) -> torch.Generator:
    """Source of the random numbers of one answer.

    Args:
        seed: of the whole run.
        place: what tells the answer from all others.
        device: where the numbers are drawn.
    """
    return torch.Generator(device).manual_seed(place_seed(seed, place))
