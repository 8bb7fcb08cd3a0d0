"""Acceptance, loss and calibration over any number of batches and ranks.

Every value is sum(num) / sum(den), divided once, so it depends neither on how the rows were cut into batches nor on how
the batches were spread over ranks. `compute_dspark_loss(..., return_terms=True)` gives the sums of one batch.
Shapes: K block size, R = len(RATIOS).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torchmetrics import Metric

RATIOS = {
    "ce_loss": ("ce_loss_num", "loss_den"),
    "l1_loss": ("l1_loss_num", "loss_den"),
    "confidence_loss": ("confidence_loss_num", "loss_den"),
    "tau": ("tau_num", "tau_den"),
    "tau_full": ("tau_full_num", "tau_full_den"),
    "confidence_abs_error": ("confidence_abs_error_num", "confidence_diag_den"),
    "confidence_bias": ("confidence_bias_num", "confidence_diag_den"),
    "confidence_cumprod_bias": ("confidence_cumprod_bias_num", "confidence_diag_den"),
}
"""Scalar values and the two terms each is the ratio of; the acceptance rates by position come on top."""

COUNTS = ("supervised_tokens", "kept_anchors")
"""Values that are plain sums."""


class AcceptanceMetric(Metric):
    """All values of a DSpark loss's terms, by the names shown to people.

    loss, ce_loss, l1_loss, confidence_loss, accept_rate, accept_rate@1..@K (1-based), tau, tau_full,
    confidence_abs_error, confidence_bias, confidence_cumprod_bias, and the totals supervised_tokens and kept_anchors.

    The sums stay fp32 and the counts int64 whatever the module around them is cast to: in bf16 a count stops at 256.

    Args:
        block_size: K.
        ce_loss_alpha: weight of ce_loss in loss.
        l1_loss_alpha: weight of l1_loss in loss.
        confidence_head_alpha: weight of confidence_loss in loss.

    Example:
        >>> metric = AcceptanceMetric(2, ce_loss_alpha=1.0, l1_loss_alpha=0.0, confidence_head_alpha=0.0)
        >>> metric.update({"ce_loss_num": torch.tensor(6.0), "loss_den": torch.tensor(4.0)})
        >>> metric.compute()["loss"]
        tensor(1.5000)
    """

    is_differentiable = False
    full_state_update = False

    nums: Tensor
    dens: Tensor
    counts: Tensor

    def __init__(
        self, block_size: int, ce_loss_alpha: float, l1_loss_alpha: float, confidence_head_alpha: float
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.alphas = {
            "ce_loss": ce_loss_alpha,
            "l1_loss": l1_loss_alpha,
            "confidence_loss": confidence_head_alpha,
        }
        size = len(RATIOS) + block_size
        for name, default in (
            ("nums", torch.zeros(size, dtype=torch.float32)),
            ("dens", torch.zeros(size, dtype=torch.float32)),
            ("counts", torch.zeros(len(COUNTS), dtype=torch.int64)),
        ):
            self.add_state(name, default, dist_reduce_fx="sum", persistent=True)

    def update(self, terms: Mapping[str, Tensor]) -> None:
        """Add the terms of one batch, on the metric's device; a term the loss left out is left out here too.

        A batch with a NaN or infinite term counts in nothing: it would take all others with it.

        Raises:
            ValueError: the terms are of another block size.
        """
        nums, dens, counts = acceptance_update(terms, self.block_size)
        self.nums = self.nums + nums
        self.dens = self.dens + dens
        self.counts = self.counts + counts

    def compute(self) -> dict[str, Tensor]:
        """Value by name, each a 0-d fp32 tensor; one whose denominator is 0 is left out."""
        return acceptance_compute(self.nums, self.dens, self.counts, self.alphas)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        """Follow a move of the surrounding module, never a cast: torchmetrics guards `.half()` but not `.to(dtype)`."""
        moved: nn.Module = super()._apply(lambda tensor: tensor.to(fn(tensor).device), exclude_state)
        return moved


def acceptance_update(terms: Mapping[str, Tensor], block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Arrange the terms of one batch as numerators [R + K], denominators [R + K] and counts [2].

    Raises:
        ValueError: the terms are of another block size.
    """
    zero = torch.zeros_like(terms["loss_den"])
    positions = zero.new_zeros(block_size)
    by_position = [terms.get(f"accept_rate_per_pos_{part}", positions) for part in ("num", "den")]
    if by_position[0].shape != positions.shape:
        raise ValueError(
            f"the terms hold {by_position[0].numel()} positions, but the metric was made for block_size {block_size}"
        )
    pairs = [(terms[num], terms[den]) if num in terms else (zero, zero) for num, den in RATIOS.values()]
    nums, dens = (torch.stack(part) for part in zip(*pairs, strict=True))
    nums, dens = (torch.cat([part, more]).float() for part, more in zip((nums, dens), by_position, strict=True))
    counts = torch.stack([terms.get(name, zero) for name in COUNTS]).round().long()
    finite = nums.isfinite().all() & dens.isfinite().all()  # stays on the device
    return nums.where(finite, 0), dens.where(finite, 0), counts.where(finite, 0)


def acceptance_compute(nums: Tensor, dens: Tensor, counts: Tensor, alphas: Mapping[str, float]) -> dict[str, Tensor]:
    """Divide the sums of `acceptance_update`; loss is the weighted sum of the three losses, exactly.

    Args:
        nums: numerators [R + K].
        dens: denominators [R + K].
        counts: [2].
        alphas: weight of each of the three losses.

    Returns:
        0-d fp32 tensors by name; what has denominator 0 is left out.
    """
    first = len(RATIOS)
    names = [*RATIOS, *(f"accept_rate@{k}" for k in range(1, len(nums) - first + 1)), "accept_rate"]
    nums, dens = (torch.cat([part, part[first:].sum(0, keepdim=True)]) for part in (nums, dens))
    known = (dens > 0).tolist()
    values = {name: ratio for name, ratio, keep in zip(names, nums / dens, known, strict=True) if keep}
    losses = [alpha * values[name] for name, alpha in alphas.items() if name in values]
    if losses:
        values["loss"] = torch.stack(losses).sum()
    return values | dict(zip(COUNTS, counts.float(), strict=True))
