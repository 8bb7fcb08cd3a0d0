"""The DSpark objective and the sums its metrics are made of (paper section 3.4).

With p the draft's and q the teacher's distribution, m = eval_mask, w = m exp(-k / gamma) and a = 1 - |p - q|_1 / 2:

    CE = sum w (-log p[label]) / sum w      TV = sum w |p - q|_1 / sum w      conf = sum w BCE(confidence, a) / sum w
    loss = ce_alpha CE + l1_alpha TV + conf_alpha conf

Where blocks have weights of their own, w is multiplied by that of the slot's block, in the loss and its denominator.
What is measured beside the loss (acceptance, tau, calibration) does not know these weights.

Everything is fp32: a probability difference in bf16 puts the gradient off by up to a third.
Shapes: B samples, N anchors, K block size, V vocabulary.
"""

import math
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark_lightning.chunked_loss import Matrices, Objective, chunked_losses
from dspark_lightning.outputs import DSparkForwardOutput, DSparkHiddenOutput
from dspark_lightning.precision import autocast_dtype, without_autocast

EPS = 1e-6
"""Added to the denominator, so that a batch without a supervised slot gives loss 0 and zero gradients."""


@overload
def compute_dspark_loss(
    outputs: DSparkForwardOutput | DSparkHiddenOutput,
    loss_decay_gamma: float | None,
    ce_loss_alpha: float,
    l1_loss_alpha: float,
    confidence_head_alpha: float,
    return_terms: Literal[False] = False,
) -> Tensor: ...


@overload
def compute_dspark_loss(
    outputs: DSparkForwardOutput | DSparkHiddenOutput,
    loss_decay_gamma: float | None,
    ce_loss_alpha: float,
    l1_loss_alpha: float,
    confidence_head_alpha: float,
    return_terms: Literal[True],
) -> tuple[Tensor, dict[str, Tensor]]: ...


def compute_dspark_loss(
    outputs: DSparkForwardOutput | DSparkHiddenOutput,
    loss_decay_gamma: float | None,
    ce_loss_alpha: float,
    l1_loss_alpha: float,
    confidence_head_alpha: float,
    return_terms: bool = False,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of one batch, and on request the sums behind its metrics.

    Args:
        outputs: of a draft's forward pass. From `DSparkHiddenOutput` the vocabulary is projected in chunks, in the
            precision of the head or of autocast: the same values and gradients in a fraction of the memory.
        loss_decay_gamma: gamma; None weighs all slots alike.
        ce_loss_alpha: weight of the cross entropy.
        l1_loss_alpha: weight of the total variation term; needs the teacher's logits.
        confidence_head_alpha: weight of the confidence loss; unused without a confidence head.
        return_terms: whether to return the terms too.

    Returns:
        the scalar loss, normalised by this batch's sum of weights. With return_terms also a dict of detached fp32
        tensors: the scalars loss, ce_loss, l1_loss, confidence_loss; the sums *_num and *_den, of shape [K] for
        accept_rate_per_pos; and the counts supervised_tokens and kept_anchors. Terms that need a teacher or a
        confidence head are absent without one.

    Raises:
        ValueError: an argument out of range, or l1_loss_alpha without the teacher's logits.
    """
    check_loss_arguments(loss_decay_gamma, ce_loss_alpha, l1_loss_alpha, confidence_head_alpha)
    autocast = autocast_dtype(outputs.eval_mask.device)  # what the caller would have projected in
    with without_autocast(outputs.eval_mask.device):
        mask = outputs.eval_mask.float()
        decay = mask * _slot_decay(outputs.eval_mask, loss_decay_gamma)
        weight = decay if outputs.block_weights is None else decay * outputs.block_weights.float().unsqueeze(-1)
        if isinstance(outputs, DSparkForwardOutput):
            losses = _losses_from_logits(outputs, weight, ce_loss_alpha, l1_loss_alpha)
        else:
            losses = _losses_from_hidden(outputs, weight, ce_loss_alpha, l1_loss_alpha, autocast)
        if l1_loss_alpha and losses.tv is None:
            raise ValueError(
                f"l1_loss_alpha {l1_loss_alpha} needs the teacher's logits: pass target_last_hidden_states"
            )
        sums = _loss_sums(outputs, losses, weight)
        numerator = losses.objective
        if "confidence_loss" in sums:
            numerator = numerator + confidence_head_alpha * sums["confidence_loss"]
        loss = numerator / (weight.sum() + EPS)
        if not return_terms:
            return loss
        terms = {"loss": loss, **_terms(outputs, losses, sums, weight.sum(), decay)}
        return loss, {name: term.detach() for name, term in terms.items()}


def check_loss_arguments(
    loss_decay_gamma: float | None, ce_loss_alpha: float, l1_loss_alpha: float, confidence_head_alpha: float
) -> None:
    """Check the numbers that `compute_dspark_loss` takes.

    Raises:
        ValueError: gamma is not a positive number, or a weight is negative or not finite.
    """
    if loss_decay_gamma is not None and not 0 < loss_decay_gamma < math.inf:
        raise ValueError(f"loss_decay_gamma must be positive or None, got {loss_decay_gamma}")
    weights = {
        "ce_loss_alpha": ce_loss_alpha,
        "l1_loss_alpha": l1_loss_alpha,
        "confidence_head_alpha": confidence_head_alpha,
    }
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise ValueError(f"{name} must be 0 or positive, got {weight}")


def _slot_decay(eval_mask: Tensor, gamma: float | None) -> Tensor:
    """exp(-k / gamma) for the slots k = 0..K-1 of eval_mask [B, N, K]: [K]."""
    slots = torch.arange(eval_mask.shape[-1], device=eval_mask.device, dtype=torch.float32)
    return torch.ones_like(slots) if gamma is None else torch.exp(-slots / gamma)


class _SlotLosses(NamedTuple):
    """Losses of the n slots that count, in the order of `slots`.

    Only these slots are read: whatever the others hold, even NaN, reaches neither the loss nor a gradient.
    """

    slots: Tensor  # int64 [n], place among the B*N*K slots
    objective: Tensor  # scalar sum w (ce_alpha CE + l1_alpha TV), fp32; carries the gradient
    ce: Tensor  # fp32 [n]
    tv: Tensor | None  # fp32 [n], None without a teacher


def _losses_from_logits(outputs: DSparkForwardOutput, weight: Tensor, ce_alpha: float, l1_alpha: float) -> _SlotLosses:
    on = outputs.eval_mask
    slot_weight, slots = weight[on], on.flatten().nonzero().squeeze(-1)
    logits = outputs.draft_logits[on].float()  # [n, V]
    ce = F.cross_entropy(logits, outputs.target_ids[on], reduction="none")
    if outputs.aligned_target_logits is None:
        return _SlotLosses(slots, (slot_weight * ce_alpha * ce).sum(), ce.detach(), None)
    teacher = torch.softmax(outputs.aligned_target_logits[on].detach().float(), dim=-1)
    tv = (torch.softmax(logits, dim=-1) - teacher).abs().sum(dim=-1)
    objective = (slot_weight * (ce_alpha * ce + l1_alpha * tv)).sum()
    return _SlotLosses(slots, objective, ce.detach(), tv.detach())


def _losses_from_hidden(
    outputs: DSparkHiddenOutput, weight: Tensor, ce_alpha: float, l1_alpha: float, autocast: torch.dtype | None
) -> _SlotLosses:
    plan = outputs.plan.to(weight.device)
    latents = None if outputs.latents is None else outputs.latents.flatten(0, 2)[plan.slots]
    matrices = Matrices(outputs.hidden.flatten(0, 2)[plan.slots], latents, outputs.head, outputs.markov_w2)
    teacher = outputs.teacher_hidden
    objective, ce, tv = chunked_losses(
        matrices,
        None if teacher is None else teacher.flatten(0, 1)[plan.teacher_rows],
        outputs.target_ids.flatten()[plan.slots],
        plan,
        Objective(weight.flatten()[plan.slots], ce_alpha, l1_alpha),
        outputs.softcap,
        autocast or outputs.head.dtype,
    )
    return _SlotLosses(plan.slots, objective, ce, tv)


def _loss_sums(
    outputs: DSparkForwardOutput | DSparkHiddenOutput, losses: _SlotLosses, weight: Tensor
) -> dict[str, Tensor]:
    """Weighted sums of the loss terms; that of the confidence loss carries a gradient."""
    slot_weight = weight.flatten()[losses.slots]
    sums = {"ce_loss": (slot_weight * losses.ce).sum()}
    if losses.tv is None:
        return sums
    sums["l1_loss"] = (slot_weight * losses.tv).sum()
    if outputs.confidence_pred is not None:
        confidence = outputs.confidence_pred.flatten()[losses.slots].float()
        bce = F.binary_cross_entropy_with_logits(confidence, _acceptance(losses.tv), reduction="none")
        sums["confidence_loss"] = (slot_weight * bce).sum()
    return sums


def _terms(
    outputs: DSparkForwardOutput | DSparkHiddenOutput,
    losses: _SlotLosses,
    sums: dict[str, Tensor],
    den: Tensor,
    decay: Tensor,
) -> dict[str, Tensor]:
    """What `compute_dspark_loss` returns beside the loss."""
    mask = outputs.eval_mask.float()
    terms = {"loss_den": den, "supervised_tokens": mask.sum(), "kept_anchors": outputs.block_keep_mask.sum().float()}
    terms |= {name: total / (den + EPS) for name, total in sums.items()}
    terms |= {f"{name}_num": total for name, total in sums.items()}
    if losses.tv is None:
        return terms
    accept_rate = torch.zeros_like(mask).flatten().index_copy(0, losses.slots, _acceptance(losses.tv))
    accept_rate = accept_rate.view_as(mask)  # [B, N, K], 0 where off
    terms |= _acceptance_sums(accept_rate, mask)
    if outputs.confidence_pred is not None:
        terms |= _calibration_sums(outputs.confidence_pred, accept_rate, mask, decay)
    return terms


def _acceptance(tv: Tensor) -> Tensor:
    """1 - TV / 2, the chance that a token drawn from the draft is accepted."""
    return (1 - 0.5 * tv).clamp(0, 1)


def _acceptance_sums(accept_rate: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Acceptance by position, and tau = 1 + sum_k prod_{j<=k} a_j m_j, over all blocks and over full ones."""
    tau = 1 + accept_rate.cumprod(dim=-1).sum(dim=-1)  # [B, N]
    any_slot, all_slots = mask.amax(dim=-1), mask.amin(dim=-1)
    return {
        "accept_rate_per_pos_num": accept_rate.sum(dim=(0, 1)),
        "accept_rate_per_pos_den": mask.sum(dim=(0, 1)),
        "tau_num": (tau * any_slot).sum(),
        "tau_den": any_slot.sum(),
        "tau_full_num": (tau * all_slots).sum(),
        "tau_full_den": all_slots.sum(),
    }


def _calibration_sums(logits: Tensor, accept_rate: Tensor, mask: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """How far sigmoid(confidence) lies from the acceptance rate, by slot and as a product over the block's prefix."""
    confidence = torch.sigmoid(logits.float()).masked_fill(mask == 0, 0.0)
    error = confidence - accept_rate  # 0 where a slot is off
    prefix_error = confidence.cumprod(dim=-1) - accept_rate.cumprod(dim=-1)
    return {
        "confidence_abs_error_num": (weight * error.abs()).sum(),
        "confidence_bias_num": (weight * error).sum(),
        "confidence_cumprod_bias_num": (weight * prefix_error).sum(),
        "confidence_diag_den": weight.sum(),
    }
