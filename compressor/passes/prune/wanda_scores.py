"""What a weight is worth by its size and that of its input.

M. Sun et al., A Simple and Effective Pruning Approach for Large Language Models, 2023
(arXiv:2306.11695), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

_DEAD = 1e-6  # of the mean norm: what a column without input counts, so that sizes still rank


def wanda_scores(matrix: Tensor, norms: Tensor) -> Tensor:
    """Return ``|W|`` times the norm of each column's input.

    A column whose input was always zero comes after all others; within such columns the weights'
    sizes decide.

    Args:
        matrix: the weight, ``[rows, columns]``.
        norms: l2 norm of each column's input over the calibration data, ``[columns]``.

    Returns:
        Scores, float32 ``[rows, columns]``. They are to be compared within a row.
    """
    floor = _DEAD * float(norms.mean()) or 1.0
    return matrix.to(torch.float32).abs() * norms.to(torch.float32).clamp(min=floor)
