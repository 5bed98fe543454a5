"""GPTQ from a layer's inputs, where they are fewer than the layer has columns.

E. Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers, 2022 (arXiv:2210.17323). The codes are those of
:mod:`compressor.passes.quantize.maths.gptq`; the paper's inverse of columns by columns is here one
of vectors by vectors, by Woodbury's identity.

The second moment of few inputs is mostly damping and large, and to factorize it costs many times
what the same codes take from the inputs ``X``, ``[columns, vectors]``. The columns rounded so far
change the outputs by ``V``, ``[rows, vectors]``, and all columns that are left compensate for that
best by ``V P Xᵀ / d``, where ``P = d (Xᵀ X + d I)⁻¹`` over these columns is a matrix of vectors by
vectors. Block by block, columns take their share of it. Inside a block GPTQ goes on as usual, by a
moment in which the columns after the block have compensated already: ``X P Xᵀ + d I``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from compressor.passes.quantize.maths.affine import quantize
from compressor.passes.quantize.maths.descent import zeros_by_row
from compressor.passes.quantize.maths.floating import stored_codes
from compressor.passes.quantize.maths.gptq import by_column, compensate, gptq
from compressor.passes.quantize.maths.pairs import without_overflow
from compressor.types.layers import QuantizedTensor, Scheme

_BLOCK = 128  # columns


def gptq_from_vectors(
    matrix: Tensor,
    vectors: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    scheme: Scheme,
    damping: float = 0.01,
) -> QuantizedTensor:
    """Quantize a weight as :func:`compressor.passes.quantize.maths.gptq.gptq` does.

    Args:
        matrix: the weight, ``[rows, columns]``.
        vectors: the layer's inputs, float32 ``[columns, vectors]``.
        scale: ``[rows, groups]`` or ``[1, 1]``.
        zero_point: like ``scale``.
        scheme: how the codes are represented.
        damping: share of the mean input power that is added to every diagonal element.

    Raises:
        ValueError: the vectors have another length or are not finite, or the columns do not divide
            into the scheme's groups.
    """
    power = vectors.square().sum(1)
    alive = power > 0
    damped = float(damping * power[alive].mean()) if bool(alive.any()) else 0.0
    order = torch.argsort(power, descending=True, stable=True)
    inputs = vectors[order]
    blocks = _blocks(inputs, damped)
    if blocks is None or len(vectors) != matrix.shape[1]:
        return gptq(matrix, vectors @ vectors.T, scale, zero_point, scheme, damping)
    nearest = quantize(matrix, scale, zero_point, scheme)
    weights = matrix[:, order].T.to(torch.float32)
    steps, zeros = (by_column(each, nearest.codes)[order] for each in (scale, zero_point))
    levels = torch.empty_like(weights)
    changed = torch.zeros(len(matrix), inputs.shape[1])
    for block, share, factor in blocks:
        target = torch.addmm(weights[block], share, changed.T)
        pruned = zeros_by_row(weights[block])
        levels[block] = compensate(target, factor, steps[block], zeros[block], scheme, pruned)
        errors = weights[block] - (levels[block] - zeros[block]) * steps[block]
        changed.addmm_(errors.T, inputs[block])
    codes = torch.empty_like(nearest.codes)
    codes[:, order] = stored_codes(levels.T, scheme)
    if scheme.paired is not None:
        made = without_overflow(replace(nearest, codes=codes))
        codes = made.codes
        changed = (matrix.to(torch.float32) - made.dequantize()) @ vectors
    error = (matrix.to(torch.float32) - nearest.dequantize()) @ vectors
    worse = changed.square().sum(1) > error.square().sum(1)
    codes[worse] = nearest.codes[worse]
    return replace(nearest, codes=codes)


def _blocks(inputs: Tensor, damping: float) -> list[tuple[slice, Tensor, Tensor]] | None:
    """Return the blocks of columns, each with its share ``P Xᵀ / d`` and its factor.

    The share is ``[columns of the block, vectors]``, the factor that of ``cholesky.upper_factor``
    for the block's moment. ``P`` loses what a block compensates for, from the last to the first.

    Returns:
        ``None`` where a block's moment is not positive definite, as when all inputs are zero.
    """
    left = torch.eye(inputs.shape[1])
    blocks = []
    for start in reversed(range(0, len(inputs), _BLOCK)):
        block = slice(start, min(start + _BLOCK, len(inputs)))
        seen = inputs[block] @ left
        moment = seen @ inputs[block].T
        moment.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(moment.flip(0, 1))
        if int(failed):
            return None
        factor = lower.flip(0, 1)
        inverse = torch.linalg.solve_triangular(factor, torch.eye(len(seen)), upper=True)
        solved = inverse @ seen
        left.addmm_(solved.T, solved, alpha=-1)
        blocks.append((block, inverse.T @ solved, factor))
    return blocks[::-1]
