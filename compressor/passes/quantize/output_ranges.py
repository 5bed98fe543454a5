"""Ranges of groups, and factors of columns, by the error of the layer's output.

The output error ``tr(E M Eᵀ)`` is quadratic in the error ``E`` of the weights. So what it changes
by, when a group is rounded with another range or a column after another factor, is known exactly
from that group's or column's own errors and from the gradient, and trying is cheap. Weights are
rounded to nearest throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from compressor.passes.quantize.affine import parameters, quantize
from compressor.passes.quantize.floating import (
    candidate_scales,
    float_parameters,
    nearest_values,
    quantize_floats,
)
from compressor.passes.quantize.groups import extremes, in_groups
from compressor.types.quantized import QuantizedTensor, Scheme

_SHARES = tuple(1 - 0.03 * step for step in range(22))  # of the full range


class Rounded:
    """A weight whose columns are scaled and rounded, with the gradient of its output error.

    Args:
        matrix: the weight before it is scaled, float32 ``[rows, columns]``.
        moment: ``Σ x xᵀ`` over the layer's inputs, float32 ``[columns, columns]``.
        start: the scaled weight, quantized.
        factors: what columns are multiplied with, float32 ``[columns]``.
    """

    def __init__(self, matrix: Tensor, moment: Tensor, start: QuantizedTensor, factors: Tensor):
        self._matrix, self._moment, self._start = matrix, moment, start
        self._factors = factors.clone()
        self._scale, self._zero = start.scale.clone(), start.zero_point.clone()
        self._error = start.dequantize() / factors - matrix
        self._gradient = self._error @ moment

    def result(self) -> QuantizedTensor:
        """The scaled weight with the ranges and factors as they are now."""
        return self._rounded(
            self._matrix * self._factors, self._scale, self._zero, self._start.scheme
        )

    def visit_ranges(self) -> None:
        """Give each row of each group in turn the range of least error among shrunk ones."""
        scheme = self._start.scheme
        if scheme.granularity == "tensor":
            return
        alone = replace(scheme, granularity="channel", group=None)
        width = in_groups(self._matrix, scheme).shape[2]
        for group in range(self._scale.shape[1]):
            own = slice(group * width, (group + 1) * width)
            part = self._matrix[:, own] * self._factors[own]
            moment = self._moment[own, own]
            scale, zero = self._scale[:, group].clone(), self._zero[:, group].clone()
            least, moved = torch.zeros(len(part)), torch.zeros_like(part)
            for tried in self._tries(part, alone):
                delta = tried.dequantize() / self._factors[own]
                delta.sub_(self._matrix[:, own]).sub_(self._error[:, own])
                change = ((delta @ moment).add_(self._gradient[:, own], alpha=2) * delta).sum(1)
                better = change < least
                least = torch.where(better, change, least)
                moved = torch.where(better[:, None], delta, moved)
                scale = torch.where(better, tried.scale[:, 0], scale)
                zero = torch.where(better, tried.zero_point[:, 0], zero)
            self._scale[:, group], self._zero[:, group] = scale, zero
            self._error[:, own] += moved
            self._gradient.addmm_(moved, self._moment[own])

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
            levels = nearest_values(levels, scheme)
        else:
            levels = levels.round_().clamp_(scheme.low - zero, scheme.high - zero)
        moved = levels.mul_(step) / factors[:, None] - exact - self._error[:, columns]
        moment = self._moment[columns][:, columns]
        slopes = (moved @ moment).add_(self._gradient[:, columns], alpha=2)
        return (slopes * moved).sum((1, 2), dtype=torch.float64), moved

    def move(self, columns: Tensor, moved: Tensor, ratio: Tensor) -> None:
        """Take on one of the factors tried.

        Args:
            columns: as for :meth:`change`.
            moved: by how much the weights grow, ``[rows, count]``.
            ratio: what the factors are multiplied with, without axes.
        """
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

    def _rounded(
        self, matrix: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme
    ) -> QuantizedTensor:
        if scheme.element == "int":
            return quantize(matrix, scale, zero, scheme)
        return quantize_floats(matrix, scale, scheme, self._start.tensor_scale)

    def _tries(self, part: Tensor, scheme: Scheme) -> Iterator[QuantizedTensor]:
        """Round one group with various ranges."""
        if scheme.element == "int":
            low, high = extremes(in_groups(part, scheme), scheme)
            for share in _SHARES:
                scale, zero = parameters(low * share, high * share, scheme)
                yield quantize(part, scale, zero, scheme)
            return
        first = float_parameters(part, scheme, self._start.tensor_scale)
        zero = torch.zeros(first.shape, dtype=torch.int8)
        for scale in [first, *candidate_scales(first, scheme)]:
            yield self._rounded(part, scale, zero, scheme)
