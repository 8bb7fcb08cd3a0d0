"""Decode records in numbers: tokens per target pass, acceptance by position, speed, and what thresholds would keep.

Lists over positions hold 1..K in order; None stands for what the records cannot tell.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_lightning.decoding.records import AnswerRecord
from dspark_lightning.evaluation.reliability import confidence_summary, sigmoid
from dspark_lightning.evaluation.rounds import Rounds, gather_rounds, ratio_interval, shares

THRESHOLDS = tuple(i / 20 for i in range(20))


def summarise(records: Sequence[AnswerRecord], size: int, threshold: float = 0.0) -> dict[str, Any]:
    """All numbers of one dataset, or of several together, as plain data.

    Args:
        records: of the answers.
        size: K, tokens drafted a block.
        threshold: the confidence threshold they were decoded with: what lower ones would keep is not known.
    """
    rounds = gather_rounds(records, size)
    return {
        "conversations": len({(each.dataset, each.conversation) for each in records}),
        "answers": len(records),
        "rounds": len(rounds.accepted),
        "new_tokens": sum(each.new_tokens for each in records),
        "tokens_drafted": size * len(rounds.accepted),
        "tokens_verified": int(rounds.proposed.sum()),
        "tokens_accepted": int(rounds.accepted.sum()),
        **_acceptance(rounds),
        "same_as_plain": _same_as_plain(records),
        **_speed(records),
        "thresholds": threshold_sweep(rounds, threshold),
        "confidence": confidence_summary(rounds),
    }


def _acceptance(rounds: Rounds) -> dict[str, Any]:
    """Tokens per round (tau), the share of rounds that accept k tokens or more, and of those that came so far.

    tau is 1 plus the sum of the survivals.
    """
    survived, tried = rounds.survived, rounds.tried
    gained = rounds.accepted + 1
    return {
        "tau": float(gained.mean()) if len(gained) else None,
        "tau_interval": ratio_interval(gained, np.ones_like(gained), rounds.conversation, 1, rounds.size + 1),
        "accepted_lengths": np.bincount(rounds.accepted, minlength=rounds.size + 1).tolist(),
        "survival": shares(survived.sum(0), np.full(rounds.size, len(gained))),
        "conditional_acceptance": shares((survived & tried).sum(0), tried.sum(0)),
        "conditional_counts": tried.sum(0).tolist(),
        "conditional_intervals": [
            ratio_interval((survived & tried)[:, k], tried[:, k], rounds.conversation) for k in range(rounds.size)
        ],
    }


def threshold_sweep(rounds: Rounds, lowest: float = 0.0) -> list[dict[str, float | None]] | None:
    """What cutting each block before the first token below a threshold would have kept.

    Every round is judged where it stands; the rounds that would have followed a shorter block begin at other tokens, so
    decoding with the threshold gives slightly other numbers.

    Args:
        rounds: decoded with whole blocks, or cut at `lowest`.
        lowest: lower thresholds are left out.
    """
    if rounds.confidence is None or not len(rounds.accepted):
        return None
    rows = []
    for threshold in THRESHOLDS:
        if threshold < lowest:
            continue
        sure = np.cumprod(sigmoid(rounds.confidence) >= threshold, axis=1).sum(1)
        verified = np.minimum(sure, rounds.proposed)
        accepted = np.minimum(sure, rounds.accepted)
        share = float(accepted.sum() / verified.sum()) if verified.sum() else None
        rows.append(
            {
                "threshold": threshold,
                "tau": float((accepted + 1).mean()),
                "verified_per_round": float(verified.mean()),
                "accepted_share": share,
            }
        )
    return rows


def _same_as_plain(records: Sequence[AnswerRecord]) -> int | None:
    """Answers that are, token for token, those of the target alone; None where that was not compared."""
    compared = [each.same_as_plain for each in records if each.same_as_plain is not None]
    return sum(compared) if compared else None


def _speed(records: Sequence[AnswerRecord]) -> dict[str, Any]:
    """Tokens per second of one process, prompts included; and over those of the target alone, where it was timed.

    The spread is that of the answers' own ratios: their quantiles 0.1 and 0.9.
    """
    fast = _per_second([each.new_tokens for each in records], [each.seconds for each in records])
    timed = [each for each in records if each.plain_seconds is not None and each.plain_tokens is not None]
    if not timed:
        return {"tokens_per_second": fast, "speedup": None}
    tokens, seconds, plain_tokens, plain_seconds = (
        np.array([getattr(each, name) for each in timed], np.float64)
        for name in ("new_tokens", "seconds", "plain_tokens", "plain_seconds")
    )
    low, high = np.quantile((tokens / seconds) / (plain_tokens / plain_seconds), [0.1, 0.9])
    total, plain_total = tokens.sum() / seconds.sum(), plain_tokens.sum() / plain_seconds.sum()
    speedup = {
        "ratio": float(total / plain_total),
        "low": float(low),
        "high": float(high),
        "tokens_per_second": float(total),
        "plain_tokens_per_second": float(plain_total),
    }
    return {"tokens_per_second": fast, "speedup": speedup}


def _per_second(tokens: Sequence[int], seconds: Sequence[float]) -> float | None:
    return sum(tokens) / sum(seconds) if sum(seconds) else None
