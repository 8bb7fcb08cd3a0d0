"""How many drafted tokens of each request to verify: Algorithm 1 of the paper, and its asynchronous variant.

With n tokens admitted, a step has B = R + n tokens and gains tau = R + sum of their survival tokens; its throughput is
theta = tau * SPS(B). Tokens are admitted in the order of their survival, the highest first. Survival never grows within
a request, so that what is admitted is always a prefix of its block.
Shapes: R requests, K drafted tokens of each. NaN stands where nothing was drafted.
"""

import numpy as np

from dspark_lightning.decoding.sps import Floats, Ints, SpsCurve


def admit_while_growing(survival: Floats, curve: SpsCurve) -> Ints:
    """Algorithm 1: admit one token after the other while each of them raises theta.

    It stops at the first that does not, also where theta stays as it is, whatever would follow: the choice may depend
    on drafted tokens only in so far as they are already admitted. That is what leaves the target's distribution as it
    is (Appendix A).

    Args:
        survival: [R, K], a[r, j] = product of the calibrated confidences of tokens 1..j of request r.
        curve: of the target.

    Returns:
        admitted tokens of each request [R].
    """
    theta = _throughput(survival, curve)
    fails = theta[1:] <= theta[:-1]
    return admit_up_to(survival, int(fails.argmax()) if fails.any() else len(fails))


def best_limit(survival: Floats, curve: SpsCurve) -> int:
    """The number of admitted tokens with the highest theta of all; the smallest where several have it.

    A limit found among the tokens that it is applied to would change the distribution: the asynchronous variant takes
    one from the confidences of two steps before (section 5.2).

    Args:
        survival: [R, K], as in `admit_while_growing`.
        curve: of the target.
    """
    return int(_throughput(survival, curve).argmax())


def admit_up_to(survival: Floats, limit: int) -> Ints:
    """Admit the `limit` tokens of the highest survival.

    Args:
        survival: [R, K], or anything else that never grows within a request.
        limit: of all requests together.

    Returns:
        admitted tokens of each request [R].
    """
    return np.bincount(_order(survival)[:limit] % len(survival), minlength=len(survival))


def _order(survival: Floats) -> Ints:
    """Indices into [K, R], by falling survival; of equal ones earlier positions first, then earlier requests."""
    flat = survival.T.ravel()
    order = np.argsort(-flat, kind="stable")  # NaN last
    return order[: np.count_nonzero(~np.isnan(flat))]


def _throughput(survival: Floats, curve: SpsCurve) -> Floats:
    """Theta with 0, 1, ... admitted tokens."""
    requests, admitted = len(survival), survival.T.ravel()[_order(survival)]
    tau = requests + np.concatenate([[0.0], admitted.cumsum()])
    return np.asarray(tau * curve.steps_per_second(requests + np.arange(len(tau))))
