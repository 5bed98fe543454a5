"""Rounding to nearest, for integers and floats alike."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from compressor.passes.quantize.affine import absmax_parameters, mse_parameters, quantize
from compressor.passes.quantize.floating import (
    float_mse_parameters,
    float_parameters,
    nvfp4_tensor_scale,
    quantize_floats,
)
from compressor.types.quantized import QuantizedTensor, Scheme

RangeSearch = Literal["min-max", "mse"]
"""Whether a range holds all values, or is the one of least squared error."""


def round_to_nearest(
    matrix: Tensor,
    scheme: Scheme,
    search: RangeSearch = "min-max",
    tensor_scale: Tensor | None = None,
    importance: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize a weight by rounding every value to the nearest that its scheme represents.

    Each row depends on itself only, so rows may be given in any pieces; except with granularity
    ``tensor``, and with scales of type ``e4m3`` where ``tensor_scale`` is not given.

    Args:
        matrix: ``[rows, columns]``, of any float dtype; the arithmetic is float32.
        scheme: how its values are represented.
        search: how ranges are found.
        tensor_scale: nvfp4's scale of the whole weight (``nvfp4_tensor_scale``); ``None`` takes
            the matrix for the whole.
        importance: what a squared error counts in each column when ranges are searched,
            ``[columns]``; ``None`` counts all alike.

    Raises:
        ValueError: the columns do not divide into groups, or an unsigned symmetric scheme meets
            negative values.
    """
    searched = search == "mse"
    if scheme.element == "int":
        if searched:
            scale, zero = mse_parameters(matrix, scheme, importance=importance)
        else:
            scale, zero = absmax_parameters(matrix, scheme)
        return quantize(matrix, scale, zero, scheme)
    if scheme.scale_type == "e4m3" and tensor_scale is None:
        largest = matrix.abs().max() if matrix.numel() else 0.0
        tensor_scale = nvfp4_tensor_scale(largest)
    if searched:
        scale = float_mse_parameters(matrix, scheme, tensor_scale, importance)
    else:
        scale = float_parameters(matrix, scheme, tensor_scale)
    return quantize_floats(matrix, scale, scheme, tensor_scale)
