"""Made-up decode records and curves for the tests of the scheduler."""

import math
from typing import Any

import numpy as np

from dspark_lightning.decoding.records import AnswerRecord
from dspark_lightning.decoding.sps import SpsCurve


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def record(
    accepted: list[int], proposed: list[int], confidence: list[list[float]] | None, **changes: Any
) -> AnswerRecord:
    """An answer that no drafted stop token ended; `confidence` are probabilities."""
    logits = None if confidence is None else [[logit(c) for c in row] for row in confidence]
    fields = {
        "dataset": "made_up",
        "conversation": 0,
        "turn": 0,
        "prompt_tokens": 10,
        "new_tokens": 1 + sum(accepted) + len(accepted),
        "proposed": proposed,
        "judged": proposed,
        "accepted": accepted,
        "confidence": logits,
        "seconds": 1.0,
        "plain_seconds": None,
        "plain_tokens": None,
    }
    return AnswerRecord(**{**fields, **changes})


def calibrated_records(answers: int = 200, rounds: int = 10, size: int = 7, seed: int = 0) -> list[AnswerRecord]:
    """Answers whose tokens are accepted exactly as often as their confidences say: some rounds easy, some hard."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(answers):
        ease = rng.beta(1.2, 0.8, size=(rounds, 1))
        confidence = np.clip(ease * rng.uniform(0.7, 1.3, size=(rounds, size)), 0.02, 0.98)
        accepted = (rng.random((rounds, size)) < confidence).cumprod(axis=1).sum(axis=1)
        made.append(record(accepted.tolist(), [size] * rounds, confidence.tolist()))
    return made


def curve(floor: float = 0.01, each: float = 0.0001, limit: int = 4096) -> SpsCurve:
    """A step takes `floor` seconds and `each` more for a token: steps a second fall with load."""
    tokens = [1, limit]
    return SpsCurve(tokens, [1 / (floor + each * count) for count in tokens], limit)
