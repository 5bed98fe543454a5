"""GPTQ: rounding in which later columns make up for the error of earlier ones.

E. Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers, 2022 (arXiv:2210.17323), sections 3.3 and 4. The objective is the squared error of
the layer's output, ``tr(E M Eᵀ)`` for the weights' error ``E`` and the second moment ``M`` of the
layer's inputs; any positive multiple of ``M`` gives the same codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.types.quantized import QuantizedTensor, Scheme
from passes.quantize.affine import quantize

_BLOCK = 128  # columns between updates of all columns that are yet to come
_SERIAL = 32768  # elements up to which torch does not start threads, which cost more than work
_RETRIES = (1.0, 10.0, 100.0)  # factors on the damping


def gptq(
    matrix: Tensor,
    moment: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    scheme: Scheme,
    damping: float = 0.01,
) -> QuantizedTensor:
    """Quantize a weight so that the layer's output, rather than the weight, changes least.

    Columns are rounded in the order of falling input power; scales and zero points are given and
    stay as they are, each column with those of its own group. A row for which nearest rounding
    does better keeps that, so the result is never worse.

    Args:
        matrix: the weight, ``[rows, columns]``.
        moment: ``Σ x xᵀ`` over the layer's inputs, ``[columns, columns]``. In a convolution with
            groups each group of rows has its own inputs and so is a call of its own.
        scale: ``[rows, groups]`` or ``[1, 1]``.
        zero_point: like ``scale``.
        scheme: how the codes are represented.
        damping: share of the mean input power that is added to every diagonal element.

    Raises:
        ValueError: the moment has another shape or is not finite, or the columns do not divide
            into the scheme's groups.
    """
    nearest = quantize(matrix, scale, zero_point, scheme)
    columns = matrix.shape[1]
    if moment.shape != (columns, columns):
        raise ValueError(f"moment {list(moment.shape)} does not fit {columns} columns")
    power = moment.diagonal()
    if not bool(torch.isfinite(moment).all()):
        raise ValueError("the moment holds values that are not finite")
    order = torch.argsort(power, descending=True, stable=True)
    factor = _inverse_factor(moment[order][:, order], damping)
    if factor is None:
        return nearest
    codes = torch.empty_like(nearest.codes)
    steps = _by_column(scale, nearest.codes)[order]
    zeros = _by_column(zero_point, nearest.codes)[order]
    rounded = _compensated(matrix[:, order].T, factor, steps, zeros, scheme)
    codes[:, order] = rounded.T.to(codes.dtype)
    compensated = QuantizedTensor(codes, scale, zero_point, scheme)
    worse = _row_errors(matrix, compensated, moment) > _row_errors(matrix, nearest, moment)
    codes[worse] = nearest.codes[worse]
    return compensated


def output_error(matrix: Tensor, quantized: QuantizedTensor, moment: Tensor) -> float:
    """Squared error of the layer's output, ``tr(E M Eᵀ)`` with ``E = matrix - quantized``.

    Args:
        matrix: the weight, ``[rows, columns]``.
        quantized: the weight, quantized.
        moment: ``Σ x xᵀ`` over the layer's inputs, ``[columns, columns]``.
    """
    return float(_row_errors(matrix, quantized, moment).sum())


def _row_errors(matrix: Tensor, quantized: QuantizedTensor, moment: Tensor) -> Tensor:
    error = matrix.to(torch.float32) - quantized.dequantize()
    return ((error @ moment.to(torch.float32)) * error).sum(1, dtype=torch.float64)


def _by_column(parameter: Tensor, codes: Tensor) -> Tensor:
    """Spread a scale or zero point ``[rows, groups]`` over columns: float32 ``[columns, rows]``."""
    rows, columns = codes.shape
    groups = parameter.shape[1]
    spread = parameter.to(torch.float32).T.repeat_interleave(columns // groups, dim=0)
    return spread.expand(columns, rows).contiguous()


def _inverse_factor(moment: Tensor, damping: float) -> Tensor | None:
    """Upper triangular ``U`` with ``Uᵀ U = (M + d I)⁻¹``, or ``None`` where there is none.

    With the order of columns reversed, ``M = L Lᵀ``; the inverse of ``L``, reversed again, is
    ``U``. That takes one factorization in place of two and an inverse.
    """
    power = moment.diagonal()
    alive = power > 0
    if not bool(alive.any()):
        return None
    mean = power[alive].mean()
    turned = moment.flip(0, 1)
    # A dead column has no input: any positive power serves, for nothing is passed on from it.
    extra = torch.where(alive, 0.0, mean).flip(0)
    eye = torch.eye(len(power))
    for retry in _RETRIES:
        for dtype in (torch.float32, torch.float64):
            damped = turned.to(dtype, copy=True)
            damped.diagonal().add_(extra + retry * damping * mean)
            lower, failed = torch.linalg.cholesky_ex(damped)
            if int(failed):
                continue
            inverse = torch.linalg.solve_triangular(lower, eye.to(dtype), upper=False)
            factor: Tensor = inverse.flip(0, 1).to(torch.float32)
            if bool(torch.isfinite(factor).all()):
                return factor
    return None


def _compensated(
    weights: Tensor, factor: Tensor, steps: Tensor, zeros: Tensor, scheme: Scheme
) -> Tensor:
    """Round column by column; all tensors but ``factor`` are ``[columns, rows]``.

    A column's error is passed on at once to the columns of its own small block, and by one product
    to a larger block and to all others when a block is done (section 4, lazy batch updates).
    """
    width = min(max(_SERIAL // max(weights.shape[1], 1), 8), _BLOCK)
    left = weights.to(torch.float32, copy=True).contiguous()
    codes = torch.empty_like(left)
    errors = torch.empty_like(left[:_BLOCK])
    zeros = zeros if bool(zeros.any()) else torch.zeros(()).expand(len(left))
    pivots = factor.diagonal().reciprocal().tolist()
    # Lists of rows: taking a row out of a tensor costs as much as the arithmetic on it.
    columns = list(zip(left.unbind(), codes.unbind(), steps.unbind(), zeros.unbind(), strict=True))
    for start in range(0, len(left), _BLOCK):
        end = min(start + _BLOCK, len(left))
        for small in range(start, end, width):
            stop = min(small + width, end)
            shares = factor[small:stop, small:stop, None]
            for column in range(small, stop):
                weight, code, step, zero = columns[column]
                error = errors[column - start]
                torch.div(weight, step, out=code)
                code.round_().add_(zero).clamp_(scheme.low, scheme.high)
                torch.sub(code, zero, out=error)
                torch.addcmul(weight, error, step, value=-1, out=error).mul_(pivots[column])
                own = column - small
                left[column + 1 : stop].addcmul_(shares[own, own + 1 :], error, value=-1)
            if stop < end:
                done = errors[small - start : stop - start]
                left[stop:end].addmm_(factor[small:stop, stop:end].T, done, alpha=-1)
        if end < len(left):
            left[end:].addmm_(factor[start:end, end:].T, errors[: end - start], alpha=-1)
    return codes
