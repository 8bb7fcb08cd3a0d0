"""The loss and its terms, against numbers that follow from the formulas."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from dspark_lightning.loss import compute_dspark_loss
from dspark_lightning.outputs import DSparkForwardOutput
from helpers import seeded

ALPHAS = {"loss_decay_gamma": 4.0, "ce_loss_alpha": 0.1, "l1_loss_alpha": 0.9, "confidence_head_alpha": 1.0}
E1 = math.exp(-1)


def logits_of(*probs: list[float]) -> Tensor:
    """Logits [1, 1, K, V] of one block with these distributions."""
    return torch.tensor(probs).log().clamp(min=-1e4).view(1, 1, len(probs), -1)


def confidence_of(*values: float) -> Tensor:
    """Confidence logits [1, 1, K]."""
    return torch.tensor(values).logit().view(1, 1, -1)


def make_output(draft_logits: Tensor, teacher: Tensor | None = None, **changes: Any) -> DSparkForwardOutput:
    """Every slot counts, every label is token 0, no confidence head, unless changed."""
    shape = draft_logits.shape[:3]
    fields = {
        "draft_logits": draft_logits,
        "target_ids": torch.zeros(shape, dtype=torch.int64),
        "eval_mask": torch.ones(shape, dtype=torch.bool),
        "block_keep_mask": torch.ones(shape[:2], dtype=torch.bool),
        "confidence_pred": None,
        "aligned_target_logits": teacher,
    }
    return DSparkForwardOutput(**{**fields, **changes})


def random_output(seed: int = 0, rows: int = 2, **changes: Any) -> DSparkForwardOutput:
    """[rows, 3, 4] slots over 9 tokens, as leaves; block 2 of the last row is dropped, others have 4, 2 and 1 slots."""
    with seeded(seed):
        eval_mask = (torch.arange(4) < torch.tensor([4, 2, 1]).view(1, 3, 1)).repeat(rows, 1, 1)
        eval_mask[-1, 2] = False
        fields = {
            "target_ids": torch.randint(0, 9, (rows, 3, 4)),
            "eval_mask": eval_mask,
            "block_keep_mask": eval_mask.any(-1),
            "confidence_pred": torch.randn(rows, 3, 4).requires_grad_(),
        }
        draft_logits, teacher = torch.randn(2, rows, 3, 4, 9) * 2
        return make_output(draft_logits.requires_grad_(), teacher, **{**fields, **changes})


def terms_of(output: DSparkForwardOutput, **changes: Any) -> dict[str, Tensor]:
    return compute_dspark_loss(outputs=output, **{**ALPHAS, **changes}, return_terms=True)[1]


def gradients(output: DSparkForwardOutput, **changes: Any) -> tuple[Tensor, ...]:
    loss = compute_dspark_loss(outputs=output, **{**ALPHAS, **changes})
    leaves = [leaf for leaf in (output.draft_logits, output.confidence_pred) if leaf is not None]
    return torch.autograd.grad(loss, leaves)


def value(terms: dict[str, Tensor], name: str) -> object:
    return pytest.approx(terms[name].tolist(), abs=1e-5)


def test_a_perfect_draft() -> None:
    logits = random_output().draft_logits.detach()
    terms = terms_of(make_output(logits, logits + 5.0))
    assert terms["l1_loss"] < 1e-6
    assert_close(terms["accept_rate_per_pos_num"], terms["accept_rate_per_pos_den"])
    assert_close(terms["tau_num"] / terms["tau_den"], torch.tensor(1.0 + 4))


def test_a_draft_that_is_never_right() -> None:
    terms = terms_of(make_output(logits_of([1, 0, 0], [0, 1, 0]), logits_of([0, 0, 1], [0, 0, 1])))
    assert value(terms, "l1_loss") == 2
    assert terms["accept_rate_per_pos_num"].tolist() == [0, 0]
    assert terms["tau_num"] / terms["tau_den"] == 1


@pytest.mark.parametrize("vocab", [2, 5, 100])
def test_a_uniform_draft_against_a_certain_teacher(vocab: int) -> None:
    teacher = torch.full((1, 1, 3, vocab), -1e4).index_fill(-1, torch.tensor(0), 0.0)
    terms = terms_of(make_output(torch.zeros(1, 1, 3, vocab), teacher))
    assert value(terms, "ce_loss") == math.log(vocab)
    assert value(terms, "l1_loss") == 2 * (1 - 1 / vocab)
    assert value(terms, "accept_rate_per_pos_num") == [1 / vocab] * 3


@pytest.mark.parametrize(
    ("gamma", "expected"), [(None, (1 + 2 + 4) / 3), (1.0, (1 + 2 * E1 + 4 * E1**2) / (1 + E1 + E1**2))]
)
def test_slots_are_weighted_from_the_first_one(gamma: float | None, expected: float) -> None:
    logits = logits_of(*([math.exp(-nll), 1 - math.exp(-nll)] for nll in (1, 2, 4)))
    terms = terms_of(make_output(logits), loss_decay_gamma=gamma, l1_loss_alpha=0)
    assert value(terms, "ce_loss") == expected


def test_slots_weigh_alike_across_blocks() -> None:
    """One full block and one of a single slot: 1 + 2 slots weigh 1, e^-1, not a mean of block means."""
    logits = torch.cat([logits_of([0.5, 0.5], [0.25, 0.75]), logits_of([0.125, 0.875], [0.9, 0.1])], dim=1)
    output = make_output(logits, eval_mask=torch.tensor([[[True, True], [True, False]]]))
    terms = terms_of(output, loss_decay_gamma=1.0, l1_loss_alpha=0)
    assert value(terms, "ce_loss") == math.log(2) * (1 + 2 * E1 + 3) / (2 + E1)
    assert value(terms, "loss_den") == 2 + E1
    assert value(terms, "ce_loss_num") == math.log(2) * (1 + 2 * E1 + 3)


@pytest.mark.parametrize("alphas", [(0.1, 0.9, 1.0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0.3, 0.2, 5.0)])
def test_the_loss_is_the_weighted_sum_of_its_terms(alphas: tuple[float, float, float]) -> None:
    names = ("ce_loss", "l1_loss", "confidence_loss")
    given = dict(zip((f"{name}_alpha" for name in ("ce_loss", "l1_loss", "confidence_head")), alphas, strict=True))
    loss, terms = compute_dspark_loss(random_output(), 4.0, **given, return_terms=True)
    weighted = sum(alpha * terms[name] for alpha, name in zip(alphas, names, strict=True))
    assert_close(loss.detach(), weighted)
    assert_close(terms["loss"], weighted)
    assert loss == compute_dspark_loss(random_output(), 4.0, **given)


def test_each_term_is_its_sum_over_the_common_denominator() -> None:
    terms = terms_of(random_output())
    for name in ("ce_loss", "l1_loss", "confidence_loss"):
        assert_close(terms[name], terms[f"{name}_num"] / (terms["loss_den"] + 1e-6))


def test_terms_against_loops() -> None:
    output = random_output()
    sums = dict.fromkeys(("ce_loss_num", "l1_loss_num", "confidence_loss_num", "loss_den"), 0.0)
    p, q = output.draft_logits.detach().softmax(-1), output.aligned_target_logits.softmax(-1)
    for index in output.eval_mask.nonzero().tolist():
        row, block, slot = index
        weight, distance = math.exp(-slot / 4), (p - q)[row, block, slot].abs().sum().item()
        c, a = output.confidence_pred[row, block, slot].sigmoid().item(), 1 - distance / 2
        sums["loss_den"] += weight
        sums["ce_loss_num"] -= weight * math.log(p[row, block, slot, output.target_ids[row, block, slot]])
        sums["l1_loss_num"] += weight * distance
        sums["confidence_loss_num"] -= weight * (a * math.log(c) + (1 - a) * math.log(1 - c))
    terms = terms_of(output)
    assert {name: terms[name].item() for name in sums} == pytest.approx(sums, rel=1e-5)


def acceptance_output() -> DSparkForwardOutput:
    """Acceptances (1, 0.5, 0.5) in a full block, (0.5) in one of a single slot, and a dropped block."""
    accepted = torch.tensor([[[1.0, 0.5, 0.5], [0.5, 1.0, 1.0], [1.0, 1.0, 1.0]]])
    logits = torch.stack([accepted, 1 - accepted], dim=-1).log().clamp(min=-1e4)
    teacher = torch.tensor([0.0, -1e4]).expand_as(logits)
    eval_mask = torch.tensor([[[1, 1, 1], [1, 0, 0], [0, 0, 0]]]).bool()
    keep = torch.tensor([[True, True, False]])
    return make_output(logits, teacher, eval_mask=eval_mask, block_keep_mask=keep)


def test_acceptance_by_hand() -> None:
    terms = terms_of(acceptance_output())
    assert value(terms, "accept_rate_per_pos_num") == [1.5, 0.5, 0.5]
    assert value(terms, "accept_rate_per_pos_den") == [2, 1, 1]
    assert value(terms, "tau_num") == (1 + 1 + 0.5 + 0.25) + (1 + 0.5)
    assert value(terms, "tau_den") == 2
    assert value(terms, "tau_full_num") == 1 + 1 + 0.5 + 0.25
    assert value(terms, "tau_full_den") == 1
    assert value(terms, "supervised_tokens") == 4
    assert value(terms, "kept_anchors") == 2


def test_acceptance_is_known_without_its_loss_term() -> None:
    with_term, without = terms_of(acceptance_output()), terms_of(acceptance_output(), l1_loss_alpha=0.0)
    for name in ("accept_rate_per_pos_num", "tau_num", "tau_den", "l1_loss"):
        assert torch.equal(with_term[name], without[name])


def test_confidence_terms_by_hand() -> None:
    """Acceptances (1, 0.5), confidences (0.8, 0.6): errors -0.2, 0.1; products 0.8, 0.48 against 1, 0.5."""
    output = make_output(
        logits_of([1, 0], [0.5, 0.5]), logits_of([1, 0], [1, 0]), confidence_pred=confidence_of(0.8, 0.6)
    )
    terms = terms_of(output, loss_decay_gamma=1.0)
    assert value(terms, "confidence_abs_error_num") == 0.2 + 0.1 * E1
    assert value(terms, "confidence_bias_num") == -0.2 + 0.1 * E1
    assert value(terms, "confidence_cumprod_bias_num") == -0.2 - 0.02 * E1
    assert value(terms, "confidence_diag_den") == 1 + E1
    assert value(terms, "confidence_loss_num") == -math.log(0.8) - E1 * (math.log(0.6) + math.log(0.4)) / 2


def test_slots_that_do_not_count_stay_out_of_the_confidence_terms() -> None:
    eval_mask = torch.tensor([[[True, False]]])
    output = make_output(
        logits_of([1, 0], [0.5, 0.5]),
        logits_of([1, 0], [1, 0]),
        confidence_pred=confidence_of(0.8, 0.6),
        eval_mask=eval_mask,
    )
    terms = terms_of(output)
    assert value(terms, "confidence_abs_error_num") == 0.2
    assert value(terms, "confidence_cumprod_bias_num") == -0.2
    assert value(terms, "confidence_diag_den") == 1


@pytest.mark.parametrize(("has_teacher", "has_confidence"), [(False, False), (False, True), (True, False)])
def test_terms_that_cannot_be_known_are_absent(has_teacher: bool, has_confidence: bool) -> None:
    changes = {} if has_teacher else {"aligned_target_logits": None}
    changes |= {} if has_confidence else {"confidence_pred": None}
    names = terms_of(random_output()._replace(**changes), l1_loss_alpha=0.0).keys()
    assert {"loss", "ce_loss", "ce_loss_num", "loss_den", "supervised_tokens", "kept_anchors"} <= names
    assert ("tau_num" in names) == ("accept_rate_per_pos_num" in names) == ("l1_loss" in names) == has_teacher
    assert not any("confidence" in name for name in names)


def test_terms_are_detached_fp32() -> None:
    for name, term in terms_of(random_output()).items():
        assert term.dtype == torch.float32 and not term.requires_grad, name


def test_sums_of_two_batches_add_up() -> None:
    """So that metrics do not depend on how a window is cut into batches."""
    one, two = random_output(0), random_output(1)
    pairs = zip(one, two, strict=True)
    both = terms_of(DSparkForwardOutput(*(torch.cat(pair) for pair in pairs if pair[0] is not None)))
    first, second = terms_of(one), terms_of(two)
    names = [name for name in both if name.endswith(("_num", "_den")) or name in ("supervised_tokens", "kept_anchors")]
    assert len(names) == 16
    for name in names:
        assert_close(both[name], first[name] + second[name], rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_cross_entropy() -> None:
    output = random_output()
    gradient, _ = gradients(output, l1_loss_alpha=0.0, ce_loss_alpha=1.0, confidence_head_alpha=0.0)
    weight = output.eval_mask * torch.exp(-torch.arange(4) / 4)
    expected = output.draft_logits.detach().softmax(-1) - F.one_hot(output.target_ids, 9)
    assert_close(gradient, expected * (weight / weight.sum()).unsqueeze(-1), rtol=1e-4, atol=1e-6)


def test_the_gradient_of_the_confidence_loss_stays_in_the_confidence() -> None:
    output = random_output()
    to_draft, to_confidence = gradients(output, ce_loss_alpha=0.0, l1_loss_alpha=0.0)
    distance = (output.draft_logits.softmax(-1) - output.aligned_target_logits.softmax(-1)).abs().sum(-1).detach()
    weight = output.eval_mask * torch.exp(-torch.arange(4) / 4)
    expected = (output.confidence_pred.detach().sigmoid() - (1 - distance / 2)) * weight / weight.sum()
    assert to_draft.abs().max() == 0
    assert_close(to_confidence, expected, rtol=1e-4, atol=1e-6)


def test_the_teacher_gets_no_gradient() -> None:
    teacher = torch.randn(2, 3, 4, 9, generator=torch.Generator().manual_seed(3)).requires_grad_()
    compute_dspark_loss(random_output(aligned_target_logits=teacher), **ALPHAS).backward()
    assert teacher.grad is None


def test_slot_zero_is_trained_most() -> None:
    gradient, _ = gradients(random_output(eval_mask=torch.ones(2, 3, 4).bool()), loss_decay_gamma=0.5)
    size = gradient.abs().sum(dim=(0, 1, 3))
    assert (size[0] > size[1:]).all()


def test_no_anchor_anywhere() -> None:
    nothing = torch.zeros(2, 3, 4, dtype=torch.bool)
    output = random_output(eval_mask=nothing, block_keep_mask=nothing[..., 0])
    loss, terms = compute_dspark_loss(output, **ALPHAS, return_terms=True)
    assert loss == 0
    assert all(term.abs().max() == 0 for term in terms.values())
    assert all(gradient.abs().max() == 0 for gradient in gradients(output))


def test_a_row_without_anchors_does_not_dilute_the_others() -> None:
    output = random_output()
    output.eval_mask[1] = False
    alone = DSparkForwardOutput(*(tensor[:1] for tensor in output if tensor is not None))
    assert_close(compute_dspark_loss(output, **ALPHAS), compute_dspark_loss(alone, **ALPHAS))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e4])
@pytest.mark.parametrize("name", ["draft_logits", "aligned_target_logits", "confidence_pred"])
def test_what_other_slots_hold_does_not_matter(name: str, garbage: float) -> None:
    clean, dirty = random_output(), random_output()
    outside = ~dirty.eval_mask
    with torch.no_grad():
        getattr(dirty, name)[outside] = garbage
    expected, terms = terms_of(clean), terms_of(dirty)
    assert all(torch.equal(terms[key], expected[key]) for key in expected)
    for ours, theirs in zip(gradients(dirty), gradients(clean), strict=True):
        assert torch.equal(ours, theirs), "all zero outside the mask: a NaN there would reach the shared weights"


def test_autocast_changes_nothing() -> None:
    expected = compute_dspark_loss(random_output(), **ALPHAS)
    with torch.autocast("cpu", torch.bfloat16):
        output = random_output()
        loss = compute_dspark_loss(output, **ALPHAS)
        ours = gradients(output)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients(random_output()), strict=True))


def near_teacher(dtype: torch.dtype) -> DSparkForwardOutput:
    """A draft close to its teacher over 256 tokens, where the difference of probabilities is small; bf16 values."""
    with seeded(0):
        teacher = (torch.randn(2, 3, 4, 256) * 3).bfloat16().to(dtype)
        draft = (teacher.float() + torch.randn(2, 3, 4, 256) * 0.05).bfloat16().to(dtype)
    return make_output(draft.requires_grad_(), teacher)


def relative_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours.float() - reference).norm() / reference.norm())


def test_bf16_logits_give_the_fp32_gradient() -> None:
    (reference,) = gradients(near_teacher(torch.float32), ce_loss_alpha=0.0)
    (ours,) = gradients(near_teacher(torch.bfloat16), ce_loss_alpha=0.0)
    assert relative_error(ours, reference) < 4e-3  # the gradient itself is rounded to bf16 once, at the end


def test_a_bf16_difference_would_be_seen() -> None:
    """The mistake that the test above is there for."""
    output = near_teacher(torch.bfloat16)
    weight = torch.exp(-torch.arange(4) / 4)
    distance = (output.draft_logits.softmax(-1) - output.aligned_target_logits.softmax(-1)).abs().sum(-1)
    loss = 0.9 * (weight * distance).sum() / (6 * weight.sum())
    (wrong,) = torch.autograd.grad(loss, output.draft_logits)
    (reference,) = gradients(near_teacher(torch.float32), ce_loss_alpha=0.0)
    assert relative_error(wrong, reference) > 0.06


@pytest.mark.parametrize("gamma", [0.0, -1.0])
def test_gamma_must_be_positive(gamma: float) -> None:
    with pytest.raises(ValueError, match=f"loss_decay_gamma must be positive or None, got {gamma}"):
        compute_dspark_loss(random_output(), **{**ALPHAS, "loss_decay_gamma": gamma})


def test_the_variation_term_needs_a_teacher() -> None:
    output = random_output()._replace(aligned_target_logits=None)
    with pytest.raises(ValueError, match=r"l1_loss_alpha 0\.9 needs the teacher's logits"):
        compute_dspark_loss(output, **ALPHAS)
    assert compute_dspark_loss(output, **{**ALPHAS, "l1_loss_alpha": 0.0}).isfinite()
