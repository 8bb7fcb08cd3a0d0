"""The ways to compute block attention agree with the definition: the softmax over what the dense mask shows."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import dspark_lightning.split_attention as split
from dspark_lightning.attention import FlexOrSplitAttention, block_visibility, build_attention
from dspark_lightning.blocks import list_blocks
from dspark_lightning.flex_attention import FlexBlockAttention
from dspark_lightning.split_attention import SplitBlockAttention
from helpers import seeded

S, K, D = 40, 3, 8
KINDS = ["split", "dense"]
# Two rows: close anchors, far ones, one at the very start and one at the very end, two dummies.
ANCHORS = torch.tensor([[3, 4, 8, 21, 39, 0], [0, 17, 18, 19, 0, 0]])
KEEP = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]) > 0
SEQ_LENS = torch.tensor([[7, 15, 18], [17, 20, 0]])
REAL = torch.ones(2, S).index_fill(1, torch.tensor([1, 2, 7, 20]), 0)
REAL[1, :18] = 0  # a block that sees no context at all
CASES = {
    "plain": {},
    "packed": {"seq_lens": SEQ_LENS},
    "masked": {"attention_mask": REAL},
    "packed and masked": {"seq_lens": SEQ_LENS, "attention_mask": REAL},
}


def draw(blocks: int, heads: int, kv_heads: int, length: int, rows: int = 2, value_dim: int = D) -> list[Tensor]:
    with seeded(0):
        shapes = [(blocks, heads, K, D), (blocks, kv_heads, K, D), (blocks, kv_heads, K, value_dim)]
        shapes += [(rows, kv_heads, length, D), (rows, kv_heads, length, value_dim)]
        return [torch.randn(shape, dtype=torch.float64).float().requires_grad_() for shape in shapes]


def draw_sinks(heads: int) -> Tensor:
    with seeded(2):
        return torch.randn(heads).requires_grad_()


def by_definition(
    tensors: list[Tensor], anchors: Tensor, keep: Tensor, extra: dict[str, Any], sinks: Tensor | None = None
) -> Tensor:
    """Softmax over every single key and the sink, in fp64, through the dense mask."""
    query, key, value, context_key, context_value = (x.double() for x in tensors)
    visible = block_visibility(S, anchors, keep, K, **extra)  # [B, 1, N*K, S+N*K]
    groups = query.shape[1] // key.shape[1]
    attended = []
    for block, place in enumerate(keep.flatten().nonzero().squeeze(-1).tolist()):
        row, number = divmod(place, anchors.shape[1])
        seen = visible[row, 0, number * K]  # all slots of a block see the same
        keys = torch.cat([context_key[row, :, seen[:S]], key[block]], dim=1).repeat_interleave(groups, dim=0)
        values = torch.cat([context_value[row, :, seen[:S]], value[block]], dim=1).repeat_interleave(groups, dim=0)
        weights = (query[block] @ keys.transpose(-1, -2) * 0.3).exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.double().exp().view(-1, 1, 1)
        attended.append(weights / total @ values)
    return torch.stack(attended).float()


def assert_agrees(
    kind: Any,
    anchors: Tensor,
    keep: Tensor,
    extra: dict[str, Any],
    heads: int = 4,
    kv: int = 2,
    with_sinks: bool = False,
) -> None:
    blocks = list_blocks(S, anchors, keep, **extra, trim=False)
    tensors = draw(len(blocks.rows), heads, kv, S, rows=len(anchors))
    sinks = draw_sinks(heads) if with_sinks else None
    attention = build_attention(
        kind, blocks, lambda: block_visibility(S, anchors, keep, K, **extra), False, torch.device("cpu")
    )
    ours = attention(*tensors, scale=0.3, sinks=sinks)
    expected = by_definition(tensors, anchors, keep, extra, sinks)
    assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    tensors += [] if sinks is None else [sinks]
    with seeded(1):
        toward = torch.randn_like(ours)
    for mine, right in zip(
        torch.autograd.grad(ours, tensors, toward), torch.autograd.grad(expected, tensors, toward), strict=True
    ):
        assert_close(mine, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_the_definition(
    kind: str, heads: int, kv_heads: int, case: str, with_sinks: bool
) -> None:
    assert_agrees(kind, ANCHORS, KEEP, CASES[case], heads, kv_heads, with_sinks)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (3, 3)])
@torch.no_grad()
def test_values_of_flex_attention_equal_the_definition(heads: int, kv_heads: int, case: str, with_sinks: bool) -> None:
    """FlexAttention has no backward pass on the CPU."""
    blocks = list_blocks(S, ANCHORS, KEEP, **CASES[case], trim=False)
    tensors = draw(len(blocks.rows), heads, kv_heads, S)
    sinks = draw_sinks(heads) if with_sinks else None
    ours = FlexBlockAttention(blocks)(*tensors, scale=0.3, sinks=sinks)
    assert_close(ours, by_definition(tensors, ANCHORS, KEEP, CASES[case], sinks), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, S - 1), min_size=5, max_size=5), min_size=1, max_size=3), st.data())
def test_split_attention_for_any_anchors(anchors: list[list[int]], data: st.DataObject) -> None:
    """Also unsorted and repeated ones, with any dummies, documents and holes."""
    rows = len(anchors)
    flags = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=rows, max_size=rows)
    keep = torch.tensor(data.draw(flags))
    keep[0, 0] = True
    extra: dict[str, Tensor] = {}
    if data.draw(st.booleans()):
        extra["seq_lens"] = torch.tensor([[13, 9, S - 22]] * rows)
    if data.draw(st.booleans()):
        with seeded(data.draw(st.integers(0, 9))):
            extra["attention_mask"] = (torch.rand(rows, S) < 0.7).long()
    assert_agrees("split", torch.tensor(anchors), keep, extra, with_sinks=data.draw(st.booleans()))


@pytest.mark.parametrize(("name", "value"), [("MAX_GROUP", 1), ("MAX_SCORES", 1), ("MIN_SPREAD", 1000)])
def test_the_grouping_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    monkeypatch.setattr(split, name, value)
    assert_agrees("split", ANCHORS, KEEP, CASES["packed and masked"])


def scores_computed(anchors: Tensor, keep: Tensor, extra: dict[str, Any]) -> tuple[int, int]:
    """Scores of one query head and slot that the groups compute against context, and those that are needed."""
    attention = SplitBlockAttention(list_blocks(4096, anchors, keep, **extra))
    groups = attention._groups(kv_heads=3, rows_of_block=21)
    computed = sum(len(group.anchors) * (group.anchors[-1] - group.start) for group in groups)
    blocks = list_blocks(4096, anchors, keep, **extra)
    return computed, int((blocks.anchors - blocks.starts).sum())


@pytest.mark.parametrize("packed", [False, True])
def test_hardly_any_score_is_computed_in_vain(packed: bool) -> None:
    with seeded(0):
        anchors = torch.rand(1, 4095).argsort(-1)[:, :128].sort(-1).values
    extra = {"seq_lens": torch.tensor([[1000, 700, 1500, 896]])} if packed else {}
    computed, needed = scores_computed(anchors, torch.ones(1, 128) > 0, extra)
    assert needed <= computed <= 1.25 * needed
    assert computed < 0.6 * 128 * 4096  # what the dense mask computes against context, without the other blocks


def test_dummies_cost_nothing() -> None:
    blocks = list_blocks(S, ANCHORS, KEEP)
    assert len(blocks.rows) == int(KEEP.sum()) == 9
    assert SplitBlockAttention(blocks)._groups(1, 1)[-1].last == 9
    nothing = list_blocks(S, torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5) > 0)
    assert len(nothing.rows) == 1  # one dummy, so that every parameter takes part
    assert SplitBlockAttention(nothing)._groups(1, 1) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_anchors_still_has_gradients(kind: Any) -> None:
    anchors, keep = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5) > 0
    blocks = list_blocks(S, anchors, keep, trim=False)
    tensors = draw(1, 4, 2, S)
    visible = block_visibility(S, anchors, keep, K)
    attended = build_attention(kind, blocks, lambda: visible, False, torch.device("cpu"))(*tensors, scale=0.3)
    own = (tensors[0] @ tensors[1].repeat_interleave(2, 1).transpose(-1, -2) * 0.3).softmax(-1)
    assert_close(attended, own @ tensors[2].repeat_interleave(2, 1), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(attended.sum(), tensors)
    assert gradients[3].count_nonzero() == gradients[4].count_nonzero() == 0  # no context is read


def test_the_values_may_be_of_another_width() -> None:
    blocks = list_blocks(S, ANCHORS, KEEP, trim=False)
    tensors = draw(9, 4, 4, S, value_dim=5)
    attended = SplitBlockAttention(blocks)(*tensors, scale=0.3)
    assert_close(attended, by_definition(tensors, ANCHORS, KEEP, {}), rtol=1e-5, atol=1e-5)


def test_bf16_is_computed_in_fp32() -> None:
    blocks = list_blocks(S, ANCHORS, KEEP, trim=False)
    tensors = [x.detach().bfloat16() for x in draw(9, 4, 2, S)]
    with torch.autocast("cpu", torch.bfloat16):
        attended = SplitBlockAttention(blocks)(*tensors, scale=0.3)
    assert attended.dtype == torch.bfloat16
    exact = by_definition(tensors, ANCHORS, KEEP, {})
    assert_close(attended, exact.bfloat16(), rtol=1e-2, atol=1e-6)  # one rounding, at the end


def test_nothing_behind_the_last_anchor_is_kept() -> None:
    anchors, keep = ANCHORS.clamp(max=21), KEEP
    assert list_blocks(S, anchors, keep).context_length == 22
    assert list_blocks(S, anchors, keep, trim=False).context_length == S
    padded = torch.ones(2, S).index_fill(1, torch.arange(22, S), 0)
    assert list_blocks(S, anchors, keep, None, padded).context_mask is None  # padding that nobody reaches
    assert list_blocks(S, anchors, keep, None, REAL).context_mask.shape == (2, 22)


@pytest.mark.parametrize("kind", ["split", "flex"])
def test_dropout_is_refused_where_there_is_none(kind: Any) -> None:
    attention = (SplitBlockAttention if kind == "split" else FlexBlockAttention)(list_blocks(S, ANCHORS, KEEP))
    with pytest.raises(ValueError, match=f"attention '{kind}' has no dropout, got attention_dropout 0.1: use 'dense'"):
        attention(*draw(9, 4, 2, S), scale=0.3, dropout=0.1)


def test_the_number_of_blocks_does_not_compile_again() -> None:
    """What runs on CUDA, compiled here by a backend that only counts."""
    from torch._dynamo.testing import CompileCounter
    from torch.nn.attention.flex_attention import flex_attention

    counter = CompileCounter()
    compiled = torch.compile(flex_attention, dynamic=True, backend=counter)
    for count in (3, 4, 5, 6):
        anchors = torch.arange(2, 2 + count).unsqueeze(0)
        blocks = list_blocks(S, anchors, torch.ones_like(anchors) > 0, trim=False)
        tensors = [x.detach() for x in draw(count, 4, 2, S, rows=1)]
        attention = FlexBlockAttention(blocks)
        expected = attention(*tensors, scale=0.3)
        attention.attend = compiled
        assert_close(attention(*tensors, scale=0.3), expected, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def test_flex_attention_needs_cuda() -> None:
    with pytest.raises(ValueError, match="attention 'flex' needs CUDA, but the draft is on cpu: use 'auto' or 'split'"):
        build_attention("flex", list_blocks(S, ANCHORS, KEEP), lambda: None, False, torch.device("cpu"))


@pytest.mark.parametrize(
    ("device", "dropout", "name"),
    [("cpu", False, "Split"), ("cpu", True, "Dense"), ("meta", False, "Split")],
)
def test_auto_takes_what_the_device_and_dropout_allow(device: str, dropout: bool, name: str) -> None:
    blocks = list_blocks(S, ANCHORS, KEEP)
    visible = block_visibility(S, ANCHORS, KEEP, K)
    attention = build_attention("auto", blocks, lambda: visible, dropout, torch.device(device))
    assert type(attention).__name__ == f"{name}BlockAttention"


@pytest.mark.parametrize(("head_dim", "name"), [(256, "Flex"), (257, "Split"), (512, "Split")])
@torch.no_grad()
def test_heads_that_flex_attention_cannot_hold_are_split(head_dim: int, name: str) -> None:
    blocks = list_blocks(S, ANCHORS, KEEP, trim=False)
    attention = FlexOrSplitAttention(blocks, torch.device("cpu"))
    with seeded(0):
        own = [torch.randn(len(blocks.rows), 2, K, head_dim) for _ in range(3)]
        seen = [torch.randn(2, 2, S, head_dim) for _ in range(2)]
    expected = SplitBlockAttention(blocks)(*own, *seen, scale=0.1)
    for _ in range(2):
        assert_close(attention(*own, *seen, scale=0.1), expected, rtol=1e-4, atol=1e-4)
    assert type(attention._chosen).__name__ == f"{name}BlockAttention"


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="attention must be one of auto, dense, split, flex, got 'fast'"):
        build_attention("fast", list_blocks(S, ANCHORS, KEEP), lambda: None, False, torch.device("cpu"))  # type: ignore[arg-type]
