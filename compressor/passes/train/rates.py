"""How the learning rate changes over a training."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi
from typing import Literal, TypeAlias

Schedule: TypeAlias = Literal["cosine", "linear", "constant", "one-cycle", "step"]

_RISE = 0.3  # share of the steps over which one-cycle rises, unless warm-up sets it
_START, _END = 1 / 25, 1 / 250_000  # rates of one-cycle at its first and its last step
MILESTONES = 0.5, 0.75


def rate_factor(
    step: int,
    steps: int,
    schedule: Schedule,
    warm_up: int = 0,
    milestones: Sequence[float] = MILESTONES,
) -> float:
    """Return the factor of the learning rate at a step.

    It rises linearly over the first ``warm_up`` steps, and then falls along half a cosine
    (I. Loshchilov and F. Hutter, SGDR, 2017, arXiv:1608.03983, equation 5, without restarts), along
    a line, or not at all. It would reach zero at the step after the last. With ``step``, it falls
    to a tenth at each of the ``milestones``, shares of the steps. With ``one-cycle``, it rises from
    1/25 and falls to 1/250,000, both along half a cosine (L. N. Smith and N. Topin,
    Super-convergence, 2019, arXiv:1708.07120, as in PyTorch's ``OneCycleLR``; momentum stays).

    >>> [rate_factor(step, 4, "linear") for step in range(4)]
    [1.0, 0.75, 0.5, 0.25]

    Steps count from 0.

    Raises:
        ValueError: the step or the warm-up lies outside the training.
    """
    if not 0 <= step < steps:
        raise ValueError(f"step {step} lies outside of {steps} steps")
    if not 0 <= warm_up < steps:
        raise ValueError(f"{warm_up} steps of warm-up do not fit into {steps} steps")
    if schedule == "one-cycle":
        return _one_cycle(step, steps, warm_up)
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    passed = (step - warm_up) / (steps - warm_up)
    if schedule == "cosine":
        return 0.5 * (1 + cos(pi * passed))
    if schedule == "step":
        return 0.1 ** sum(step >= round(share * steps) for share in milestones)
    return 1 - passed if schedule == "linear" else 1.0


def _one_cycle(step: int, steps: int, rise: int) -> float:
    top = (rise or _RISE * steps) - 1
    last = steps - 1
    if step <= top:
        start, end, passed = _START, 1.0, step / top if top > 0 else 1.0
    else:
        start, end, passed = 1.0, _END, (step - top) / (last - top)
    return end + (start - end) * 0.5 * (1 + cos(pi * passed))
