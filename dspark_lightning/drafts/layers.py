"""Decoder layers that several families share.

Shapes: B samples, C context length, M blocks, K block size, H hidden size.
"""

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from dspark_lightning.attention import BlockAttention
from dspark_lightning.drafts.rotation import Rope


class PreNormDecoderLayer(GradientCheckpointingLayer):
    """Norm, attention, norm, MLP; the context enters the attention as it is, without another norm.

    Args:
        attention: called with (hidden, context, rope, context_rope, attention) as `forward` is.
        mlp: from [M, K, H] to [M, K, H].
        norm: makes one RMSNorm over H in the family's style.
    """

    def __init__(self, attention: nn.Module, mlp: nn.Module, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()

    def forward(
        self,
        hidden: Tensor,  # [M, K, H]
        context: Tensor,  # [B, C, H]
        rope: Rope | None,  # of the block tokens
        context_rope: Rope | None,
        attention: BlockAttention,
    ) -> Tensor:
        """Returns [M, K, H]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context, rope, context_rope, attention)
        return cast(Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))


class GatedMLP(nn.Module):
    """down(combine(gate(x), up(x))), without biases.

    Args:
        hidden_size: H.
        width: of gate and up.
        combine: from the two projections [..., width] to one.
    """

    def __init__(self, hidden_size: int, width: int, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)
        self.combine = combine

    def forward(self, hidden: Tensor) -> Tensor:
        """From [..., H] to [..., H]."""
        return cast(Tensor, self.down_proj(self.combine(self.gate_proj(hidden), self.up_proj(hidden))))


def gated_by(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The usual combination of a `GatedMLP`: activation(gate) * up."""
    return lambda gate, up: activation(gate) * up
