"""Algorithm 1: what it admits, and that it leaves the target's distribution as it is where a look ahead does not."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from dspark_lightning.decoding.scheduler import admit_up_to, admit_while_growing, best_limit
from dspark_lightning.decoding.sps import Floats, SpsCurve
from dspark_lightning.decoding.verify import verify_draft
from schedule_helpers import curve

APPENDIX_A = SpsCurve([1, 2, 3], [1.0, 0.5, 0.45], 3)


def plain_algorithm_1(survival: Floats, sps: SpsCurve) -> list[int]:
    """As the paper writes it: one candidate after the other."""
    requests, size = survival.shape
    candidates = sorted((-survival[r, j], j, r) for r in range(requests) for j in range(size))
    admitted, tau = [0] * requests, float(requests)
    best = tau * float(sps.steps_per_second(np.array(requests)))
    for negative, j, r in candidates:
        batch = requests + sum(admitted) + 1
        theta = (tau - negative) * float(sps.steps_per_second(np.array(batch)))
        if theta <= best:
            break
        assert admitted[r] == j  # a prefix
        tau, best, admitted[r] = tau - negative, theta, j + 1
    return admitted


def random_survival(seed: int, requests: int, size: int = 7) -> Floats:
    rng = np.random.default_rng(seed)
    return rng.beta(2, 0.7, size=(requests, size)).cumprod(axis=1)


# One that bends, and one with steps like those of padded batches.
CURVES = {
    "linear": curve(),
    "steep": curve(floor=0.001, each=0.0005),
    "stairs": SpsCurve([1, 8, 9, 32, 33, 64, 65, 512], [100, 98, 70, 66, 40, 38, 25, 4.0], 512),
    "limited": curve(limit=70),
}


def test_it_is_what_one_candidate_after_the_other_gives() -> None:
    shares = set()
    for sps, requests, seed in product(CURVES.values(), (1, 5, 64), range(10)):
        survival = random_survival(seed, requests)
        admitted = admit_while_growing(survival, sps).tolist()
        assert admitted == plain_algorithm_1(survival, sps)
        shares.add(sum(admitted) / survival.size)
    assert min(shares) == 0 and max(shares) == 1 and len(shares) > 20


def theta(survival: Floats, lengths: tuple[int, ...], sps: SpsCurve) -> float:
    gained = sum(survival[r, :length].sum() for r, length in enumerate(lengths))
    requests = len(survival)
    return float((requests + gained) * sps.steps_per_second(np.array(requests + sum(lengths))))


@pytest.mark.parametrize("name", CURVES)
def test_the_best_limit_is_the_best_of_all_lengths(name: str) -> None:
    for seed in range(5):
        survival = random_survival(seed, requests=2, size=4)
        tried = {(a, b): theta(survival, (a, b), CURVES[name]) for a in range(5) for b in range(5)}
        found = admit_up_to(survival, best_limit(survival, CURVES[name]))
        assert tried[tuple(found.tolist())] == pytest.approx(max(tried.values()))


def test_where_seconds_grow_linearly_the_early_stop_finds_the_best() -> None:
    for seed in range(10):
        survival = random_survival(seed, requests=16)
        assert admit_while_growing(survival, curve()).sum() == best_limit(survival, curve())


def test_what_is_admitted_does_not_depend_on_what_follows() -> None:
    """Lossless: everything behind the first refused token may be anything, unlike with a look ahead."""
    sps, moved = CURVES["stairs"], 0
    for seed in range(20):
        survival = random_survival(seed, requests=4)
        admitted = admit_while_growing(survival, sps)
        refused = max(survival[r, n] for r, n in enumerate(admitted) if n < 7)
        other = np.where(survival < refused, survival**8, survival)
        assert (other != survival).any()
        assert admit_while_growing(other, sps).tolist() == admitted.tolist()
        moved += best_limit(other, sps) != best_limit(survival, sps)
    assert moved > 5


def test_ties_keep_prefixes_and_take_early_positions_first() -> None:
    assert admit_up_to(np.full((3, 2), 0.5), 4).tolist() == [2, 1, 1]
    assert admit_up_to(np.ones((1, 7)), 3).tolist() == [3]


def test_a_token_that_changes_nothing_is_not_admitted() -> None:
    flat = SpsCurve([1], [10.0], 100)
    assert admit_while_growing(np.array([[0.5, 0.0, 0.0]]), flat).tolist() == [1]


def test_tokens_that_were_not_proposed_are_never_admitted() -> None:
    flat = SpsCurve([1], [10.0], 100)
    survival = np.array([[0.9, 0.8, np.nan], [np.nan, np.nan, np.nan]])
    assert admit_while_growing(survival, flat).tolist() == [2, 0]
    assert admit_up_to(survival, 5).tolist() == [2, 0]


def test_nothing_above_the_largest_batch() -> None:
    flat = SpsCurve([1], [10.0], 6)
    assert admit_while_growing(np.ones((4, 7)), flat).tolist() == [1, 1, 0, 0]
    assert best_limit(np.ones((4, 7)), flat) == 2


def first_token(schedule: Callable[[Floats], int]) -> list[float]:
    """The distribution of the first token of Appendix A, over all that the draft may propose.

    Target (0.7, 0.3), draft (0.5, 0.5), a_1 = 0.8, c_2 = 0.9 behind A and 0 behind B. `schedule` says how many drafted
    tokens are verified.
    """
    target, draft = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
    output = torch.zeros(2)
    for x, c_2 in ((0, 0.9), (1, 0.0)):
        if schedule(np.array([[0.8, 0.8 * c_2]])) == 0:
            output += draft[x] * target
            continue
        accept = min(1.0, float(target[x] / draft[x]))
        residual = (target - draft).clamp(min=0)
        output[x] += draft[x] * accept
        output += draft[x] * (1 - accept) * residual / residual.sum()
    return output.tolist()


def test_appendix_a_the_early_stop_is_lossless() -> None:
    assert first_token(lambda a: int(admit_while_growing(a, APPENDIX_A)[0])) == pytest.approx([0.7, 0.3])


def test_appendix_a_a_look_ahead_is_not() -> None:
    assert first_token(lambda a: best_limit(a, APPENDIX_A)) == pytest.approx([0.85, 0.15])


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_appendix_a_a_limit_from_other_confidences_is(limit: int) -> None:
    assert first_token(lambda a: int(admit_up_to(a, limit)[0])) == pytest.approx([0.7, 0.3])


def test_appendix_a_with_the_real_verification() -> None:
    """The enumeration above follows the rule that decoding applies: drawn with the look ahead."""
    generator = torch.Generator().manual_seed(0)
    target, draft, counts = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5]), [0, 0]
    for _ in range(4000):
        x = torch.multinomial(draft, 1, generator=generator)
        length = best_limit(np.array([[0.8, 0.8 * (0.9 if x == 0 else 0.0)]]), APPENDIX_A)
        tokens = x.repeat(length)  # a second token does not touch the first
        accepted, following = verify_draft(tokens, draft.repeat(length, 1), target.repeat(length + 1, 1), generator)
        counts[int(tokens[0] if accepted else following)] += 1
    assert counts[0] / 4000 == pytest.approx(0.85, abs=0.025)  # 4 standard deviations
