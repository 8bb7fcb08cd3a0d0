"""Which slots are projected to the vocabulary, in which order, and which teacher positions they share.

Slots that predict the same token have the same teacher distribution. Sorted by teacher position they lie side by side,
so every chunk projects each of its teacher positions once.
Shapes: B samples, S sequence length, N anchors, K block size, n slots that count, u distinct teacher positions.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class SlotPlan:
    """The n slots that count, ordered by teacher position."""

    slots: Tensor  # int64 [n], place among the B*N*K slots
    teacher_rows: Tensor  # int64 [u], ascending, place among the B*S positions
    teacher_of_slot: Tensor  # int64 [n], index into teacher_rows, ascending
    group_ends: tuple[int, ...]  # u numbers: where the slots of each teacher position end

    def to(self, device: torch.device) -> "SlotPlan":
        """The same plan with its tensors on another device; a copy from the CPU is not waited for."""
        names = ("slots", "teacher_rows", "teacher_of_slot")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})

    def cut(
        self, size: int, within: tuple[slice, slice] | None = None, count_teachers: bool = False
    ) -> list[tuple[slice, slice]]:
        """Cut the slots into pieces of at most `size`, between teacher positions.

        Args:
            size: slots of a piece, at least 2. A position with more slots than that is part of several pieces.
            within: a piece to cut further; None cuts the whole plan.
            count_teachers: whether a piece's teacher positions count towards its size too.

        Returns:
            for every piece the range of its slots and the range of its teacher positions.
        """
        slot, end = 0, len(self.slots)
        teacher = 0
        if within is not None:
            slot, end, teacher = within[0].start, within[0].stop, within[1].start
        pieces = []
        while slot < end:
            first_slot, first_teacher = slot, teacher
            while slot < end:
                group_end = min(self.group_ends[teacher], end)
                teachers = teacher + 1 - first_teacher if count_teachers else 0
                if group_end - first_slot + teachers > size:
                    break
                slot, teacher = group_end, teacher + 1
            last_teacher = teacher
            if slot == first_slot:
                slot, last_teacher = first_slot + size - count_teachers, teacher + 1
            pieces.append((slice(first_slot, slot), slice(first_teacher, last_teacher)))
        return pieces


def plan_slots(eval_mask: Tensor, teacher_positions: Tensor, seq_len: int) -> SlotPlan:
    """Plan the projection of a batch, on the device of `eval_mask`; on the CPU this waits for no accelerator.

    Args:
        eval_mask: bool [B, N, K], slots that count.
        teacher_positions: int64 [B, N, K], where in its row a slot's teacher distribution comes from.
        seq_len: S.
    """
    row = torch.arange(eval_mask.shape[0], device=eval_mask.device).view(-1, 1, 1)
    slots = eval_mask.flatten().nonzero().squeeze(-1)
    positions = (row * seq_len + teacher_positions).flatten()[slots]
    order = positions.argsort(stable=True)
    teacher_rows, teacher_of_slot, counts = torch.unique_consecutive(
        positions[order], return_inverse=True, return_counts=True
    )
    return SlotPlan(slots[order], teacher_rows, teacher_of_slot, tuple(counts.cumsum(0).tolist()))
