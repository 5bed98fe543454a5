"""Ranges of groups, and factors of columns, by the error of the layer's output.

The output error ``tr(E M Eᵀ)`` is quadratic in the error ``E`` of the weights. So what it changes
by, when a group is rounded with another range or a column after another factor, is known exactly
from that group's or column's own errors and from the gradient, and trying is cheap. Weights are
rounded to nearest throughout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from compressor.passes.quantize.maths import floating
from compressor.passes.quantize.maths.affine import extremes, in_groups, parameters, quantize
from compressor.passes.quantize.maths.descent import row_errors
from compressor.types.layers import QuantizedTensor, Scheme

_SHARES = tuple(1 - 0.03 * step for step in range(22))  # of the full range


class Rounded:
    """A weight whose columns are scaled and rounded, with the gradient of its output error.

    ``matrix`` is not scaled yet, ``start`` is the scaled weight, quantized, and ``factors`` are
    what columns are multiplied with; all are float32.
    """

    def __init__(self, matrix: Tensor, moment: Tensor, start: QuantizedTensor, factors: Tensor):
        self._matrix, self._moment, self._start = matrix, moment, start
        self._factors = factors.clone()
        self._scale, self._zero = start.scale.clone(), start.zero_point.clone()
        self._error = start.dequantize() / factors - matrix
        self._gradient = self._error @ moment

    def result(self) -> QuantizedTensor:
        """The scaled weight with the ranges and factors as they are now."""
        matrix, scheme = self._matrix * self._factors, self._start.scheme
        if scheme.element == "int":
            return quantize(matrix, self._scale, self._zero, scheme)
        return floating.quantize_floats(matrix, self._scale, scheme, self._start.tensor_scale)

    def visit_ranges(self) -> None:
        """Give each row of each group in turn the range of least error among shrunk ones."""
        scheme = self._start.scheme
        if scheme.granularity == "tensor":
            return
        width = in_groups(self._matrix, scheme).shape[2]
        for group in range(self._scale.shape[1]):
            columns = slice(group * width, (group + 1) * width)
            part = self._matrix[:, columns] * self._factors[columns]
            moment = self._moment[columns, columns]
            scale, zero = self._scale[:, group].clone(), self._zero[:, group].clone()
            least, moved = torch.zeros(len(part)), torch.zeros_like(part)
            for tried in self._tries(part):
                delta = tried.dequantize() / self._factors[columns]
                delta.sub_(self._matrix[:, columns]).sub_(self._error[:, columns])
                change = ((delta @ moment).add_(self._gradient[:, columns], alpha=2) * delta).sum(1)
                better = change < least
                least = torch.where(better, change, least)
                moved = torch.where(better[:, None], delta, moved)
                scale = torch.where(better, tried.scale[:, 0], scale)
                zero = torch.where(better, tried.zero_point[:, 0], zero)
            self._scale[:, group], self._zero[:, group] = scale, zero
            self._error[:, columns] += moved
            self._gradient.addmm_(moved, self._moment[columns])

    def change(self, columns: Tensor, ratios: Tensor) -> tuple[Tensor, Tensor]:
        """Try other factors for some columns, steps held.

        Args:
            columns: which, int64 ``[count]``; all get the same ratio.
            ratios: what their factors are multiplied with, ``[tried]``.

        Returns:
            What the output error changes by, float64 ``[tried]``, and by how much the weights
            grow, ``[tried, rows, count]``.
        """
        exact = self._matrix[:, columns]
        factors = self._factors[columns] * ratios[:, None]
        step, zero = self._of_columns(columns)
        scheme = self._start.scheme
        levels = exact * factors[:, None] / step
        if scheme.element != "int":
            levels = floating.nearest_values(levels, scheme)
        else:
            levels = levels.round_().clamp_(scheme.low - zero, scheme.high - zero)
        moved = levels.mul_(step) / factors[:, None] - exact - self._error[:, columns]
        moment = self._moment[columns][:, columns]
        slopes = (moved @ moment).add_(self._gradient[:, columns], alpha=2)
        return (slopes * moved).sum((1, 2), dtype=torch.float64), moved

    def move(self, columns: Tensor, moved: Tensor, ratio: Tensor) -> None:
        """Take on one of the ratios tried, by which the weights grow ``moved [rows, count]``."""
        self._factors[columns] *= ratio
        self._error[:, columns] += moved
        self._gradient.addmm_(moved, self._moment[columns])

    def _of_columns(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Steps and zero points, float32 ``[rows or 1, count]``."""
        group = columns // (self._matrix.shape[1] // self._scale.shape[1])
        step = self._scale[:, group]
        if self._start.tensor_scale is not None:
            step = step * self._start.tensor_scale
        return step, self._zero[:, group].to(torch.float32)

    def _tries(self, part: Tensor) -> Iterator[QuantizedTensor]:
        """Round the columns of a group with each of the ranges that are tried."""
        scheme, whole = self._start.scheme, self._start.tensor_scale
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
        matrices: the weights, each ``[rows, columns]`` with rows of its own.
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
    if not bool(torch.isfinite(moment).all()):
        raise ValueError("the moment holds values that are not finite")
    weights = [matrix.to(torch.float32) for matrix in matrices]
    owner = torch.arange(columns) if tied is None else torch.unique(tied, return_inverse=True)[1]
    ones = torch.ones(columns)
    layers = list(zip(weights, schemes, strict=True))
    nearest = [floating.round_to_nearest(weight, scheme) for weight, scheme in layers]
    fallback = Scaled(ones, tuple(nearest))
    if not bool((moment.diagonal() > 0).any()):
        return fallback
    problem = _Problem(layers, moment, owner)
    factors = ones if problem.single else problem.from_grid(search)
    scaled = problem.refined(factors, sweeps) if search == "mse" else problem.plain(factors)
    return scaled if problem.error(scaled) < problem.error(fallback) else fallback


@dataclass(frozen=True, eq=False)
class _Problem:
    """Float32 weights, the moment of their input, and the number of each column's factor."""

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
        squares = torch.stack([w.square().mean(0) for w, _ in self.layers if len(w)])
        share = (squares / squares.mean(1, keepdim=True).clamp(min=1e-30)).sum(0)
        weights = share.clamp(min=1e-12).log() / 2
        logarithms = [
            first * inputs - second * weights
            for first, second in product(_INPUT_EXPONENTS, _WEIGHT_EXPONENTS)
        ]
        best = self._best([self._usable(logarithm) for logarithm in logarithms], "min-max")
        return best if search == "min-max" else self._best([best**r for r in _ROOTS], search)

    def _best(self, choices: list[Tensor], search: floating.RangeSearch) -> Tensor:
        errors = [self.error(self.plain(factors, search)) for factors in choices]
        return choices[errors.index(min(errors))]

    def plain(self, factors: Tensor, search: floating.RangeSearch = "min-max") -> Scaled:
        importance = self.moment.diagonal() / factors.square()
        codes = [
            floating.round_to_nearest(weight * factors, scheme, search, importance=importance)
            for weight, scheme in self.layers
        ]
        return Scaled(factors, tuple(codes))

    def refined(self, factors: Tensor, sweeps: int) -> Scaled:
        start = self.plain(factors, "mse")
        parts = [
            Rounded(weight, self.moment, codes, factors)
            for (weight, _), codes in zip(self.layers, start.weights, strict=True)
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
        moment = self.moment / scaled.factors[:, None] / scaled.factors
        return sum(
            float(row_errors(weight * scaled.factors, codes, moment).sum())
            for (weight, _), codes in zip(self.layers, scaled.weights, strict=True)
        )

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
        counts = torch.bincount(self.owner).tolist()
        tried = torch.tensor(_TRIED)
        for columns in torch.split(order, counts):
            changes = [part.change(columns, tried) for part in parts]
            gain = torch.stack([change for change, _ in changes]).sum(0)
            best = int(gain.argmin())
            if float(gain[best]) < 0:
                factors[columns] *= tried[best]
                for part, (_, moved) in zip(parts, changes, strict=True):
                    part.move(columns, moved[best], tried[best])
        return factors
