"""Floats of 4 bits, ``e2m1``: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3."""

from __future__ import annotations

import torch
from torch import Tensor

E2M1_LARGEST = 6.0


def e2m1_magnitudes(values: Tensor) -> Tensor:
    """Return the codes of the nearest ``e2m1`` values without their signs, as floats.

    Steps are a half up to 2, one up to 4 and two beyond, so the code is the least of what the
    three roundings give; even codes lie at even counts of each step.
    """
    magnitude = values.abs().clamp_(max=E2M1_LARGEST)
    code = torch.minimum((magnitude * 2).round_(), magnitude.round().add_(2))
    return torch.minimum(code, magnitude.mul_(0.5).round_().add_(4))


def nearest_e2m1(values: Tensor) -> Tensor:
    """Return the nearest values of ``e2m1``, halves to the even code, in the same dtype."""
    code = e2m1_magnitudes(values)
    # Codes up to 4 count in halves, up to 6 in ones, and the last is two further.
    magnitude = torch.maximum(code * 0.5, code - 2)
    return torch.where(code == E2M1_LARGEST + 1, E2M1_LARGEST, magnitude).copysign_(values)
