"""Time and memory of block attention alone, forward and backward, against one dense mask.

    python -m benchmarks.attention --points 4096x128

Shapes: B samples, S sequence length, N anchors, K block size, M blocks, D head dim.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.baseline import dense_attention
from benchmarks.measure import Run, alternate, peak_memory, ratio
from dspark_lightning.anchors import row_generator, sample_anchor_positions
from dspark_lightning.attention import block_visibility, build_attention
from dspark_lightning.blocks import Blocks, list_blocks
from dspark_lightning.machine import describe_machine


@dataclass(frozen=True)
class Point:
    """One size of block attention; heads as in a model of hidden size 576."""

    seq_len: int
    num_anchors: int
    batch: int = 1
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 7


POINTS = {
    "tiny": Point(seq_len=128, num_anchors=8, batch=2),
    "256x32": Point(seq_len=256, num_anchors=32, batch=4),
    "1024x64": Point(seq_len=1024, num_anchors=64),
    "4096x128": Point(seq_len=4096, num_anchors=128),
    "4096x512": Point(seq_len=4096, num_anchors=512),
}
"""By sequence length and anchors of a row."""

HEADER = ("S x N", "ours ms", "dense ms", "time/dense", "ours MiB", "dense MiB", "memory/dense")


class AttentionPass:
    """Forward and backward of one way to attend, from leaf tensors in the layout that its draft gives them.

    Args:
        point: the size.
        device: where it runs.
    """

    def __init__(self, point: Point, device: torch.device) -> None:
        self.point, self.device = point, device
        supervised = torch.ones(point.batch, point.seq_len)
        generators = [row_generator(0, 0, row) for row in range(point.batch)]
        self.anchors, self.keep = sample_anchor_positions(
            point.seq_len, supervised, point.num_anchors, "cpu", generators=generators
        )
        torch.manual_seed(0)
        tokens, kv_heads = point.num_anchors * point.block_size, point.kv_heads
        query, key, value, context_key, context_value, self.slope = (
            torch.randn(point.batch, length, heads, point.head_dim).to(device)
            for length, heads in (
                *((tokens, point.heads), (tokens, kv_heads), (tokens, kv_heads)),
                *((point.seq_len, kv_heads), (point.seq_len, kv_heads), (tokens, point.heads)),
            )
        )
        self.leaves = self.prepare([query, key, value], [context_key, context_value])

    def prepare(self, block_tokens: list[Tensor], context: list[Tensor]) -> list[Tensor]:
        """Lay out query, key and value [B, N*K, heads, D], and context key and value [B, S, heads, D], as leaves."""
        raise NotImplementedError

    def attend(self) -> Tensor:
        """Work out what is visible, and attend. Returns [B, N*K, heads, D], or the same block by block."""
        raise NotImplementedError

    def __call__(self) -> None:
        """Run forward and backward."""
        torch.autograd.backward(self.attend(), self.slope)
        for leaf in self.leaves:
            leaf.grad = None

    def outcome(self) -> list[Tensor]:
        """Attended values, then the gradients in the shapes that `prepare` got; those of the context up to its end."""
        attended = self.attend()
        gradients = torch.autograd.grad(attended, self.leaves, self.slope)
        shapes = [
            (self.point.batch, -1, heads, self.point.head_dim)
            for heads in (self.point.heads, *[self.point.kv_heads] * 4)
        ]
        rows = [gradient.transpose(1, 2).reshape(shape) for gradient, shape in zip(gradients, shapes, strict=True)]
        return [attended.detach().flatten().view(shapes[0]), *rows]


class OurPass(AttentionPass):
    """The attention that the package chooses on this device."""

    def prepare(self, block_tokens: list[Tensor], context: list[Tensor]) -> list[Tensor]:
        """Block tokens lie block by block, and the context ends with the last anchor where the draft cuts it."""
        point = self.point
        self.slope = self.slope.view(-1, point.block_size, point.heads, point.head_dim)
        by_block = [x.unflatten(1, (point.num_anchors, point.block_size)).flatten(0, 1) for x in block_tokens]
        cut = [x[:, : self.blocks().context_length].contiguous() for x in context]
        return [x.transpose(1, 2).requires_grad_() for x in (*by_block, *cut)]

    def attend(self) -> Tensor:
        """See `AttentionPass`."""
        point = self.point
        visibility = partial(block_visibility, point.seq_len, self.anchors, self.keep, point.block_size)
        attention = build_attention("auto", self.blocks(), visibility, dropout=False, device=self.device)
        return attention(*self.leaves, scale=point.head_dim**-0.5).transpose(1, 2)

    def blocks(self) -> Blocks:
        """What every block sees."""
        return list_blocks(self.point.seq_len, self.anchors, self.keep, trim=self.device.type != "cuda")


class DensePass(AttentionPass):
    """All block tokens of a row against all its keys."""

    def prepare(self, block_tokens: list[Tensor], context: list[Tensor]) -> list[Tensor]:
        """Everything lies row by row."""
        return [x.transpose(1, 2).requires_grad_() for x in (*block_tokens, *context)]

    def attend(self) -> Tensor:
        """See `AttentionPass`."""
        query, key, value, context_key, context_value = self.leaves
        visible = block_visibility(self.point.seq_len, self.anchors, self.keep, self.point.block_size)
        keys, values = torch.cat([context_key, key], dim=2), torch.cat([context_value, value], dim=2)
        return dense_attention(query, keys, values, visible.to(self.device)).transpose(1, 2)


PASSES: dict[str, type[AttentionPass]] = {"ours": OurPass, "dense": DensePass}


def check_equal(ours: AttentionPass, dense: AttentionPass) -> None:
    """Compare values and gradients to 1e-5 of the largest entry (1e-2 on CUDA, where products may be rounded).

    Raises:
        ValueError: they differ.
    """
    tolerance = 1e-2 if ours.device.type == "cuda" else 1e-5
    for place, (a, b) in enumerate(zip(ours.outcome(), dense.outcome(), strict=True)):
        error = float((a - b[:, : a.shape[1]]).abs().max() / b.abs().max())
        if not error <= tolerance:
            raise ValueError(f"output {place} of the two ways differs by {error:.1e} of its largest entry")


def measure(name: str, device: torch.device, repeats: int) -> dict[str, Any]:
    """Check that both ways agree, then measure them. Returns seconds by run and peak bytes, each by name."""
    passes = {one: kind(POINTS[name], device) for one, kind in PASSES.items()}
    check_equal(passes["ours"], passes["dense"])
    runs: dict[str, Run] = {**passes}
    seconds = alternate(runs, repeats)
    peaks = {
        one: peak_memory(partial(kind, POINTS[name], device), partial(kind, POINTS["tiny"], device), device)
        for one, kind in PASSES.items()
    }
    return {"point": name, "seconds": seconds, "peak_bytes": peaks}


def main() -> None:
    """Measure the points asked for, print the table and write the numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--points", nargs="+", choices=POINTS, default=[name for name in POINTS if name != "tiny"])
    parser.add_argument("--repeats", type=int, default=7, help="runs of each, in turn")
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--json", help="file to write the numbers to")
    args = parser.parse_args()
    device = torch.device(args.device)
    machine = describe_machine(device)
    results = [measure(name, device, args.repeats) for name in args.points]
    report.print_table(machine, HEADER, [_row(result) for result in results])
    if args.json:
        report.write_json(args.json, machine, results)


def _row(result: dict[str, Any]) -> list[str]:
    seconds, peaks = result["seconds"], result["peak_bytes"]
    return [
        result["point"],
        report.milliseconds(median(seconds["ours"])),
        report.milliseconds(median(seconds["dense"])),
        report.spread(ratio(seconds["ours"], seconds["dense"])),
        report.mebibytes(peaks["ours"]),
        report.mebibytes(peaks["dense"]),
        report.size_ratio(peaks["ours"], peaks["dense"]),
    ]


if __name__ == "__main__":
    main()
