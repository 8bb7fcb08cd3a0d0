"""Heads on a few states give what `nn.Linear` does."""

import pytest
import torch
from torch import nn

from dspark_lightning.decoding.projection import project
from helpers import seeded


class Doubled(nn.Linear):
    """Stands for an adapted head, whose weight is not all there is to it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("vocabulary", [96, 97])
@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (9,), (1, 7), (2, 3), (0,), (1, 0)])
def test_states_are_projected_whatever_their_number(vocabulary: int, shape: tuple[int, ...]) -> None:
    with seeded(0):
        head, states = nn.Linear(24, vocabulary, bias=False), torch.randn(*shape, 24)
    torch.testing.assert_close(project(head, states), head(states))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_more_than_a_weight_is_called(dtype: torch.dtype) -> None:
    states = torch.ones(2, 4, dtype=dtype)
    for head in (Doubled(4, 16, bias=False), nn.Linear(4, 16)):
        assert torch.equal(project(head.to(dtype), states), head(states))
