"""Whether float16 holds what folding makes of factors, weights and biases; wider types do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
import torch

from compressor.graph.values import constant_of
from compressor.passes.fuse.draft import wide

if TYPE_CHECKING:
    from compressor.passes.fuse.absorb import Step, Target

_LARGEST, _LEAST = 65504.0, 2.0**-14  # of float16; smaller numbers are rounded to fewer bits
_OF_ROWS = 2.0**-10  # of a row's largest: numbers a hundredth of it are still rounded to 9 bits


def number_is_held(number: float, dtype: ir.DataType) -> bool:
    """Return whether a type holds a factor."""
    return dtype != ir.DataType.FLOAT16 or _LEAST <= abs(number) <= _LARGEST


def is_held(step: Step, target: Target) -> bool:
    """Return whether a layer's type holds the weight and the bias that it gets by a map.

    float16 does not where a number becomes infinite, or all of a row so small that they vanish.
    """
    weight, bias = constant_of(target.weight), constant_of(target.bias)
    if weight is None or target.weight.dtype != ir.DataType.FLOAT16:
        return True
    affine, before = step.affine(), target.layer.canonical(wide(weight))
    was, now = (matrix.abs().amax(1) for matrix in (before, affine.weight(before)))
    held = (now <= _LARGEST) & ((now >= was.clamp(max=_OF_ROWS)) | (now == 0))
    old = torch.zeros(target.layer.rows) if bias is None else wide(bias).reshape(-1)
    return bool(held.all() and (affine.bias(old).abs() <= _LARGEST).all())
