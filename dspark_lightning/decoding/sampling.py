"""From logits to probabilities and tokens."""

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
