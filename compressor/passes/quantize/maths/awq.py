"""Ranges of groups, and factors of columns, by the error of the layer's output.

The output error ``tr(E M Eᵀ)`` is quadratic in the error ``E`` of the weights. So what it changes
by, when a group is rounded with another range or a column after another factor, is known exactly
from that group's or column's own errors and from the gradient, and trying is cheap. Weights are
rounded to nearest throughout.

What is widened to float32, or rounded to be judged, is so for some rows at a time: of all rows
there is only an error. Its gradient is found for some columns at a time, which takes as many
products as to keep that of all columns up to date."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from compressor.passes.quantize.maths import floating
from compressor.passes.quantize.maths.affine import extremes, in_groups, parameters, quantize
from compressor.passes.quantize.maths.cholesky import check_finite
from compressor.passes.quantize.maths.gptq import join_rows
from compressor.types.layers import QuantizedTensor, Scheme

_AT_ONCE = 1 << 22  # weights that are rounded together
_COLUMNS = 128  # whose gradient is found together, at least
_SHARES = tuple(1 - 0.03 * step for step in range(22))  # of the full range


class Rounded:
    """A weight whose columns are scaled and rounded, with its error.

    ``matrix`` is of any float type and not scaled yet, ``start`` is the scaled weight, quantized,
    and ``factors`` are what columns are multiplied with, float32.
    """

    def __init__(self, matrix: Tensor, moment: Tensor, start: QuantizedTensor, factors: Tensor):
        self._matrix, self._moment, self._scheme = matrix, moment, start.scheme
        self._factors, self._whole = factors.clone(), start.tensor_scale
        self._scale, self._zero = start.scale.clone(), start.zero_point.clone()
        self._error = torch.empty(matrix.shape)
        for rows in _row_parts(matrix, start.scheme):
            self._error[rows] = _some(start, rows).dequantize().div_(factors).sub_(matrix[rows])

    def result(self) -> QuantizedTensor:
        """The scaled weight with the ranges and factors as they are now."""
        parts = []
        for rows in _row_parts(self._matrix, self._scheme):
            matrix = self._matrix[rows].to(torch.float32) * self._factors
            if self._scheme.granularity == "tensor":
                scale, zero = self._scale, self._zero
            else:
                scale, zero = self._scale[rows], self._zero[rows]
            if self._scheme.element == "int":
                parts.append(quantize(matrix, scale, zero, self._scheme))
            else:
                made = floating.quantize_floats(matrix, scale, self._scheme, self._whole)
                parts.append(made)
        return join_rows(parts)

    def visit_ranges(self) -> None:
        """Give each row of each group in turn the range of least error among shrunk ones."""
        scheme = self._scheme
        if scheme.granularity == "tensor":
            return
        width = in_groups(self._matrix, scheme).shape[2]
        for group in range(self._scale.shape[1]):
            columns = slice(group * width, (group + 1) * width)
            exact = self._matrix[:, columns].to(torch.float32)
            part = exact * self._factors[columns]
            moment, gradient = self._moment[columns, columns], self.gradient(columns)
            scale, zero = self._scale[:, group].clone(), self._zero[:, group].clone()
            least, moved = torch.zeros(len(part)), torch.zeros_like(part)
            for tried in self._tries(part):
                delta = tried.dequantize() / self._factors[columns]
                delta.sub_(exact).sub_(self._error[:, columns])
                change = ((delta @ moment).add_(gradient, alpha=2) * delta).sum(1)
                better = change < least
                least = torch.where(better, change, least)
                moved = torch.where(better[:, None], delta, moved)
                scale = torch.where(better, tried.scale[:, 0], scale)
                zero = torch.where(better, tried.zero_point[:, 0], zero)
            self._scale[:, group], self._zero[:, group] = scale, zero
            self._error[:, columns] += moved

    def gradient(self, columns: Tensor | slice) -> Tensor:
        """Half the gradient of the output error for some columns, ``[rows, count]``."""
        return self._error @ self._moment[:, columns]

    def change(self, columns: Tensor, ratios: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Try other factors for some columns, steps held.

        Args:
            columns: which, int64 ``[count]``; all get the same ratio.
            ratios: what their factors are multiplied with, ``[tried]``.
            gradient: what :meth:`gradient` is for these columns now.

        Returns:
            What the output error changes by, float64 ``[tried]``, and by how much the weights
            grow, ``[tried, rows, count]``.
        """
        exact = self._matrix[:, columns].to(torch.float32)
        factors = self._factors[columns] * ratios[:, None]
        step, zero = self._of_columns(columns)
        scheme = self._scheme
        levels = exact * factors[:, None] / step
        if scheme.element != "int":
            levels = floating.nearest_values(levels, scheme)
        else:
            levels = levels.round_().clamp_(scheme.low - zero, scheme.high - zero)
        moved = levels.mul_(step) / factors[:, None] - exact - self._error[:, columns]
        moment = self._moment[columns][:, columns]
        slopes = (moved @ moment).add_(gradient, alpha=2)
        return (slopes * moved).sum((1, 2), dtype=torch.float64), moved

    def move(self, columns: Tensor, moved: Tensor, ratio: Tensor) -> None:
        """Take on one of the ratios tried, by which the weights grow ``moved [rows, count]``."""
        self._factors[columns] *= ratio
        self._error[:, columns] += moved

    def _of_columns(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Steps and zero points, float32 ``[rows or 1, count]``."""
        group = columns // (self._matrix.shape[1] // self._scale.shape[1])
        step = self._scale[:, group]
        if self._whole is not None:
            step = step * self._whole
        return step, self._zero[:, group].to(torch.float32)

    def _tries(self, part: Tensor) -> Iterator[QuantizedTensor]:
        """Round the columns of a group with each of the ranges that are tried."""
        scheme, whole = self._scheme, self._whole
        if scheme.element == "int":
            low, high = extremes(in_groups(part, scheme), scheme)
            for share in _SHARES:
                scale, zero = parameters(low * share, high * share, scheme)
                yield quantize(part, scale, zero, scheme)
            return
        first = floating.float_parameters(part, scheme, whole)
        for scale in [first, *floating.candidate_scales(first, scheme)]:
            yield floating.quantize_floats(part, scale, scheme, whole)


_INPUT_EXPONENTS = tuple(step / 10 for step in range(8))
_WEIGHT_EXPONENTS = (0.0, 0.5, 1.0)
_ROOTS = (1.0, 0.5, 0.25, 0.0)  # exponents of the grid's best factors
_FURTHEST = 4.0  # from the mean factor to the least and the greatest, as a natural logarithm
_TRIED = tuple(2.0 ** (step / 16) for step in (*range(-8, 0), *range(1, 9)))
"""What a column's factor is multiplied with in the search, beside 1."""


@dataclass(frozen=True)
class Scaled:
    """Weights that share an input, quantized after their columns were scaled."""

    # what the columns were multiplied with, and the input is to be divided by; float32
    # `[columns]`, positive
    factors: Tensor
    weights: tuple[QuantizedTensor, ...]  # the scaled weights, quantized


def awq(
    matrices: Sequence[Tensor],
    moment: Tensor,
    schemes: Sequence[Scheme],
    search: floating.RangeSearch = "mse",
    tied: Tensor | None = None,
    sweeps: int = 2,
) -> Scaled:
    """Quantize weights that share an input, and find the factors of its channels.

    The sum of the layers' output errors is never above that of rounding the unscaled weights to
    nearest with ranges that hold all values.

    Args:
        matrices: the weights, each ``[rows, columns]`` with rows of its own, of any float type.
        moment: ``Σ x xᵀ`` over the shared input, ``[columns, columns]``.
        schemes: how the codes of each weight are represented.
        search: ``mse`` refines ranges and factors by coordinate descent; ``min-max`` takes the
            ranges of all values and factors from the grid.
        tied: which factor is each column's, int64 ``[columns]``, for columns that must have the
            same one; ``None`` gives each its own. Where all share one it is 1.
        sweeps: how often coordinate descent visits every range and factor.

    Raises:
        ValueError: the moment has another shape or is not finite, the columns do not divide into
            a scheme's groups, or an unsigned symmetric scheme meets negative values.
    """
    moment = moment.to(torch.float32)
    columns = moment.shape[0]
    if any(matrix.shape[1] != columns or moment.shape != (columns, columns) for matrix in matrices):
        raise ValueError(f"moment {list(moment.shape)} does not fit the weights' columns")
    check_finite(moment)
    owner = torch.arange(columns) if tied is None else torch.unique(tied, return_inverse=True)[1]
    ones = torch.ones(columns)
    problem = _Problem(list(zip(matrices, schemes, strict=True)), moment, owner)
    if not bool((moment.diagonal() > 0).any()):
        return problem.plain(ones)
    factors = ones if problem.single else problem.from_grid(search)
    scaled = problem.refined(factors, sweeps) if search == "mse" else problem.plain(factors)
    return scaled if problem.error(scaled) < problem.plain_error(ones) else problem.plain(ones)


@dataclass(frozen=True, eq=False)
class _Problem:
    """Weights, the float32 moment of their input, and the number of each column's factor."""

    layers: list[tuple[Tensor, Scheme]]
    moment: Tensor
    owner: Tensor

    @property
    def single(self) -> bool:
        """Whether several columns share one factor, so that the factor changes nothing."""
        return int(self.owner.max()) == 0 and len(self.owner) > 1

    def from_grid(self, search: floating.RangeSearch) -> Tensor:
        """The best factors among powers of the inputs' and the weights' magnitudes.

        Judged with the ranges of all values. Where ranges are searched, large weights cost less,
        and weaker factors are better: roots of the best are then tried as well.
        """
        power = self.moment.diagonal()
        least = power[power > 0].min()
        inputs = power.clamp(min=least).log() / 2
        squares = torch.stack([_mean_squares(w) for w, _ in self.layers if len(w)])
        share = (squares / squares.mean(1, keepdim=True).clamp(min=1e-30)).sum(0)
        weights = share.clamp(min=1e-12).log() / 2
        logarithms = [
            first * inputs - second * weights
            for first, second in product(_INPUT_EXPONENTS, _WEIGHT_EXPONENTS)
        ]
        best = self._best([self._usable(logarithm) for logarithm in logarithms], "min-max")
        return best if search == "min-max" else self._best([best**r for r in _ROOTS], search)

    def _best(self, choices: list[Tensor], search: floating.RangeSearch) -> Tensor:
        errors = [self.plain_error(factors, search) for factors in choices]
        return choices[errors.index(min(errors))]

    def plain(self, factors: Tensor, search: floating.RangeSearch = "min-max") -> Scaled:
        """Round to nearest what the factors make of the weights."""
        rounded = [
            join_rows([codes for _, codes in self._rounded(weight, scheme, factors, search)])
            for weight, scheme in self.layers
        ]
        return Scaled(factors, tuple(rounded))

    def plain_error(self, factors: Tensor, search: floating.RangeSearch = "min-max") -> float:
        """Return the error of :meth:`plain`, of which no more than some rows are kept."""
        return sum(
            self._error(weight[rows], factors, codes)
            for weight, scheme in self.layers
            for rows, codes in self._rounded(weight, scheme, factors, search)
        )

    def _rounded(
        self, weight: Tensor, scheme: Scheme, factors: Tensor, search: floating.RangeSearch
    ) -> Iterator[tuple[slice, QuantizedTensor]]:
        """Yield the codes of some rows after the other."""
        importance = self.moment.diagonal() / factors.square()
        parts = _row_parts(weight, scheme)
        scaled = (weight[rows].to(torch.float32) * factors for rows in parts)
        whole = floating.shared_scale(scaled, scheme)
        for rows in parts:
            matrix = weight[rows].to(torch.float32) * factors
            yield rows, floating.round_to_nearest(matrix, scheme, search, whole, importance)

    def refined(self, factors: Tensor, sweeps: int) -> Scaled:
        parts = [
            Rounded(weight, self.moment, codes, factors)
            for (weight, _), codes in zip(
                self.layers, self.plain(factors, "mse").weights, strict=True
            )
        ]
        for _ in range(sweeps):
            for part in parts:
                part.visit_ranges()
            if not self.single:
                factors = self._visited(parts, factors)
        for part in parts:
            part.visit_ranges()
        return Scaled(factors, tuple(part.result() for part in parts))

    def error(self, scaled: Scaled) -> float:
        """Return the sum of the layers' output errors."""
        return sum(
            self._error(weight[rows], scaled.factors, _some(codes, rows))
            for (weight, scheme), codes in zip(self.layers, scaled.weights, strict=True)
            for rows in _row_parts(weight, scheme)
        )

    def _error(self, rows: Tensor, factors: Tensor, codes: QuantizedTensor) -> float:
        # As the unscaled weights have it, for which the moment is as it is.
        error = codes.dequantize().div_(factors).sub_(rows)
        return float(((error @ self.moment) * error).sum(dtype=torch.float64))

    def _usable(self, logarithm: Tensor) -> Tensor:
        """Factors of mean logarithm 0, the same for tied columns, within bounds."""
        count = int(self.owner.max()) + 1
        total = torch.zeros(count).index_add_(0, self.owner, logarithm)
        shared = (total / torch.bincount(self.owner))[self.owner]
        return (shared - shared.mean()).clamp(-_FURTHEST, _FURTHEST).exp()

    def _visited(self, parts: list[Rounded], factors: Tensor) -> Tensor:
        """Give each factor in turn the value of least error, the steps of groups held."""
        factors = factors.clone()
        order = torch.argsort(self.owner, stable=True)
        tried = torch.tensor(_TRIED)
        for owners in _some_owners(torch.bincount(self.owner).tolist()):
            near, order = order[: sum(owners)], order[sum(owners) :]
            slopes = [part.gradient(near) for part in parts]
            first = 0
            for count in owners:
                here = slice(first, first + count)
                first, columns = first + count, near[here]
                changes = [
                    part.change(columns, tried, slope[:, here])
                    for part, slope in zip(parts, slopes, strict=True)
                ]
                gain = torch.stack([change for change, _ in changes]).sum(0)
                best = int(gain.argmin())
                if float(gain[best]) >= 0:
                    continue
                factors[columns] *= tried[best]
                shares = self.moment[columns][:, near]
                for part, slope, (_, moved) in zip(parts, slopes, changes, strict=True):
                    part.move(columns, moved[best], tried[best])
                    slope.addmm_(moved[best], shares)
        return factors


def _some_owners(counts: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers of columns of factors whose gradient is found together."""
    some: list[int] = []
    for count in counts:
        some.append(count)
        if sum(some) >= _COLUMNS:
            yield some
            some = []
    if some:
        yield some


def _row_parts(matrix: Tensor, scheme: Scheme) -> list[slice]:
    """Cut the rows so that a piece has so many weights; those that share a scale stay together."""
    rows, columns = matrix.shape
    step = max(1, rows if scheme.granularity == "tensor" else _AT_ONCE // max(columns, 1))
    return [slice(start, start + step) for start in range(0, max(rows, 1), step)]


def _some(codes: QuantizedTensor, rows: slice) -> QuantizedTensor:
    """Return some rows of a quantized weight, which may have one scale for all."""
    if codes.scheme.granularity == "tensor":
        return replace(codes, codes=codes.codes[rows])
    scale, zero = codes.scale[rows], codes.zero_point[rows]
    return replace(codes, codes=codes.codes[rows], scale=scale, zero_point=zero)


def _mean_squares(matrix: Tensor) -> Tensor:
    """Mean square of each column, float32 ``[columns]``."""
    parts = torch.split(matrix, max(1, _AT_ONCE // max(matrix.shape[1], 1)))
    return torch.stack([x.to(torch.float32).square().sum(0) for x in parts]).sum(0) / len(matrix)
