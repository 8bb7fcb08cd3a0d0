"""Cross entropy and total variation straight from hidden states: vocabulary logits exist for one chunk at a time.

With p the draft's and q the teacher's distribution of a slot, y its label and s = sign(p - q), the gradient of
a CE + b TV with respect to the slot's logits is

    a (p - onehot(y)) + b p (s - <p, s>)

which needs nothing beyond the chunk. So the forward pass overwrites each chunk's logits with this gradient, multiplies
it out to the inputs and forgets it; the backward pass only scales. No logits are kept and none are recomputed.
Shapes: n slots, u distinct teacher positions, c slots of a chunk, t of a tile, H hidden size, r rank, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dspark_lightning.slots import SlotPlan

CHUNK_ROWS = {"cpu": 320, "other": 2048}
"""Slots and teacher positions projected at a time, by device: enough for matrix products at nearly full speed."""

CPU_VOCABULARY_TILE = 1024
"""On the CPU, products with V columns are made this many columns at a time: faster than one large call."""

TILE_BYTES = {"cpu": 4 << 20, "other": 256 << 20}
"""Softmax and gradient are taken in tiles of this size; on the CPU they then stay in cache."""

FLOAT16_SCALE = 64.0
"""Gradients of float16 logits travel multiplied by this, so that few of them underflow."""


class Objective(NamedTuple):
    """What is summed up: sum over slots of weight * (ce_alpha * CE + l1_alpha * TV)."""

    weight: Tensor  # fp32 [n]
    ce_alpha: float
    l1_alpha: float


class Matrices(NamedTuple):
    """What the logits are made of: softcap(hidden @ head.T) + latents @ markov_w2.T."""

    hidden: Tensor  # [n, H], normed backbone states
    latents: Tensor | None  # [n, r]
    head: Tensor  # [V, H]
    markov_w2: Tensor | None  # [V, r]


def chunked_losses(
    matrices: Matrices,
    teacher: Tensor | None,
    labels: Tensor,
    plan: SlotPlan,
    objective: Objective,
    softcap: float | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Project the slots of a plan in chunks.

    Args:
        matrices: hidden states and latents in the plan's order, and the weights; their gradients are made.
        teacher: the target's normed states [u, H] at `plan.teacher_rows`; None leaves the total variation out.
        labels: int64 [n], tokens to predict.
        plan: the slots and their teacher positions.
        objective: weights of slots and terms.
        softcap: soft cap of the head's logits, draft and teacher.
        dtype: of the matrix products; everything after the logits is fp32.

    Returns:
        the objective, and without gradients CE [n] and TV [n] (None without a teacher), all fp32.
    """
    wanted = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in matrices)
    teacher = None if teacher is None else teacher.detach().to(dtype)
    cast = [None if x is None else x.to(dtype) for x in matrices]
    total, ce, tv = _ChunkedLosses.apply(  # type: ignore[no-untyped-call]
        *cast, teacher, labels, plan, objective, softcap, wanted
    )
    return total, ce, None if teacher is None else tv


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        latents: Tensor | None,
        head: Tensor,
        markov_w2: Tensor | None,
        teacher: Tensor | None,
        labels: Tensor,
        plan: SlotPlan,
        objective: Objective,
        softcap: float | None,
        wanted: tuple[bool, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = "cpu" if hidden.device.type == "cpu" else "other"
        gradients = _Gradients(Matrices(hidden, latents, head, markov_w2), wanted)
        tiles = _Tiles(plan, labels, objective, head, max(1, TILE_BYTES[kind] // (4 * head.shape[0])))
        chunks = plan.cut(CHUNK_ROWS[kind], count_teachers=teacher is not None)
        buffer = head.new_empty(min(CHUNK_ROWS[kind], len(labels) + len(plan.teacher_rows)), head.shape[0])
        for slots, positions in chunks:
            count = slots.stop - slots.start
            # Draft and teacher in one product: the head is read once for both.
            states = hidden[slots] if teacher is None else torch.cat([hidden[slots], teacher[positions]])
            logits = _project(states, head, buffer[: len(states)], add=False)
            logits, teacher_logits = logits[:count], logits[count:]
            slope = _cap(logits, softcap)
            _cap(teacher_logits, softcap)
            if latents is not None and markov_w2 is not None:
                _project(latents[slots], markov_w2, logits, add=True)
            scale = gradients.scale if any(wanted) else None
            tiles.run((slots, positions), logits, None if teacher is None else teacher_logits, scale)
            gradients.add(slots, logits, slope)
        ctx.save_for_backward(*gradients.sums)
        ctx.scale, ctx.dtype = gradients.scale, head.dtype
        ctx.mark_non_differentiable(tiles.ce, tiles.tv)
        total = objective.ce_alpha * tiles.ce + objective.l1_alpha * tiles.tv
        return (objective.weight * total).sum(), tiles.ce, tiles.tv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # Cast last: a sum over all slots may not fit float16 before it is normalised.
        gradients = [None if g is None else (g * (grad / ctx.scale)).to(ctx.dtype) for g in ctx.saved_tensors]
        return *gradients, None, None, None, None, None, None


def _project(states: Tensor, weight: Tensor, logits: Tensor, add: bool) -> Tensor:
    """Write states [c, H] @ weight.T into logits [c, V], or add it to them. Returns them."""
    step = CPU_VOCABULARY_TILE if logits.device.type == "cpu" else len(weight)
    for rows, columns in zip(weight.split(step), logits.split(step, dim=1), strict=True):
        if add:
            columns.addmm_(states, rows.t())
        else:
            torch.mm(states, rows.t(), out=columns)
    return logits


def _cap(logits: Tensor, softcap: float | None) -> Tensor | None:
    """Soft-cap logits in place. Returns the slope 1 - tanh^2, or None without a cap."""
    if softcap is None:
        return None
    slope = 1 - logits.div_(softcap).tanh_().square()
    logits.mul_(softcap)
    return slope


class _Tiles:
    """Softmax, losses and logit gradients, a few slots at a time in fp32 buffers that are used again and again.

    Args:
        plan: of all slots.
        labels: int64 [n].
        objective: of all slots.
        head: gives the vocabulary and the device.
        size: slots of a tile, t.
    """

    def __init__(self, plan: SlotPlan, labels: Tensor, objective: Objective, head: Tensor, size: int) -> None:
        self.plan, self.labels, self.size = plan, labels, size
        self.ce_weight = objective.weight * objective.ce_alpha
        self.tv_weight = objective.weight * objective.l1_alpha
        self.ce, self.tv = objective.weight.new_zeros(len(labels)), objective.weight.new_zeros(len(labels))
        self.buffers = torch.empty(3, size, head.shape[0], device=head.device, dtype=torch.float32)

    def run(
        self,
        chunk: tuple[slice, slice],
        logits: Tensor,  # [c, V]
        teacher_logits: Tensor | None,  # [u, V]
        scale: float | None,
    ) -> None:
        """Fill in the losses of a chunk; with a scale, overwrite its logits with scale times their gradient."""
        for slots, positions in self.plan.cut(self.size, within=chunk):
            probs, difference, spare = self.buffers[:, : slots.stop - slots.start].unbind()
            rows = logits[slots.start - chunk[0].start : slots.stop - chunk[0].start]
            self._cross_entropy(slots, rows, probs)
            gradient, factor = probs, self.ce_weight[slots].unsqueeze(-1)
            if teacher_logits is not None:
                teacher = teacher_logits[positions.start - chunk[1].start : positions.stop - chunk[1].start]
                torch.softmax(teacher.float(), dim=-1, out=spare[: len(teacher)])
                torch.index_select(spare, 0, self.plan.teacher_of_slot[slots] - positions.start, out=difference)
                torch.sub(probs, difference, out=difference)
                torch.sum(torch.abs(difference, out=spare), dim=-1, out=self.tv[slots])
                if scale is None:
                    continue
                sign, tv_weight = difference.sign_(), self.tv_weight[slots].unsqueeze(-1)
                factor = factor - tv_weight * torch.linalg.vecdot(probs, sign).unsqueeze(-1)
                gradient = sign.mul_(tv_weight).add_(factor).mul_(probs)
            else:
                gradient = probs.mul_(factor)
            if scale is not None:
                gradient.scatter_add_(1, self.labels[slots].unsqueeze(-1), -self.ce_weight[slots].unsqueeze(-1))
                rows.copy_(gradient if scale == 1 else gradient.mul_(scale))

    def _cross_entropy(self, slots: slice, logits: Tensor, probs: Tensor) -> None:
        """Fill in the cross entropy of [t, V] logits, and their softmax."""
        logits = logits.float()
        label_logits = logits.gather(1, self.labels[slots].unsqueeze(-1)).squeeze(-1)
        torch.softmax(logits, dim=-1, out=probs)
        # log-sum-exp from the largest entry, whose probability cannot underflow
        torch.sub(logits.amax(dim=-1) - probs.amax(dim=-1).log(), label_logits, out=self.ce[slots])


class _Gradients:
    """Sums of what the chunks' logit gradients, times the scale, give for the matrices that want one.

    Args:
        matrices: the factors of the logits, all of one dtype.
        wanted: which of them.
    """

    def __init__(self, matrices: Matrices, wanted: tuple[bool, ...]) -> None:
        self.matrices = matrices
        self.scale = FLOAT16_SCALE if matrices.head.dtype == torch.float16 else 1.0
        self.sums: list[Tensor | None] = [
            torch.zeros_like(matrix, dtype=dtype) if on and matrix is not None else None
            for matrix, on, dtype in zip(matrices, wanted, _SUM_DTYPES, strict=True)
        ]

    def add(self, slots: slice, gradient: Tensor, slope: Tensor | None) -> None:
        """Add a chunk: gradient [c, V] of its logits, and the slope of their soft cap; the gradient is used up."""
        hidden, latents, head, markov_w2 = self.matrices
        hidden_sum, latents_sum, head_sum, markov_w2_sum = self.sums
        if latents is not None and markov_w2 is not None:
            if latents_sum is not None:
                torch.mm(gradient, markov_w2, out=latents_sum[slots])
            if markov_w2_sum is not None:
                _add_product(markov_w2_sum, gradient.t(), latents[slots])
        if slope is not None:
            gradient.mul_(slope)
        if hidden_sum is not None:
            torch.mm(gradient, head, out=hidden_sum[slots])
        if head_sum is not None:
            _add_product(head_sum, gradient.t(), hidden[slots])


_SUM_DTYPES = (None, None, torch.float32, torch.float32)
"""Of the gradients: those of the weights sum over all chunks and are kept in fp32."""


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
