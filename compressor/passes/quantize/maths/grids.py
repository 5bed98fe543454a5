"""Weights that were quantized before: the grid of a row is kept if its codes fit."""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.types.layers import Scheme

_OFF = 1e-3  # of a step: dequantized codes are off by float32's rounding, at most 2e-5
_ROUGHLY = 2 * _OFF  # for what is asked again
_GLANCED = 2  # values of a row, which tell most rows that lie on no grid
_LOOKED_AT = 16  # greatest values of a row, which tell the others
_FEWEST = 5  # values other than zero: by chance, five lie on one of 127 grids in 2e-9 of all rows


def kept_grids(matrix: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Return scales under which the codes of weights that were quantized before are the same.

    A row ``w`` whose values are all integer multiples of a step, and few enough of it from zero,
    has no rounding error with that step for a scale: ``w = s k``, ``|k| <= high``. Of several such
    steps, the least is taken. Its greatest code may be less than ``high``, so that the full range
    ``max |w| / high`` would miss the grid. Other rows keep their scale.

    Args:
        matrix: ``[rows, columns]``.
        scale: of its full range, ``[rows, 1]``, or ``[1, 1]`` for granularity ``tensor``.
        scheme: symmetric integers; for any other the scales are returned as they are.

    Returns:
        Scales of the same shape.
    """
    plain = scheme.element == "int" and scheme.symmetric and scheme.scale_type == "float32"
    if not plain or scheme.granularity == "group" or not matrix.numel():
        return scale
    rows = matrix.reshape(len(scale), -1).to(torch.float32)
    codes = torch.arange(scheme.high, 0, -1)
    glanced = rows[:, :: max(1, rows.shape[1] // _GLANCED)][:, :_GLANCED]
    inverse = codes / rows.abs().amax(1, keepdim=True)
    likely = _on_grids(glanced[:, :, None], inverse[:, None], _ROUGHLY).any(1).nonzero().flatten()
    sample = rows[likely].abs().topk(min(_LOOKED_AT, rows.shape[1])).values
    fits = _on_grids(sample[:, :, None], codes / sample[:, :1, None])
    fits &= ((sample > 0).sum(1) >= _FEWEST)[:, None]
    kept = scale.clone()
    for place in fits.any(1).nonzero().flatten().tolist():
        row = int(likely[place])
        for code in codes[fits[place]].tolist():
            step = sample[place, 0] / code
            if bool(_on_grids(rows[row, :, None], step.reciprocal()).all()):
                kept[row] = step
                break
    return kept


def _on_grids(values: Tensor, inverse: Tensor, off: float = _OFF) -> Tensor:
    """Whether all values, along the second axis from the end, are multiples of each step."""
    levels = values * inverse
    return ((levels - levels.round()).abs() <= off).all(-2)
