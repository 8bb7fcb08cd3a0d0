"""Block attention without dead work: every block meets its own stretch of context and itself, nothing else.

The parts of a block's softmax (context, own block, sink) share one normaliser, log-sum-exp over all; the backward pass
recomputes the scores from it, so that only one group's scores exist at a time. Blocks with close anchors form a group
and read the context together; what a group computes beyond a member's anchor is cut away, and groups are kept small
enough that this stays below a quarter of the useful work.
Shapes: B samples, C context length, M blocks, K block size, G blocks of a group, R = heads / kv_heads * K query rows of
a block for each kv head, D head dim.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dspark_lightning.blocks import Blocks
from dspark_lightning.precision import without_autocast

MAX_GROUP = 16  # blocks
MAX_SCORES = 3 << 17  # of a group: 1.5 MiB, about what stays in cache
MIN_SPREAD = 32  # tokens between the anchors of a group that are always allowed


class _Group(NamedTuple):
    """Blocks first..last-1, all of one row and document."""

    first: int
    last: int
    row: int
    start: int  # of the context that all of them see
    anchors: list[int]  # ascending


class SplitBlockAttention:
    """`BlockAttention` in groups of blocks; inputs of lower precision are computed in fp32.

    Args:
        blocks: on the CPU, or their lists are fetched from the device once.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.rows, self.starts, self.anchors = (x.tolist() for x in (blocks.rows, blocks.starts, blocks.anchors))
        self.context_mask = blocks.context_mask
        self._grouping: list[_Group] | None = None  # the same for all layers

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        *,
        scale: float,
        dropout: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `BlockAttention`.

        Raises:
            ValueError: dropout is not 0.
        """
        if dropout:
            raise ValueError(f"attention 'split' has no dropout, got attention_dropout {dropout}: use 'dense'")
        num_blocks, heads, block_size, _ = query.shape
        kv_heads = key.shape[1]
        if self._grouping is None:
            self._grouping = self._groups(kv_heads, heads // kv_heads * block_size)
        mask = None if self.context_mask is None else self.context_mask.to(query.device)
        with without_autocast(query.device):
            tensors = [x.float() for x in (query, key, value, context_key, context_value)]
            tensors[0] = tensors[0].reshape(num_blocks, kv_heads, -1, query.shape[-1])  # [M, kv_heads, R, D]
            if sinks is not None:  # one for each of the R rows of a kv head
                sinks = sinks.float().view(kv_heads, -1, 1).expand(-1, -1, block_size).flatten(1)
            inputs = (*tensors, sinks, mask, self._grouping, scale)
            attended: Tensor = _SplitAttention.apply(*inputs)  # type: ignore[no-untyped-call]
        return attended.view(num_blocks, heads, block_size, -1).to(query.dtype)

    def _groups(self, kv_heads: int, rows_of_block: int) -> list[_Group]:
        """Cut the list of blocks into groups; blocks that see no context are in none."""
        groups: list[_Group] = []
        for block, (row, start, anchor) in enumerate(zip(self.rows, self.starts, self.anchors, strict=True)):
            if anchor == start:
                continue
            last = groups[-1] if groups else None
            if last is not None and (last.last, last.row, last.start) == (block, row, start):
                size = len(last.anchors) + 1
                fits = size <= MAX_GROUP and size * kv_heads * rows_of_block * (anchor - start) <= MAX_SCORES
                spread = anchor - last.anchors[0]
                if fits and anchor >= last.anchors[-1] and spread <= max(MIN_SPREAD, (anchor - start) // 4):
                    last.anchors.append(anchor)
                    groups[-1] = last._replace(last=block + 1)
                    continue
            groups.append(_Group(block, block + 1, row, start, [anchor]))
        return groups


class _SplitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [M, kv_heads, R, D]
        key: Tensor,  # [M, kv_heads, K, D]
        value: Tensor,  # [M, kv_heads, K, Dv]
        context_key: Tensor,  # [B, kv_heads, C, D]
        context_value: Tensor,  # [B, kv_heads, C, Dv]
        sinks: Tensor | None,  # [kv_heads, R]
        mask: Tensor | None,  # bool [B, C]
        groups: list[_Group],
        scale: float,
    ) -> Tensor:  # [M, kv_heads, R, Dv]
        own = _own_scores(query, key, scale)
        lse = torch.logsumexp(own, dim=-1)  # [M, kv_heads, R]; without the context, which joins below
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks)
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        for group in groups:
            keys, values = _context(group, context_key), _context(group, context_value)
            scores = torch.bmm(_rows(query, group) * scale, keys.transpose(1, 2))
            _hide(scores, group, mask, -torch.inf)
            own_lse = _rows(lse, group)
            highest = torch.maximum(scores.amax(dim=-1), own_lse)
            weights = scores.sub_(highest.unsqueeze(-1)).exp_()
            total = weights.sum(dim=-1) + (own_lse - highest).exp()
            blocks = slice(group.first, group.last)
            out[blocks] = _blocks(torch.bmm(weights, values).div_(total.unsqueeze(-1)), group)
            lse[blocks] = _blocks(highest + total.log(), group)
        out += torch.matmul(own.sub_(lse.unsqueeze(-1)).exp_(), value)
        ctx.save_for_backward(query, key, value, context_key, context_value, sinks, mask, out, lse)
        ctx.groups, ctx.scale = groups, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, context_key, context_value, sinks, mask, out, lse = ctx.saved_tensors
        with without_autocast(query.device):
            delta = (grad * out).sum(dim=-1)  # what the normaliser takes back from every score
            grad_sinks = None if sinks is None else -(delta * (sinks - lse).exp()).sum(dim=0)
            weights = _own_scores(query, key, ctx.scale).sub_(lse.unsqueeze(-1)).exp_()  # [M, kv_heads, R, K]
            grad_value = torch.matmul(weights.transpose(-1, -2), grad)
            slope = torch.matmul(grad, value.transpose(-1, -2)).sub_(delta.unsqueeze(-1)).mul_(weights)
            grad_query = torch.matmul(slope, key)
            grad_key = torch.matmul(slope.transpose(-1, -2), query).mul_(ctx.scale)
            grad_context_key, grad_context_value = torch.zeros_like(context_key), torch.zeros_like(context_value)
            for group in ctx.groups:
                keys, values = _context(group, context_key), _context(group, context_value)
                queries, grads = _rows(query, group), _rows(grad, group)
                shift = _rows(lse, group).unsqueeze(-1)
                weights = torch.baddbmm(shift, queries, keys.transpose(1, 2), beta=-1, alpha=ctx.scale).exp_()
                _hide(weights, group, mask, 0.0)
                _context(group, grad_context_value).baddbmm_(weights.transpose(1, 2), grads)
                shift = _rows(delta, group).unsqueeze(-1)
                slope = torch.baddbmm(shift, grads, values.transpose(1, 2), beta=-1).mul_(weights)
                grad_query[group.first : group.last] += _blocks(torch.bmm(slope, keys), group)
                _context(group, grad_context_key).baddbmm_(slope.transpose(1, 2), queries, alpha=ctx.scale)
        grads_of_inputs = (grad_query.mul_(ctx.scale), grad_key, grad_value, grad_context_key, grad_context_value)
        return *grads_of_inputs, grad_sinks, None, None, None


def _own_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Scores inside the blocks [M, kv_heads, R, K]."""
    return torch.matmul(query, key.transpose(-1, -2)).mul_(scale)


def _context(group: _Group, values: Tensor) -> Tensor:
    """The stretch that a group reads out of [B, kv_heads, C, D]: a view [kv_heads, stretch, D]."""
    return values[group.row, :, group.start : group.anchors[-1]]


def _rows(values: Tensor, group: _Group) -> Tensor:
    """From [M, kv_heads, R, ...] to the rows of a group, [kv_heads, G*R, ...]."""
    return values[group.first : group.last].transpose(0, 1).flatten(1, 2)


def _blocks(rows: Tensor, group: _Group) -> Tensor:
    """From [kv_heads, G*R, ...] back to [G, kv_heads, R, ...]."""
    return rows.view(rows.shape[0], len(group.anchors), -1, *rows.shape[2:]).transpose(0, 1)


def _hide(scores: Tensor, group: _Group, mask: Tensor | None, fill: float) -> None:
    """Overwrite, in scores [kv_heads, G*R, stretch], what lies at or behind a block's anchor or is masked."""
    by_block = scores.view(scores.shape[0], len(group.anchors), -1, scores.shape[2])
    for block, anchor in enumerate(group.anchors[:-1]):
        by_block[:, block, :, anchor - group.start :] = fill
    if mask is not None:
        scores.masked_fill_(~mask[group.row, group.start : group.anchors[-1]], fill)
