"""GPTQ: rounding in which later columns compensate the errors of earlier ones.

E. Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers, 2022 (arXiv:2210.17323), sections 3.3 and 4. The objective is the squared error of
the layer's output, ``tr(E M Eᵀ)`` for the weights' error ``E`` and the second moment ``M`` of the
layer's inputs; any positive multiple of ``M`` gives the same codes. A weight that is exactly zero
has been pruned, and stays zero; the columns after it compensate in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compressor.passes.quantize.maths import floating
from compressor.passes.quantize.maths.affine import quantize
from compressor.passes.quantize.maths.cholesky import (
    check_finite,
    costs_of_columns,
    upper_factor,
)
from compressor.passes.quantize.maths.descent import (
    better_rows,
    descend,
    row_errors,
    worse_rows,
    zeros_by_row,
)
from compressor.passes.quantize.maths.pairs import without_overflow
from compressor.types.layers import QuantizedTensor, Scheme

_BLOCK = 128  # columns between updates of all columns that are yet to come
_SERIAL = 32768  # elements up to which torch does not start threads, which cost more than work
_AT_ONCE = 1 << 21  # weights whose rows are rounded together: each takes some 50 bytes


@dataclass(frozen=True, eq=False)
class FactoredMoment:
    """A second moment and its factor, for all layers that read the same input."""

    moment: Tensor
    ordered: tuple[Tensor, Tensor] | None  # the columns by falling power, and the factor

    @classmethod
    def of(cls, moment: Tensor, damping: float = 0.01) -> FactoredMoment:
        """Factorize a moment; raises ``ValueError`` where it is not finite."""
        check_finite(moment)
        return cls(moment, _order_and_factor(moment, damping))


def gptq(
    matrix: Tensor,
    moment: Tensor | FactoredMoment,
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
        moment: ``Σ x xᵀ`` over the layer's inputs, ``[columns, columns]``, or that with its factor.
            In a convolution with groups each group of rows has its own inputs and so is a call of
            its own.
        scale: ``[rows, groups]`` or ``[1, 1]``.
        zero_point: like ``scale``.
        scheme: how the codes are represented.
        damping: share of the mean input power that is added to every diagonal element, if there is
            no factor yet.

    Raises:
        ValueError: the moment has another shape or is not finite, or the columns do not divide
            into the scheme's groups.
    """
    nearest = quantize(matrix, scale, zero_point, scheme)
    given = moment.moment if isinstance(moment, FactoredMoment) else moment
    _check_shape(matrix, given)
    if not isinstance(moment, FactoredMoment):
        moment = FactoredMoment.of(moment, damping)
    return _from_nearest(matrix, given, nearest, moment.ordered)


def gptq_weights(
    matrix: Tensor | Sequence[Tensor],
    moment: Tensor,
    scheme: Scheme,
    search: floating.RangeSearch = "mse",
    damping: float = 0.01,
    sweeps: int = 1,
    between: Callable[[], None] | None = None,
) -> QuantizedTensor:
    """Quantize a weight, its scales included, so that the layer's output changes least.

    Ranges are found first (by ``mse``: each column counts by what an error in it costs once
    the others have compensated what they can), then codes as in :func:`gptq`, and then both are
    refined by coordinate descent on the output error
    (:mod:`compressor.passes.quantize.maths.descent`). A row for which nearest rounding does better
    keeps that, so the result is never worse.

    Weights that read the same input may be given together, which saves time: rows do not depend on
    each other, save for the order in which products are summed. A few of them are widened at a
    time.

    Args:
        matrix: the weight, ``[rows, columns]`` of any float type, or several of as many columns,
            whose rows the result has below each other.
        moment: ``Σ x xᵀ`` over the layer's inputs, ``[columns, columns]``.
        scheme: how codes are represented, integers or floats.
        search: how ranges are found.
        damping: share of the mean input power that is added to every diagonal element.
        sweeps: how often coordinate descent visits every code and scale.
        between: called whenever some rows are done, and what they took has been freed.

    Raises:
        ValueError: the moment has another shape or is not finite, the columns do not divide into
            the scheme's groups, or an unsigned symmetric scheme meets negative values.
    """
    matrices = [matrix] if isinstance(matrix, Tensor) else matrix
    for each in matrices:
        _check_shape(each, moment)
    check_finite(moment)
    moment = moment.to(torch.float32)
    ordered = _order_and_factor(moment, damping)
    costs = None
    if search == "mse" and ordered is not None:
        order, factor = ordered
        costs = torch.empty(len(order))
        costs[order] = costs_of_columns(factor)
    power = moment.diagonal()
    mean = power.sum() / (power > 0).sum().clamp(min=1)  # of inputs that are not always zero
    ridge = damping * float(mean)
    shared = floating.shared_scale(matrices, scheme)

    def fitted(rows: Tensor) -> QuantizedTensor:
        start = nearest = floating.round_to_nearest(rows, scheme, tensor_scale=shared)
        if ordered is None:
            return nearest
        if costs is not None:
            start = floating.round_to_nearest(rows, scheme, "mse", shared, costs)
        start = _from_nearest(rows, moment, start, ordered)
        refined = descend(rows, moment, start, sweeps, ridge=ridge)
        if scheme.granularity == "tensor":
            return min(refined, start, nearest, key=lambda q: output_error(rows, q, moment))
        return better_rows(rows, moment, refined, nearest)

    whole = scheme.granularity == "tensor"
    count = max(1, sum(map(len, matrices)) if whole else _AT_ONCE // max(len(moment), 1))
    parts = []
    for rows in _some_rows(matrices, count):
        parts.append(fitted(rows))
        if between is not None:
            between()
    return join_rows(parts)


def _some_rows(matrices: Sequence[Tensor], count: int) -> Iterator[Tensor]:
    """Yield so many rows at a time of matrices that lie below each other, in float32."""
    for start in range(0, max(sum(map(len, matrices)), 1), count):
        parts, first = [], start
        for each in matrices:
            parts.append(each[max(first, 0) : max(first + count, 0)])
            first -= len(each)
        yield torch.cat([part.to(torch.float32) for part in parts])


def join_rows(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Put quantized rows of one weight below each other; they have scales of their own."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        zero_point=torch.cat([part.zero_point for part in parts]),
    )


def split_rows(whole: QuantizedTensor, rows: Sequence[int]) -> list[QuantizedTensor]:
    """Cut a quantized weight into pieces of so many rows; its rows have scales of their own."""
    if len(rows) == 1:
        return [whole]
    parts = [torch.split(t, list(rows)) for t in (whole.codes, whole.scale, whole.zero_point)]
    # Clones: a view would keep all of the stacked rows in memory.
    return [
        replace(whole, codes=codes.clone(), scale=scale.clone(), zero_point=zero.clone())
        for codes, scale, zero in zip(*parts, strict=True)
    ]


def output_error(matrix: Tensor, quantized: QuantizedTensor, moment: Tensor) -> float:
    """Squared error of the layer's output, ``tr(E M Eᵀ)`` with ``E = matrix - quantized``."""
    return float(row_errors(matrix, quantized, moment).sum())


def _check_shape(matrix: Tensor, moment: Tensor) -> None:
    columns = matrix.shape[1]
    if moment.shape != (columns, columns):
        raise ValueError(f"moment {list(moment.shape)} does not fit {columns} columns")


def _from_nearest(
    matrix: Tensor, moment: Tensor, nearest: QuantizedTensor, ordered: tuple[Tensor, Tensor] | None
) -> QuantizedTensor:
    """Round with compensation, with the scales of ``nearest``; its rows where they are better."""
    if ordered is None:
        return nearest
    order, factor = ordered
    codes = torch.empty_like(nearest.codes)
    scale = nearest.scale
    if nearest.tensor_scale is not None:
        scale = scale * nearest.tensor_scale
    steps = by_column(scale, codes)[order]
    zeros = by_column(nearest.zero_point, codes)[order]
    weights = matrix[:, order].T
    pruned = zeros_by_row(weights)
    levels = compensate(weights, factor, steps, zeros, nearest.scheme, pruned)
    codes[:, order] = floating.stored_codes(levels.T, nearest.scheme)
    del weights, pruned, steps, zeros, levels  # the comparison needs as much
    compensated = without_overflow(replace(nearest, codes=codes))
    codes = compensated.codes
    worse = worse_rows(matrix, compensated, nearest, moment)
    codes[worse] = nearest.codes[worse]
    return compensated


def _order_and_factor(moment: Tensor, damping: float) -> tuple[Tensor, Tensor] | None:
    """Columns by falling input power, and the factor of the moment in that order."""
    order = torch.argsort(moment.diagonal(), descending=True, stable=True)
    factor = upper_factor(moment, damping, order)
    return None if factor is None else (order, factor)


def by_column(parameter: Tensor, codes: Tensor) -> Tensor:
    """Spread a scale or zero point ``[rows, groups]`` over columns: float32 ``[columns, rows]``."""
    rows, columns = codes.shape
    groups = parameter.shape[1]
    spread = parameter.to(torch.float32).T.repeat_interleave(columns // groups, dim=0)
    return spread.expand(columns, rows).contiguous()


def compensate(
    weights: Tensor,
    factor: Tensor,
    steps: Tensor,
    zeros: Tensor,
    scheme: Scheme,
    pruned: list[Tensor] | None,
) -> Tensor:
    """Round column by column; all tensors but ``factor`` are ``[columns, rows]``.

    ``factor`` is that of ``cholesky.upper_factor``. In its terms the output's squared error is
    ``|Fᵀ e|²``, so that a column's best value follows from the errors ``e`` of those before it by
    division by the diagonal: no inverse is needed (J. Chen et al., The Geometry of LLM
    Quantization: GPTQ as Babai's Nearest Plane Algorithm, 2025, arXiv:2507.18553).

    ``pruned`` says, column by column, which weights stay zero; ``None`` where none need to.

    A column's error is passed on at once to the columns of its own small block, and by one product
    to a larger block and to all others when a block is done (section 4, lazy batch updates).
    """
    width = min(max(_SERIAL // max(weights.shape[1], 1), 8), _BLOCK)
    weights = weights.to(torch.float32).contiguous()
    left = weights.clone()
    codes = torch.empty_like(left)
    integer = scheme.element == "int"
    errors = torch.empty_like(left[:_BLOCK])
    offsets = zeros.unbind() if bool(zeros.any()) else [None] * len(left)
    inverse = factor.diagonal().reciprocal()
    # Lists of rows: taking a row out of a tensor costs as much as the arithmetic on it.
    rows = (weights.unbind(), left.unbind(), codes.unbind(), steps.unbind(), offsets)
    columns = list(zip(*rows, strict=True))
    for start in range(0, len(left), _BLOCK):
        end = min(start + _BLOCK, len(left))
        # What each column takes over of the errors of those before it.
        shares = factor[start:end, start:] * inverse[start:]
        for small in range(start, end, width):
            stop = min(small + width, end)
            here = slice(small - start, stop - start)
            near = shares[here, here, None]
            for column in range(small, stop):
                weight, target, code, step, zero = columns[column]
                value = error = errors[column - start]
                torch.div(target, step, out=code)
                if pruned is not None:
                    code.masked_fill_(pruned[column], 0)
                if not integer:
                    value = code.copy_(floating.nearest_values(code, scheme))
                elif zero is None:
                    value = code.round_().clamp_(scheme.low, scheme.high)
                else:
                    code.round_().add_(zero).clamp_(scheme.low, scheme.high)
                    torch.sub(code, zero, out=value)
                torch.addcmul(weight, value, step, value=-1, out=error)
                index = column - small
                left[column + 1 : stop].addcmul_(near[index, index + 1 :], error)
            if stop < end:
                later = shares[here, stop - start : end - start]
                left[stop:end].addmm_(later.T, errors[here])
        if end < len(left):
            left[end:].addmm_(shares[:, end - start :].T, errors[: end - start])
    return codes
