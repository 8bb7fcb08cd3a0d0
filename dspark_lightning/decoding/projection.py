"""Output heads applied to the few states of one round of decoding.

Shapes: n states, H width, V vocabulary; "..." any leading dimensions.
"""

from typing import cast

import torch
from torch import Tensor, nn

_FEW = 8
"""States up to which the other order is the faster one."""

_PARTS = 16
"""Of the weight, which threads share."""


def project(head: nn.Module, states: Tensor) -> Tensor:
    """Apply a head to states [..., H]. Returns what `head(states)` does, [..., V].

    For a few fp32 states on a CPU `nn.Linear` asks the matrix library for states times weight, which then reads the
    weight at half its speed or less, and a single state by one thread alone. There this asks for weight times states,
    in parts. `benchmarks.decode` shows what is left.
    """
    if not (isinstance(head, nn.Linear) and _is_tall(head) and _are_few(states)):
        return cast(Tensor, head(states))
    rows = states.reshape(-1, states.shape[-1])
    parts = head.weight.view(_PARTS, -1, head.in_features)
    projected = torch.bmm(parts, rows.t().expand(_PARTS, -1, -1)).flatten(0, 1)
    return projected.t().view(*states.shape[:-1], head.out_features)


def _is_tall(head: nn.Linear) -> bool:
    """Whether a head is an fp32 weight that splits, and nothing else: not wrapped, quantised or adapted."""
    plain = type(head) is nn.Linear and head.bias is None and head.weight.dtype == torch.float32
    return plain and head.weight.is_contiguous() and head.out_features % _PARTS == 0


def _are_few(states: Tensor) -> bool:
    return states.device.type == "cpu" and states.dtype == torch.float32 and 0 < states.shape[:-1].numel() <= _FEW
