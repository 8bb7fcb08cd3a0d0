"""The passes that `step.py` compares: of a whole training step, and of its loss alone, each ours and dense.

Shapes: n slots that count, u distinct teacher positions, H hidden size, V vocabulary, r rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.baseline import DenseOutput, dense_draft, dense_loss
from benchmarks.measure import Run
from benchmarks.sizes import Size, build_draft
from dspark_lightning.anchors import row_generator, sample_anchor_positions
from dspark_lightning.loss import compute_dspark_loss
from dspark_lightning.outputs import DSparkHiddenOutput

Part = Literal["loss", "step"]
"""The loss with its gradients from hidden states on, or the draft and the loss with all gradients."""

WEIGHTS = (4.0, 0.1, 0.9, 1.0)
"""gamma and the weights of cross entropy, total variation and confidence: the defaults of training."""


@dataclass(frozen=True)
class Setup:
    """What is measured, in a form that travels to another process."""

    size: Size
    device: str
    dtype: torch.dtype
    rows: tuple[tuple[list[list[int]], list[list[int]]], ...] | None = None
    """ids and loss_mask [B, S] of several batches; None makes one random, fully supervised batch."""


class Pass:
    """Forward and backward over all batches; the gradients are dropped after each.

    Args:
        losses: the forward pass of each batch.
        wanted: tensors that get a gradient.
    """

    def __init__(self, losses: Sequence[Callable[[], Tensor]], wanted: Sequence[Tensor]) -> None:
        self.losses, self.wanted = losses, wanted

    def __call__(self) -> None:
        """Run the batches one after the other."""
        for loss in self.losses:
            loss().backward()
            self._drop_gradients()

    def outcome(self) -> list[Tensor]:
        """Loss of the first batch, and its gradients."""
        loss = self.losses[0]()
        loss.backward()
        gradients = [x.grad for x in self.wanted if x.grad is not None]
        self._drop_gradients()
        return [loss.detach(), *gradients]

    def _drop_gradients(self) -> None:
        for tensor in self.wanted:
            tensor.grad = None


class Bench:
    """A draft with its batches, and the passes over them.

    Args:
        setup: see there.
    """

    def __init__(self, setup: Setup) -> None:
        self.device = torch.device(setup.device)
        self.draft: Any = build_draft(setup.size, self.device, setup.dtype)
        rows = setup.rows or [_random_rows(setup.size)]
        self.batches = [_batch(setup, torch.tensor(ids), torch.tensor(mask)) for ids, mask in rows]
        self.dense_batches = [{name: x.to(self.device) for name, x in batch.items()} for batch in self.batches]
        with torch.no_grad():
            self.outputs: list[DSparkHiddenOutput] = [self.draft(**batch, output="hidden") for batch in self.batches]

    def passes(self, part: Part) -> dict[str, Pass]:
        """The pass through the package and the dense one, as "ours" and "dense"."""
        return self._step_passes() if part == "step" else self._loss_passes()

    def _step_passes(self) -> dict[str, Pass]:
        def ours(batch: dict[str, Tensor]) -> Tensor:
            return compute_dspark_loss(self.draft(**batch, output="hidden"), *WEIGHTS)

        def dense(batch: dict[str, Tensor]) -> Tensor:
            return self._dense_loss(dense_draft(self.draft, batch))

        wanted = [x for x in self.draft.parameters() if x.requires_grad]
        return {
            "ours": Pass([partial(ours, batch) for batch in self.batches], wanted),
            "dense": Pass([partial(dense, batch) for batch in self.dense_batches], wanted),
        }

    def _loss_passes(self) -> dict[str, Pass]:
        wanted: list[Tensor] = [self.draft.markov_head.markov_w2.weight]
        ours, dense = [], []
        for output, batch in zip(self.outputs, self.dense_batches, strict=True):
            assert output.latents is not None and output.confidence_pred is not None
            given = (output.hidden, output.latents, output.confidence_pred)
            hidden, latents, confidence = (x.clone().requires_grad_() for x in given)
            with torch.no_grad():
                plain = dense_draft(self.draft, batch)
            ours.append(output._replace(hidden=hidden, latents=latents, confidence_pred=confidence))
            dense.append(plain._replace(hidden=hidden, latents=latents, confidence=confidence))
            wanted += [hidden, latents, confidence]
        return {
            "ours": Pass([partial(compute_dspark_loss, output, *WEIGHTS) for output in ours], wanted),
            "dense": Pass([partial(self._dense_loss, output) for output in dense], wanted),
        }

    def _dense_loss(self, outputs: DenseOutput) -> Tensor:
        return dense_loss(outputs, self.draft.lm_head.weight, self.draft.markov_head.markov_w2.weight, *WEIGHTS)

    def counts(self) -> list[tuple[int, int]]:
        """Of every batch n and u."""
        return [(len(output.plan.slots), len(output.plan.teacher_rows)) for output in self.outputs]

    def floor(self) -> Run:
        """The matrix products that no loss with these gradients can do without, and nothing else."""
        head, w2 = self.draft.lm_head.weight.detach(), self.draft.markov_head.markov_w2.weight.detach()
        most, most_teachers = (max(count) for count in zip(*self.counts(), strict=True))
        new = partial(torch.randn, device=head.device, dtype=head.dtype)
        hidden, latents, teacher = new(most, head.shape[1]), new(most, w2.shape[1]), new(most_teachers, head.shape[1])
        gradient, logits, teacher_logits = (new(rows, len(head)) for rows in (most, most, most_teachers))
        grad_hidden, grad_latents, grad_w2 = (torch.empty_like(x) for x in (hidden, latents, w2))

        def run() -> None:
            for n, u in self.counts():
                torch.mm(hidden[:n], head.t(), out=logits[:n])
                torch.mm(latents[:n], w2.t(), out=logits[:n])
                torch.mm(teacher[:u], head.t(), out=teacher_logits[:u])
                torch.mm(gradient[:n], head, out=grad_hidden[:n])
                torch.mm(gradient[:n], w2, out=grad_latents[:n])
                torch.mm(gradient[:n].t(), latents[:n], out=grad_w2)

        return run

    def states_bytes(self) -> int:
        """Bytes of a batch's hidden states and latents with their gradients: what must grow with the anchors.

        The leaves themselves are held before a pass; inside it lie copies of the slots that count, as large at most.
        """
        output = self.outputs[0]
        assert output.latents is not None
        return 2 * (output.hidden.nbytes + output.latents.nbytes)


def build_pass(setup: Setup, part: Part, name: str) -> Pass:
    """Allocate everything that one pass reads."""
    return Bench(setup).passes(part)[name]


def check_equal(passes: dict[str, Pass], dtype: torch.dtype) -> None:
    """Compare losses to 1e-4 and gradients to 1e-3 of their largest entry; in lower precision only losses, to 1e-2.

    Raises:
        ValueError: they differ.
    """
    exact = dtype == torch.float32
    outcomes = zip(*(one.outcome() for one in passes.values()), strict=True)
    for place, (ours, dense) in enumerate(outcomes):
        error = float((ours - dense).abs().max() / dense.abs().max().clamp(min=1e-12))
        if not error <= (1e-2 if not exact else 1e-3 if place else 1e-4):
            what = f"gradient {place}" if place else "loss"
            raise ValueError(f"the {what} of the two passes differs by {error:.1e} of its largest entry")
        if not exact:
            return


def _random_rows(size: Size) -> tuple[list[list[int]], list[list[int]]]:
    shape, generator = (size.batch, size.seq_len), torch.Generator().manual_seed(1)
    ids = torch.randint(0, size.mask_token_id, shape, generator=generator)
    return ids.tolist(), torch.ones(shape, dtype=torch.int64).tolist()


def _batch(setup: Setup, ids: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """Arguments of the draft: random features; the masks and anchors stay on the CPU, as in training."""
    size, device = setup.size, torch.device(setup.device)
    generators = [row_generator(0, 0, row) for row in range(size.batch)]
    anchors, keep = sample_anchor_positions(size.seq_len, loss_mask, size.num_anchors, "cpu", generators=generators)
    torch.manual_seed(2)
    shape = (size.batch, size.seq_len)
    features, last = (
        torch.randn(*shape, width * size.hidden, device=device, dtype=setup.dtype) for width in (size.draft_layers, 1)
    )
    return {
        "input_ids": ids.to(device),
        "target_hidden_states": features,
        "loss_mask": loss_mask,
        "target_last_hidden_states": last,
        "anchor_positions": anchors,
        "block_keep_mask": keep,
    }
