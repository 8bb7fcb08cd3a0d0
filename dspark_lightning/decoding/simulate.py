"""Serving many users at once, simulated from decoded rounds and a target's SPS curve.

Each of R users replays recorded answers, one after the other. In every step a policy chooses how many tokens of each
recorded block are verified; a step takes 1 / SPS(R + verified tokens) seconds. What is left out: the time of the draft
(the same for all policies but "no draft") and of prompts. After each step a user goes on to the next recorded round,
however many tokens were verified: behind a shorter block, decoding would really go on at an earlier position. So all
policies see the same rounds, and differences between them are not chance.
Shapes: T steps, R users, K drafted tokens, N recorded rounds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from rich.progress import track

from dspark_lightning.decoding.scheduler import admit_up_to, admit_while_growing, best_limit
from dspark_lightning.decoding.sps import Floats, Ints, SpsCurve
from dspark_lightning.decoding.traces import Traces

THRESHOLDS = (0.3, 0.5, 0.7)
_USER_STEPS, _LEAST_STEPS = 4096, 128  # many steps where there are few users to average over
_DELAY = 2  # steps from which the asynchronous scheduler has its confidences

Policy = Callable[[Ints], Ints]
"""From the rounds at hand [2 + T, R], the first two for looking back only, to tokens to verify [T, R]."""


@dataclass(frozen=True)
class ServingResult:
    """What one policy reaches with so many users."""

    concurrency: int  # R
    policy: str
    tokens_per_second: float  # of all users
    tokens_per_second_per_user: float
    verified_per_request: float  # drafted tokens, mean over requests and steps
    accepted_per_request: float  # of these


def simulate_serving(traces: Traces, curve: SpsCurve, max_concurrency: int, seed: int = 0) -> list[ServingResult]:
    """Try every policy at 1, 2, 4, ... users.

    The policies: "no draft", "fixed k" for every length k, "threshold c" (a block ends before its first token with less
    confidence), "scheduler" (Algorithm 1), "scheduler, asynchronous". Where a step would hold more than
    max_batch_tokens, the last tokens of the longest blocks are left out. Levels with more users than that are skipped.

    Args:
        traces: without confidences, thresholds and schedulers are left out.
        curve: of the target.
        max_concurrency: users at most.
        seed: of the answers drawn.

    Raises:
        ValueError: max_concurrency is below 1.
    """
    if max_concurrency < 1:
        raise ValueError(f"max_concurrency must be 1 or more, got {max_concurrency}")
    most = min(max_concurrency, curve.max_batch_tokens)
    levels = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
    return [result for users in track(levels, "Simulating") for result in _serve(traces, curve, users, seed)]


def _serve(traces: Traces, curve: SpsCurve, users: int, seed: int) -> Iterator[ServingResult]:
    rng = np.random.default_rng([seed, users])
    steps = _DELAY + max(_LEAST_STEPS, _USER_STEPS // users)
    rounds = np.stack([_replay(traces.answers, steps, rng) for _ in range(users)], axis=1)
    now = rounds[_DELAY:]
    for name, policy in _policies(traces, curve).items():
        lengths = _fit(policy(rounds), curve.max_batch_tokens - users)
        gained = np.minimum(lengths + 1, traces.gained[now])
        speed = float(gained.sum() / curve.seconds(users + lengths.sum(axis=1)).sum())
        accepted = np.minimum(lengths, traces.accepted[now])
        yield ServingResult(users, name, speed, speed / users, float(lengths.mean()), float(accepted.mean()))


def _replay(answers: list[Ints], steps: int, rng: np.random.Generator) -> Ints:
    """The rounds [steps] of one user: answers drawn at random, the first from a random round on."""
    first = answers[rng.integers(len(answers))]
    rounds = first[rng.integers(len(first)) :].tolist()
    while len(rounds) < steps:
        rounds.extend(answers[rng.integers(len(answers))])
    return np.array(rounds[:steps])


def _policies(traces: Traces, curve: SpsCurve) -> dict[str, Policy]:
    policies = {"no draft": _fixed(traces, 0)}
    policies |= {f"fixed {length}": _fixed(traces, length) for length in range(1, traces.block_size + 1)}
    if traces.confidence is None:
        return policies
    policies |= {f"threshold {least}": _threshold(traces.confidence, least) for least in THRESHOLDS}
    survival = traces.confidence.cumprod(axis=1)

    def scheduler(rounds: Ints) -> Ints:
        return np.stack([admit_while_growing(survival[now], curve) for now in rounds[_DELAY:]])

    def asynchronous(rounds: Ints) -> Ints:
        pairs = zip(rounds[:-_DELAY], rounds[_DELAY:], strict=True)
        return np.stack([admit_up_to(survival[now], best_limit(survival[before], curve)) for before, now in pairs])

    return policies | {"scheduler": scheduler, "scheduler, asynchronous": asynchronous}


def _fixed(traces: Traces, length: int) -> Policy:
    lengths = np.minimum(length, traces.proposed)
    return lambda rounds: lengths[rounds[_DELAY:]]


def _threshold(confidence: Floats, least: float) -> Policy:
    lengths = (confidence >= least).cumprod(axis=1).sum(axis=1)  # NaN is not
    return lambda rounds: lengths[rounds[_DELAY:]]


def _fit(lengths: Ints, room: int) -> Ints:
    """Cut lengths [T, R] so that no step has more than `room` drafted tokens: first tokens go before second ones."""
    fitting = lengths.copy()
    for step in np.flatnonzero(lengths.sum(axis=1) > room):
        places = np.arange(lengths[step].max(initial=0))
        wanted = np.where(places < lengths[step][:, None], -1.0 * places, np.nan)
        fitting[step] = admit_up_to(wanted, room)
    return fitting
