"""The Markov heads and the confidence head.

A Markov head adds a low-rank bias to the draft logits that depends on the previous token, so that neighbouring slots
of a block agree with each other (paper section 3.2). Every head makes a latent z [..., r]; the bias is W2 z.
Shapes: K block size, H hidden size, V vocabulary, r rank; "..." any leading dimensions.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspark_lightning.precision import without_autocast


class MarkovHead(nn.Module, ABC):
    """Common part of the heads: the previous token's embedding W1 and the projection W2 to the vocabulary."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def initial_state(self, hidden: Tensor) -> Tensor | None:
        """State before the first slot of a block; hidden is [..., H]. Memoryless heads have none."""
        del hidden
        return None

    @abstractmethod
    def step(self, prev_ids: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Advance one slot.

        Args:
            prev_ids: previous tokens, int64 [...].
            hidden: backbone states of the slot, [..., H].
            state: what the previous slot returned, or `initial_state`.

        Returns:
            the latent z [..., r] of the slot, and the state for the next one.
        """

    def latents(self, prev_ids: Tensor, hidden: Tensor) -> Tensor:
        """Latents of whole blocks under teacher forcing.

        Args:
            prev_ids: previous token of every slot, int64 [..., K].
            hidden: backbone states, [..., K, H].

        Returns:
            [..., K, r].
        """
        return self.step(prev_ids, hidden, None)[0]

    def forward(self, base_logits: Tensor, prev_ids: Tensor, hidden: Tensor) -> Tensor:
        """Add the bias to base_logits [..., K, V]; other arguments as for `latents`."""
        bias: Tensor = self.markov_w2(self.latents(prev_ids, hidden))
        return base_logits + bias


class VanillaMarkov(MarkovHead):
    """z = W1[prev].

    Args:
        vocab_size: V.
        rank: r.
        hidden_size: H, which this head does not read; the heads share one signature.
    """

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank)
        del hidden_size

    def step(self, prev_ids: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `MarkovHead.step`."""
        del hidden
        return self.markov_w1(prev_ids), state


class GatedMarkovHead(MarkovHead):
    """z = sigmoid(gate_proj([h; W1[prev]])) * W1[prev].

    Args:
        vocab_size: V.
        rank: r.
        hidden_size: H.
    """

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(self, prev_ids: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `MarkovHead.step`."""
        prev = self.markov_w1(prev_ids)
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, prev.to(hidden.dtype)], dim=-1))) * prev, state


class RNNHead(MarkovHead):
    """A gated recurrence over the block: s' = sig(g) s + (1 - sig(g)) tanh(c), z = tanh(o), s = 0 at the anchor.

    Args:
        vocab_size: V.
        rank: r.
        hidden_size: H.
    """

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def initial_state(self, hidden: Tensor) -> Tensor:
        """Zeros [..., r]."""
        return hidden.new_zeros(*hidden.shape[:-1], self.rank)

    def step(self, prev_ids: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `MarkovHead.step`."""
        state = self.initial_state(hidden) if state is None else state
        prev = self.markov_w1(prev_ids).to(hidden.dtype)
        joint = self.joint_proj(torch.cat([state.to(hidden.dtype), prev, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)

    def latents(self, prev_ids: Tensor, hidden: Tensor) -> Tensor:
        """See `MarkovHead.latents`; slots depend on each other, so they are taken in order."""
        state: Tensor | None = None
        latents = []
        for slot in range(hidden.shape[-2]):
            latent, state = self.step(prev_ids[..., slot], hidden[..., slot, :], state)
            latents.append(latent)
        return torch.stack(latents, dim=-2)


MARKOV_HEADS: dict[str, type[VanillaMarkov] | type[GatedMarkovHead] | type[RNNHead]] = {
    "vanilla": VanillaMarkov,
    "gated": GatedMarkovHead,
    "rnn": RNNHead,
}


def build_markov_head(config: Any) -> MarkovHead | None:
    """Build the head that a draft config asks for.

    Args:
        config: has markov_rank, vocab_size, hidden_size, and markov_head_type ("vanilla" when absent).

    Returns:
        the head, or None for markov_rank 0.

    Raises:
        ValueError: unknown markov_head_type.
    """
    if not config.markov_rank:
        return None
    kind = getattr(config, "markov_head_type", "vanilla")
    if kind not in MARKOV_HEADS:
        raise ValueError(f"markov_head_type must be one of {', '.join(MARKOV_HEADS)}, got {kind!r}")
    return MARKOV_HEADS[kind](config.vocab_size, config.markov_rank, config.hidden_size)


class AcceptRatePredictor(nn.Module):
    """Confidence head: one fp32 logit per slot of "the target will accept this token" (paper section 3.3).

    Args:
        input_dim: numbers it reads of a slot: H, or H + r where it also reads the previous token.
    """

    def __init__(self, input_dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_dim, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Map features [..., input_dim] to logits [...], in fp32 also under autocast."""
        with without_autocast(features.device):
            return F.linear(features.float(), self.proj.weight.float(), self.proj.bias.float()).squeeze(-1)
