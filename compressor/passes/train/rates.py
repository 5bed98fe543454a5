"""How large the learning rate is at a step."""

from __future__ import annotations

from math import cos, pi
from typing import Literal, TypeAlias

Schedule: TypeAlias = Literal["cosine", "linear", "constant"]


def rate_factor(step: int, steps: int, schedule: Schedule, warm_up: int = 0) -> float:
    """Return what the learning rate is multiplied with at a step.

    It rises linearly over the first ``warm_up`` steps, and then falls along half a cosine
    (I. Loshchilov and F. Hutter, SGDR, 2017, arXiv:1608.03983, equation 5, without restarts), along
    a line, or not at all; to zero, which the step after the last would have.

    Args:
        step: the step, from 0.
        steps: how many there are.
        schedule: how it falls.
        warm_up: how many steps it rises, fewer than ``steps``.

    Raises:
        ValueError: the step or the warm-up lies outside of the training.
    """
    if not 0 <= step < steps:
        raise ValueError(f"step {step} lies outside of {steps} steps")
    if not 0 <= warm_up < steps:
        raise ValueError(f"{warm_up} steps of warm-up do not fit into {steps} steps")
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    passed = (step - warm_up) / (steps - warm_up)
    if schedule == "cosine":
        return 0.5 * (1 + cos(pi * passed))
    return 1 - passed if schedule == "linear" else 1.0
