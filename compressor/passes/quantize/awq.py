"""AWQ: input channels scaled so that the weights that matter are rounded finely.

J. Lin et al., AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration, 2023
(arXiv:2306.00978), section 3.2, with the search for clipping ranges of its reference
implementation. Columns are multiplied by factors before rounding to nearest, and the layers' input
is divided by them. Factors are a power of the inputs' magnitude, over one of the weights'; the
exponents come from a grid.

Beyond the paper, the objective is the output error ``tr(E M Eᵀ)`` of whole layers from the second
moment ``M`` of their input, in place of samples; and coordinate descent on it follows, in turn over
the range of every group (:mod:`compressor.passes.quantize.output_ranges`) and over the factor of
every column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from compressor.passes.quantize.descent import row_errors
from compressor.passes.quantize.nearest import RangeSearch, round_to_nearest
from compressor.passes.quantize.output_ranges import Rounded
from compressor.types.quantized import QuantizedTensor, Scheme

_INPUT_EXPONENTS = tuple(step / 10 for step in range(8))
_WEIGHT_EXPONENTS = (0.0, 0.5, 1.0)
_ROOTS = (1.0, 0.5, 0.25, 0.0)  # exponents of the grid's best factors
_FURTHEST = 4.0  # from the mean factor to the least and the greatest, as a natural logarithm
_TRIED = tuple(2.0 ** (step / 16) for step in (*range(-8, 0), *range(1, 9)))
"""What a column's factor is multiplied with in the search, beside 1."""


@dataclass(frozen=True)
class Scaled:
    """Weights that share an input, quantized after their columns were scaled.

    Attributes:
        factors: what the columns were multiplied with, and the input is to be divided by;
            float32 ``[columns]``, positive.
        weights: the scaled weights, quantized.
    """

    factors: Tensor
    weights: tuple[QuantizedTensor, ...]


def awq(
    matrices: Sequence[Tensor],
    moment: Tensor,
    schemes: Sequence[Scheme],
    search: RangeSearch = "mse",
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
    nearest = [round_to_nearest(w, s) for w, s in zip(weights, schemes, strict=True)]
    fallback = Scaled(ones, tuple(nearest))
    if not columns or not bool((moment.diagonal() > 0).any()):
        return fallback
    problem = _Problem(weights, moment, schemes, owner)
    factors = ones if int(owner.max()) == 0 and columns > 1 else problem.from_grid(search)
    found = problem.refined(factors, sweeps) if search == "mse" else problem.plain(factors)
    return found if problem.error(found) < problem.error(fallback) else fallback


@dataclass(frozen=True, eq=False)
class _Problem:
    """Float32 weights, the moment of their input, and the number of each column's factor."""

    weights: list[Tensor]
    moment: Tensor
    schemes: Sequence[Scheme]
    owner: Tensor

    def from_grid(self, search: RangeSearch) -> Tensor:
        """The best factors among powers of the inputs' and the weights' magnitudes.

        Judged with the ranges of all values. Where ranges are searched, large weights cost less,
        and weaker factors are better: roots of the best are then tried as well.
        """
        power = self.moment.diagonal()
        least = power[power > 0].min()
        inputs = power.clamp(min=least).log() / 2
        squares = torch.stack([w.square().mean(0) for w in self.weights if len(w)])
        share = (squares / squares.mean(1, keepdim=True).clamp(min=1e-30)).sum(0)
        weights = share.clamp(min=1e-12).log() / 2
        logarithms = [
            first * inputs - second * weights
            for first, second in product(_INPUT_EXPONENTS, _WEIGHT_EXPONENTS)
        ]
        best = self._best([self._usable(logarithm) for logarithm in logarithms], "min-max")
        return best if search == "min-max" else self._best([best**r for r in _ROOTS], search)

    def _best(self, choices: list[Tensor], search: RangeSearch) -> Tensor:
        errors = [self.error(self.plain(factors, search)) for factors in choices]
        return choices[errors.index(min(errors))]

    def plain(self, factors: Tensor, search: RangeSearch = "min-max") -> Scaled:
        """Scale and round to nearest."""
        importance = self.moment.diagonal() / factors.square()
        codes = [
            round_to_nearest(weight * factors, scheme, search, importance=importance)
            for weight, scheme in zip(self.weights, self.schemes, strict=True)
        ]
        return Scaled(factors, tuple(codes))

    def refined(self, factors: Tensor, sweeps: int) -> Scaled:
        """Descend over ranges and factors in turn."""
        start = self.plain(factors, "mse")
        parts = [
            Rounded(weight, self.moment, codes, factors)
            for weight, codes in zip(self.weights, start.weights, strict=True)
        ]
        single = int(self.owner.max()) == 0 and len(factors) > 1
        for _ in range(sweeps):
            for part in parts:
                part.visit_ranges()
            if not single:
                factors = self._visited(parts, factors)
        for part in parts:
            part.visit_ranges()
        return Scaled(factors, tuple(part.result() for part in parts))

    def error(self, scaled: Scaled) -> float:
        """The sum of output errors."""
        moment = self.moment / scaled.factors[:, None] / scaled.factors
        return sum(
            float(row_errors(weight * scaled.factors, codes, moment).sum())
            for weight, codes in zip(self.weights, scaled.weights, strict=True)
        )

    def _usable(self, logarithm: Tensor) -> Tensor:
        """Factors of mean logarithm 0, the same for tied columns, within bounds."""
        count = int(self.owner.max()) + 1
        total = torch.zeros(count).index_add_(0, self.owner, logarithm)
        shared = (total / torch.bincount(self.owner, minlength=count))[self.owner]
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
