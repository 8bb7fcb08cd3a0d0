"""The loss from hidden states equals the loss from logits: values, terms and every gradient."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import dspark_lightning.chunked_loss as chunked
from dspark_lightning import compute_dspark_loss
from dspark_lightning.outputs import DSparkForwardOutput, DSparkHiddenOutput
from dspark_lightning.slots import plan_slots
from helpers import seeded

B, S, N, K, H, R, V = 2, 17, 5, 4, 12, 6, 41
ALPHAS = {"loss_decay_gamma": 4.0, "ce_loss_alpha": 0.1, "l1_loss_alpha": 0.9, "confidence_head_alpha": 1.0}


@dataclass
class Problem:
    """Leaves and masks of one batch, from which both forms of the output are made."""

    rank: int = R
    teacher: bool = True
    confidence: bool = True
    softcap: float | None = None
    trainable_head: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0
    share: float = 0.7  # of slots that count
    leaves: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with seeded(self.seed):
            shapes = {"hidden": (B, N, K, H), "head": (V, H)}
            if self.rank:
                shapes |= {"latents": (B, N, K, self.rank), "markov_w2": (V, self.rank)}
            if self.confidence:
                shapes["confidence"] = (B, N, K)
            self.leaves = {
                name: (0.6 * torch.randn(shape)).to(self.dtype).requires_grad_() for name, shape in shapes.items()
            }
            self.leaves["head"].requires_grad_(self.trainable_head)
            self.teacher_hidden = (torch.randn(B, S, H) * 1.5).to(self.dtype)
            anchors = torch.rand(B, S - 1).argsort(-1)[:, :N].sort(-1).values
            positions = anchors.unsqueeze(-1) + torch.arange(K)
            self.positions = positions.clamp(max=S - 1)
            self.eval_mask = (torch.rand(B, N, K) < self.share) & (positions < S - 1)
            self.labels = torch.randint(V, (B, N, K))
        self.shared = {
            "target_ids": self.labels,
            "eval_mask": self.eval_mask,
            "block_keep_mask": self.eval_mask.any(-1),
            "confidence_pred": self.leaves.get("confidence"),
        }

    def cap(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def dense(self) -> DSparkForwardOutput:
        logits = self.cap(self.leaves["hidden"] @ self.leaves["head"].T)
        if self.rank:
            logits = logits + self.leaves["latents"] @ self.leaves["markov_w2"].T
        states = self.teacher_hidden[torch.arange(B).view(B, 1, 1), self.positions]
        teacher = self.cap(states @ self.leaves["head"].T).detach() if self.teacher else None
        return DSparkForwardOutput(draft_logits=logits, aligned_target_logits=teacher, **self.shared)

    def hidden(self) -> DSparkHiddenOutput:
        return DSparkHiddenOutput(
            hidden=self.leaves["hidden"],
            latents=self.leaves.get("latents"),
            teacher_hidden=self.teacher_hidden if self.teacher else None,
            plan=plan_slots(self.eval_mask, self.positions, S),
            head=self.leaves["head"],
            markov_w2=self.leaves.get("markov_w2"),
            softcap=self.softcap,
            **self.shared,
        )

    def solve(self, form: str, **alphas: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Terms, and gradients by leaf."""
        loss, terms = compute_dspark_loss(getattr(self, form)(), **ALPHAS | alphas, return_terms=True)
        wanted = {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}
        gradients = torch.autograd.grad(loss * 3, list(wanted.values()), allow_unused=True)
        return terms, {name: g for name, g in zip(wanted, gradients, strict=True) if g is not None}


def assert_same(problem: Problem, tolerance: float = 1e-5, **alphas: Any) -> None:
    (dense_terms, dense_gradients), (terms, gradients) = (problem.solve(form, **alphas) for form in ("dense", "hidden"))
    assert terms.keys() == dense_terms.keys()
    for name, expected in dense_terms.items():
        assert_close(terms[name], expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    assert gradients.keys() == dense_gradients.keys()
    for name, expected in dense_gradients.items():
        scale = expected.abs().max().clamp(min=1e-8)
        assert_close(
            gradients[name] / scale, expected / scale, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture(params=["one tile", "many tiles", "tiny chunks"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the slots are cut; 3 slots are fewer than one teacher position can have."""
    if request.param != "one tile":
        monkeypatch.setitem(chunked.TILE_BYTES, "cpu", 2 * 4 * V)
        monkeypatch.setitem(chunked.CHUNK_ROWS, "cpu", 3 if request.param == "tiny chunks" else 9)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("trainable_head", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("rank", [0, R])
def test_same_as_from_logits(rank: int, softcap: float | None, trainable_head: bool) -> None:
    assert_same(Problem(rank=rank, softcap=softcap, trainable_head=trainable_head))


@pytest.mark.usefixtures("pieces")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    share=st.floats(0, 1),
    rank=st.sampled_from([0, R]),
    confidence=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    trainable_head=st.booleans(),
    ce=st.sampled_from([0.0, 0.1, 1.0]),
    l1=st.sampled_from([0.0, 0.9]),
    gamma=st.sampled_from([None, 0.5, 4.0]),
)
def test_same_for_anything(ce: float, l1: float, gamma: float | None, **problem: Any) -> None:
    alphas = {"ce_loss_alpha": ce, "l1_loss_alpha": l1, "loss_decay_gamma": gamma}
    assert_same(Problem(**problem), **alphas)


def test_same_without_a_teacher() -> None:
    assert_same(Problem(teacher=False), l1_loss_alpha=0.0)
    with pytest.raises(ValueError, match=r"l1_loss_alpha 0\.9 needs the teacher's logits"):
        compute_dspark_loss(Problem(teacher=False).hidden(), **ALPHAS)


def test_the_gradient_is_that_of_the_function() -> None:
    """Against finite differences, where no |p - q| changes sign: teacher and draft far apart."""
    problem = Problem(confidence=False, seed=3)
    _, gradients = problem.solve("hidden")
    with seeded(5):
        for name in ("hidden", "latents", "markov_w2"):
            leaf = problem.leaves[name]
            direction = torch.randn_like(leaf)
            direction /= direction.norm()
            values = []
            for step in (1e-2, -1e-2):
                moved = Problem(confidence=False, seed=3)
                moved.leaves[name] = (leaf + step * direction).detach()
                values.append(compute_dspark_loss(moved.hidden(), **ALPHAS).double() * 3)
            slope = (values[0] - values[1]) / 2e-2
            assert_close((gradients[name] * direction).sum().double(), slope, rtol=2e-2, atol=1e-3)


def test_no_slot_counts() -> None:
    terms, gradients = Problem(share=0.0, trainable_head=True).solve("hidden")
    assert terms["loss"] == terms["loss_den"] == 0
    assert gradients.keys() == {"hidden", "head", "latents", "markov_w2", "confidence"}
    assert all(gradient.count_nonzero() == 0 for gradient in gradients.values())


@pytest.mark.parametrize("name", ["hidden", "latents", "confidence"])
def test_what_an_unused_slot_holds_does_not_matter(name: str) -> None:
    clean, poisoned = Problem(), Problem()
    poisoned.leaves[name].data[~poisoned.eval_mask] = torch.nan
    (terms, gradients), (same_terms, same_gradients) = (problem.solve("hidden") for problem in (clean, poisoned))
    for expected, ours in ((terms, same_terms), (gradients, same_gradients)):
        assert all(torch.equal(expected[key], ours[key]) for key in expected)


def test_improbable_labels_have_a_finite_loss() -> None:
    """exp(-200) is 0 in fp32; the loss is 200 all the same."""
    problem = Problem(rank=0, confidence=False)
    problem.leaves["hidden"] = torch.zeros(B, N, K, H).index_fill(-1, torch.tensor(0), 1.0).requires_grad_()
    head = torch.zeros(V, H)
    head[7, 0] = 200.0
    problem.leaves["head"], problem.labels[:] = head, 3
    terms, gradients = problem.solve("hidden")
    assert terms["ce_loss"].item() == pytest.approx(200.0, rel=1e-6)
    assert gradients["hidden"].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Products in half precision, everything after them in fp32: as close to fp32 as the inputs are."""
    half, full = Problem(dtype=dtype, seed=1), Problem(seed=1)
    for name in full.leaves:
        full.leaves[name].data.copy_(half.leaves[name].data.float())
    full.teacher_hidden = half.teacher_hidden.float()
    (terms, gradients), (exact_terms, exact) = half.solve("hidden"), full.solve("hidden")
    assert all(term.dtype == torch.float32 for term in terms.values())
    assert_close(terms["loss"], exact_terms["loss"], rtol=1e-2, atol=0)
    for name, gradient in gradients.items():
        assert gradient.dtype == dtype
        error = (gradient.float() - exact[name]).norm() / exact[name].norm()
        assert error < (0.03 if dtype == torch.bfloat16 else 0.01), f"{name}: {error:.3f}"


def test_small_float16_gradients_do_not_underflow() -> None:
    """A gradient of 3e-8 would be 0 in float16."""
    half, full = (Problem(dtype=dtype, rank=0, confidence=False) for dtype in (torch.float16, torch.float32))
    full.leaves["hidden"].data.copy_(half.leaves["hidden"].data.float())
    full.leaves["head"].data.copy_(half.leaves["head"].data.float())
    alphas = {"ce_loss_alpha": 2e-7, "l1_loss_alpha": 0.0}
    seen = []
    for problem in (half, full):
        loss = compute_dspark_loss(problem.hidden(), **ALPHAS | alphas)
        (gradient,) = torch.autograd.grad(loss * 1e6, [problem.leaves["hidden"]])
        seen.append(gradient.float())
    assert (seen[0] - seen[1]).norm() / seen[1].norm() < 0.2


def test_autocast_decides_the_products() -> None:
    problem = Problem(seed=2)
    exact, _ = problem.solve("hidden")
    with torch.autocast("cpu", torch.bfloat16):
        terms, gradients = problem.solve("hidden")
    assert not torch.equal(terms["loss"], exact["loss"])
    assert_close(terms["loss"], exact["loss"], rtol=2e-2, atol=0)
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())


def test_a_sum_that_float16_cannot_hold_is_normalised_first() -> None:
    """2000 slots pull at one entry; times the scale that is 128000, beyond float16, but over the slots it is 1."""
    count = 2000
    one = torch.ones(1, count, 1, 1)
    output = DSparkHiddenOutput(
        hidden=torch.zeros(1, count, 1, H, dtype=torch.float16),
        latents=one.half().requires_grad_(),
        teacher_hidden=None,
        plan=plan_slots(one[..., 0] > 0, torch.zeros(1, count, 1, dtype=torch.int64), S),
        head=torch.zeros(V, H, dtype=torch.float16),
        markov_w2=torch.zeros(V, 1, dtype=torch.float16).requires_grad_(),
        softcap=None,
        target_ids=torch.full((1, count, 1), 3),
        eval_mask=one[..., 0] > 0,
        block_keep_mask=one[..., 0, 0] > 0,
        confidence_pred=None,
    )
    compute_dspark_loss(output, **ALPHAS | {"ce_loss_alpha": 1.0, "l1_loss_alpha": 0.0}).backward()
    expected = torch.full((V, 1), 1 / V)
    expected[3] -= 1  # the mean over slots of p - onehot
    assert_close(output.markov_w2.grad.float(), expected, rtol=2e-3, atol=2e-4)


def test_autocast_rounds_every_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()
    mm = torch.mm

    def watching_mm(left: Tensor, right: Tensor, **kwargs: Any) -> Tensor:
        seen.update((left.dtype, right.dtype))
        return mm(left, right, **kwargs)

    monkeypatch.setattr(torch, "mm", watching_mm)
    with torch.autocast("cpu", torch.bfloat16):
        compute_dspark_loss(Problem().hidden(), **ALPHAS).backward()
    assert seen == {torch.bfloat16}


def test_without_gradients_only_the_values_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    products = count_products(monkeypatch)
    with torch.no_grad():
        loss = compute_dspark_loss(Problem().hidden(), **ALPHAS)
    forward_only = len(products)
    products.clear()
    assert_close(compute_dspark_loss(Problem().hidden(), **ALPHAS).detach(), loss)
    assert forward_only == 2 and len(products) == 5  # logits, Markov bias; and the gradients of three matrices


def count_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the rows of every matrix product that `chunked` makes."""
    rows: list[int] = []
    mm, addmm_ = torch.mm, Tensor.addmm_

    def counting_mm(left: Tensor, right: Tensor, **kwargs: Any) -> Tensor:
        rows.append(len(left))
        return mm(left, right, **kwargs)

    def counting_addmm(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
        rows.append(len(left))
        return addmm_(total, left, right)

    monkeypatch.setattr(torch, "mm", counting_mm)
    monkeypatch.setattr(Tensor, "addmm_", counting_addmm)
    return rows


@pytest.mark.usefixtures("pieces")
def test_only_counted_slots_and_distinct_positions_are_projected(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(rank=0, seed=4)
    plan = plan_slots(problem.eval_mask, problem.positions, S)
    assert len(plan.teacher_rows) < len(plan.slots) == int(problem.eval_mask.sum())
    rows = count_products(monkeypatch)
    with torch.no_grad():
        compute_dspark_loss(problem.hidden(), **ALPHAS)
    pieces = plan.cut(chunked.CHUNK_ROWS["cpu"], count_teachers=True)
    assert rows == [slots.stop - slots.start + positions.stop - positions.start for slots, positions in pieces]
    assert max(rows) <= chunked.CHUNK_ROWS["cpu"]
    again = sum(positions.start == before.stop - 1 for (_, before), (_, positions) in pairwise(pieces))
    assert sum(rows) == len(plan.slots) + len(plan.teacher_rows) + again
    largest = max(torch.unique_consecutive(plan.teacher_of_slot, return_counts=True)[1]).item()
    assert again == 0 or largest + 1 > chunked.CHUNK_ROWS["cpu"]  # only a position that fills several chunks


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 10), st.integers(1, 4))
def test_cuts_cover_every_slot_once(counts: list[int], size: int, smaller: int) -> None:
    positions = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64)).view(1, 1, -1)
    plan = plan_slots(torch.ones_like(positions) > 0, positions, max(1, len(counts)))
    for pieces in (plan.cut(size), [x for piece in plan.cut(size) for x in plan.cut(smaller, within=piece)]):
        assert [i for slots, _ in pieces for i in range(slots.start, slots.stop)] == list(range(sum(counts)))
        for slots, rows in pieces:
            assert slots.stop - slots.start <= size
            assert plan.teacher_of_slot[slots].unique().tolist() == list(range(rows.start, rows.stop))
    if max(counts, default=0) <= size:
        assert sum(rows.stop - rows.start for _, rows in plan.cut(size)) == len(counts)


def test_a_second_backward_pass_gives_the_same() -> None:
    problem = Problem()
    loss = compute_dspark_loss(problem.hidden(), **ALPHAS)
    first, second = (torch.autograd.grad(loss, [problem.leaves["hidden"]], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
