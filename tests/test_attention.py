"""What a block token sees, and that the whole draft keeps to it."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dspark_lightning.attention import block_visibility
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.registry import build_draft_model
from dspark_lightning.outputs import DSparkForwardOutput
from helpers import seeded, tiny_qwen3_config

S, N, K = 24, 3, 4
F = 2  # feature layers
ANCHORS, KEEP = torch.tensor([[4, 9, 15]]), torch.tensor([[True, True, True]])


@pytest.fixture(scope="module", params=["vanilla", "gated", "rnn"])
def draft(request: pytest.FixtureRequest) -> DSparkDraft:
    # Larger weights than the usual initial ones, so that everything that is visible also matters.
    config = tiny_qwen3_config(initializer_range=0.2)
    with seeded(0):
        return build_draft_model(
            config,
            mask_token_id=96,
            num_draft_layers=F,
            block_size=K,
            num_anchors=N,
            markov_rank=8,
            markov_head_type=request.param,
        ).eval()


def inputs(rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    with seeded(seed):
        return {
            "input_ids": torch.randint(0, 96, (rows, S)),
            "target_hidden_states": torch.randn(rows, S, F * 32),
            "loss_mask": torch.ones(rows, S, dtype=torch.int64),
            "target_last_hidden_states": torch.randn(rows, S, 32),
            "anchor_positions": ANCHORS.expand(rows, -1),
            "block_keep_mask": KEEP.expand(rows, -1),
        }


def block(output: DSparkForwardOutput, index: int) -> tuple[Tensor, Tensor]:
    """Logits and confidence of one block of the first row."""
    return output.draft_logits[0, index], output.confidence_pred[0, index]


def equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    """Up to rounding: blocks that are computed together change the order of sums."""
    return all(torch.allclose(x, y, rtol=1e-6, atol=1e-5) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_visibility_equals_the_definition(packed: bool, masked: bool) -> None:
    anchors, keep = torch.tensor([[3, 8, 0], [1, 5, 6]]), torch.tensor([[True, True, False], [True, True, True]])
    seq_lens = torch.tensor([[5, 5, 0], [2, 2, 6]])
    document = torch.tensor([[0] * 5 + [1] * 5, [0, 0, 1, 1] + [2] * 6])
    real = torch.ones(2, 10).index_fill(1, torch.tensor([0, 4]), 0)
    extra = {"seq_lens": seq_lens} if packed else {}
    extra |= {"attention_mask": real} if masked else {}
    visible = block_visibility(10, anchors, keep, 2, **extra)
    assert visible.shape == (2, 1, 6, 16)
    for row, query, key in product(range(2), range(6), range(16)):
        anchor = anchors[row, query // 2]
        if key >= 10:
            expected = (key - 10) // 2 == query // 2
        else:
            expected = bool(keep[row, query // 2]) and key < anchor
            expected &= not packed or bool(document[row, key] == document[row, anchor])
            expected &= not masked or bool(real[row, key])
        assert visible[row, 0, query, key] == expected


def test_a_block_reads_exactly_the_features_before_its_anchor(draft: DSparkDraft) -> None:
    given = inputs()
    features = given["target_hidden_states"].requires_grad_()
    output = draft(**given)
    for index, anchor in enumerate(ANCHORS[0].tolist()):
        (gradient,) = torch.autograd.grad(output.draft_logits[0, index].square().sum(), features, retain_graph=True)
        read = gradient[0].abs().sum(dim=-1) > 0
        assert read.tolist() == [position < anchor for position in range(S)]


@pytest.mark.parametrize(("position", "changes"), [(0, True), (8, True), (9, False), (10, False), (15, False)])
def test_a_changed_feature_matters_only_before_the_anchor(draft: DSparkDraft, position: int, changes: bool) -> None:
    given, changed = inputs(), inputs()
    changed["target_hidden_states"][0, position] += 1.0
    assert equal(block(draft(**given), 1), block(draft(**changed), 1)) != changes


@pytest.mark.parametrize(("mine", "other"), [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)])
def test_a_changed_token_of_another_block_does_not_matter(draft: DSparkDraft, mine: int, other: int) -> None:
    given, changed = inputs(), inputs()
    changed["input_ids"][0, ANCHORS[0, other]] += 1
    before, after = draft(**given), draft(**changed)
    assert equal(block(before, mine), block(after, mine))
    assert not equal(block(before, other), block(after, other))


@pytest.mark.parametrize("moved_to", [0, 5, 10, 20])
def test_moving_another_anchor_does_not_matter(draft: DSparkDraft, moved_to: int) -> None:
    given, moved = inputs(), inputs()
    moved["anchor_positions"] = torch.tensor([[4, 9, moved_to]])
    before, after = draft(**given), draft(**moved)
    assert equal(block(before, 0), block(after, 0)) and equal(block(before, 1), block(after, 1))
    assert not equal(block(before, 2), block(after, 2))


def test_dropping_another_block_does_not_matter(draft: DSparkDraft) -> None:
    given, dropped = inputs(), inputs()
    dropped["anchor_positions"], dropped["block_keep_mask"] = torch.tensor([[4, 9, 0]]), torch.tensor([[1, 1, 0]]) > 0
    before, after = draft(**given), draft(**dropped)
    assert equal(block(before, 0), block(after, 0)) and equal(block(before, 1), block(after, 1))
    assert after.draft_logits.isfinite().all()


def test_a_label_inside_the_block_reaches_later_slots_only(draft: DSparkDraft) -> None:
    """The label of slot 1 is the previous token of slot 2; it is no input of the backbone."""
    given, changed = inputs(), inputs()
    changed["input_ids"][0, 9 + 2] += 1
    before, after = draft(**given), draft(**changed)
    assert torch.equal(before.draft_logits[0, 1, :2], after.draft_logits[0, 1, :2])
    assert not torch.equal(before.draft_logits[0, 1, 2], after.draft_logits[0, 1, 2])


def test_rows_of_a_batch_do_not_meet(draft: DSparkDraft) -> None:
    both = draft(**inputs(rows=2))
    alone = draft(**{name: tensor[1:] for name, tensor in inputs(rows=2).items()})
    assert_close(both.draft_logits[1:], alone.draft_logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(both.draft_logits[0], both.draft_logits[1], atol=0.1)


def test_right_padding_changes_nothing(draft: DSparkDraft) -> None:
    given = inputs()
    widths = {"input_ids": (0, 8), "loss_mask": (0, 8), "target_hidden_states": (0, 0, 0, 8)}
    padded = {n: torch.nn.functional.pad(t, widths[n]) if n in widths else t for n, t in given.items()}
    padded["target_last_hidden_states"] = torch.nn.functional.pad(given["target_last_hidden_states"], (0, 0, 0, 8))
    before, after = draft(**given), draft(**padded)
    assert_close(before.draft_logits, after.draft_logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(before.eval_mask, after.eval_mask)


@pytest.mark.parametrize("position", [0, 2, 3])
def test_a_masked_context_position_is_never_seen(draft: DSparkDraft, position: int) -> None:
    given, changed = inputs(), inputs()
    changed["target_hidden_states"][0, position] += 1.0
    real = torch.ones(1, S, dtype=torch.int64).index_fill(1, torch.tensor(position), 0)
    before, after = (draft(**x, attention_mask=real) for x in (given, changed))
    assert_close(before.draft_logits, after.draft_logits, rtol=0, atol=1e-6)
    assert not torch.allclose(before.draft_logits, draft(**given).draft_logits, atol=1e-4)


def test_an_attention_mask_of_ones_changes_nothing(draft: DSparkDraft) -> None:
    ones = torch.ones(1, S, dtype=torch.int64)
    with_mask, without = draft(**inputs(), attention_mask=ones), draft(**inputs())
    assert torch.equal(with_mask.draft_logits, without.draft_logits)


def packed_inputs(*lengths: int) -> dict[str, Tensor]:
    """The same tokens as documents of these lengths, with an anchor in each."""
    return inputs() | {
        "position_ids": torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0),
        "doc_remaining": torch.cat([torch.arange(n - 1, -1, -1) for n in lengths]).unsqueeze(0),
        "seq_lens": torch.tensor([[*lengths, 0]]),
        "anchor_positions": torch.tensor([[4, 8, 15]]),
    }


@pytest.mark.parametrize(("document", "blocks"), [(slice(0, 10), slice(0, 2)), (slice(10, 24), slice(2, 3))])
def test_packed_documents_equal_each_alone(draft: DSparkDraft, document: slice, blocks: slice) -> None:
    packed = packed_inputs(10, 14)
    per_token = ("input_ids", "target_hidden_states", "loss_mask", "target_last_hidden_states")
    alone = draft(
        **{name: packed[name][:, document] for name in per_token},
        anchor_positions=packed["anchor_positions"][:, blocks] - document.start,
        block_keep_mask=KEEP[:, blocks],
    )
    together = draft(**packed)
    counts = alone.eval_mask
    assert torch.equal(counts, together.eval_mask[:, blocks])
    for name in ("draft_logits", "aligned_target_logits", "confidence_pred", "target_ids"):
        mine, theirs = getattr(alone, name)[counts], getattr(together, name)[:, blocks][counts]
        assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_only_relative_positions_matter(draft: DSparkDraft) -> None:
    positions = torch.arange(S).unsqueeze(0)
    outputs = [draft(**inputs(), position_ids=positions + shift).draft_logits for shift in (0, 37)]
    assert_close(outputs[0], outputs[1], rtol=1e-3, atol=1e-4)
    stretched = draft(**inputs(), position_ids=positions * 3).draft_logits
    assert not torch.allclose(outputs[0], stretched, atol=1e-2)


def test_attention_dropout_acts_in_training_only() -> None:
    draft = build_draft_model(tiny_qwen3_config(attention_dropout=0.5), mask_token_id=96, num_draft_layers=F)
    with seeded(0):
        evaluated = [draft.eval()(**inputs()).draft_logits for _ in range(2)]
        trained = [draft.train()(**inputs()).draft_logits for _ in range(2)]
    assert torch.equal(*evaluated)
    assert not torch.equal(*trained)
