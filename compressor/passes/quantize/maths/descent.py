"""Coordinate descent on a layer's output error, over codes and scales of its weight.

The error ``tr(E M Eᵀ)`` of weights ``E`` under the second moment ``M`` of the inputs is a
quadratic function of every single weight and of every single scale. So each code in turn takes
the value nearest to its own minimum, all others held, and each group's scale the minimum for the
group's codes. Weights that are exactly zero have been pruned and stay. No step raises the error.
Rounding by coordinate descent is that of K. Behdin et al., QuantEase, 2023 (arXiv:2309.01885),
section 3; the scales are ours.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from compressor.passes.quantize.maths.affine import stored_scale
from compressor.passes.quantize.maths.floating import float_scale, nearest_values, stored_codes
from compressor.types.layers import QuantizedTensor

_BLOCK = 128  # columns between updates of all other columns, at least; whole groups
_SERIAL = 32768  # elements up to which torch does not start threads, which cost more than work


def descend(
    matrix: Tensor,
    moment: Tensor,
    start: QuantizedTensor,
    sweeps: int = 1,
    codes: bool = True,
    ridge: float = 0.0,
) -> QuantizedTensor:
    """Lower the output error of a quantized weight; each row for itself.

    Args:
        matrix: the weight, ``[rows, columns]``.
        moment: ``Σ x xᵀ`` over the layer's inputs, or a multiple, float32 ``[columns, columns]``.
        start: the weight, quantized; scales stay as they are for granularity ``tensor``.
        sweeps: how often every code and every scale is visited.
        codes: visit codes; without it only scales change.
        ridge: added to the power of each input, the moment's diagonal.
    """
    scheme = start.scheme
    groups = start.scale.shape[1]
    state = _State(matrix, moment, start, ridge)
    columns = matrix.shape[1]
    width = columns // groups
    span = max(width, _BLOCK // max(width, 1) * width)  # whole groups, as near to a block as fit
    for _ in range(sweeps):
        for begin in range(0, columns, max(span, 1)):
            block = _Block(state, begin, min(begin + span, columns))
            for group in range(block.begin // width, block.end // width):
                if codes:
                    block.visit_codes(group)
                if scheme.granularity != "tensor":
                    block.visit_scale(group)
            block.finish()
    return state.result()


def row_errors(matrix: Tensor, quantized: QuantizedTensor, moment: Tensor) -> Tensor:
    """Each row's squared error of the output, ``e M eᵀ``, float64 ``[rows]``."""
    error = matrix.to(torch.float32) - quantized.dequantize()
    return ((error @ moment.to(torch.float32)) * error).sum(1, dtype=torch.float64)


def worse_rows(
    matrix: Tensor, first: QuantizedTensor, second: QuantizedTensor, moment: Tensor
) -> Tensor:
    """Return which rows of ``first`` have the greater error of the output, bool ``[rows]``.

    As the moment is symmetric, ``a M aᵀ - b M bᵀ = (a - b) M (a + b)ᵀ``, which takes one product of
    matrices in place of two.
    """
    ours, theirs = first.dequantize(), second.dequantize()
    both = (matrix.to(torch.float32) - ours).add_(matrix).sub_(theirs)
    difference = theirs.sub_(ours)
    return ((difference @ moment.to(torch.float32)) * both).sum(1, dtype=torch.float64) > 0


def better_rows(
    matrix: Tensor, moment: Tensor, first: QuantizedTensor, second: QuantizedTensor
) -> QuantizedTensor:
    """Take each row from ``first``, or from ``second`` where its output error is less.

    Both are in the same scheme, with a scale for each row at least and the same tensor scale.
    """
    worse = worse_rows(matrix, first, second, moment)[:, None]
    return replace(
        first,
        codes=_where(worse, second.codes, first.codes),
        scale=torch.where(worse, second.scale, first.scale),
        zero_point=torch.where(worse, second.zero_point, first.zero_point),
    )


def _where(condition: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """``torch.where``, also for floats of 8 bits, which it does not take."""
    taken = torch.where(condition, first.view(torch.uint8), second.view(torch.uint8))
    return taken.view(first.dtype)


def zeros_by_row(matrix: Tensor) -> list[Tensor] | None:
    """Return, row by row, which numbers are exactly zero; ``None`` where none is."""
    zero = (matrix == 0).contiguous()
    return list(zero.unbind()) if bool(zero.any()) else None


class _State:
    """Values, steps and the gradient; all with columns or groups first, ``[columns, rows]``."""

    def __init__(self, matrix: Tensor, moment: Tensor, start: QuantizedTensor, ridge: float):
        self.start = start
        self.scheme = start.scheme
        self.moment, self.ridge = moment, ridge
        rows, columns = matrix.shape
        groups = start.scale.shape[1]
        self.width = columns // groups
        self.whole = 1.0 if start.tensor_scale is None else float(start.tensor_scale)
        self.scale = start.scale.T.expand(groups, rows).clone()
        self.zero = start.zero_point.to(torch.float32).T.expand(groups, rows).contiguous()
        values = start.values().T
        self.values = (values - self._by_column(self.zero)).contiguous()
        error = matrix.to(torch.float32).T - self.values * self._by_column(self.scale * self.whole)
        self.gradient = (moment @ error).add_(error, alpha=ridge)
        self.pruned = zeros_by_row(matrix.T)
        power = moment.diagonal() + ridge
        # A column without input keeps its code.
        self.inverse_power = torch.where(power > 0, 1 / power, 0.0).tolist()

    def _by_column(self, parameter: Tensor) -> Tensor:
        return parameter.repeat_interleave(self.width, dim=0)

    def nearest(self, values: Tensor, group: int) -> Tensor:
        """Round to values that a code can mean, less the zero point."""
        scheme = self.scheme
        if scheme.element != "int":
            return nearest_values(values, scheme)
        if scheme.symmetric:
            return values.round_().clamp_(scheme.low, scheme.high)
        zero = self.zero[group]
        return values.round_().clamp_(scheme.low - zero, scheme.high - zero)

    def rounded_scale(self, exact: Tensor) -> Tensor:
        """Scales as they are stored, for steps that are wanted."""
        if self.scheme.element == "int":
            return stored_scale(exact, self.scheme)
        return float_scale(exact / self.whole, self.scheme)

    def result(self) -> QuantizedTensor:
        scheme, values = self.scheme, self.values.T
        integer = scheme.element == "int"
        codes = stored_codes(values + self._by_column(self.zero).T if integer else values, scheme)
        tensor = scheme.granularity == "tensor"
        scale = self.start.scale if tensor else self.scale.T.contiguous()
        return replace(self.start, codes=codes.contiguous(), scale=scale)


class _Block:
    """Some whole groups, whose columns see each other's changes at once.

    All other columns see them when the block is finished, in one product.
    """

    def __init__(self, state: _State, begin: int, end: int):
        self.state = state
        self.begin, self.end = begin, end
        self.moment = state.moment[begin:end, begin:end].clone()
        self.moment.diagonal().add_(state.ridge)
        self.gradient = state.gradient[begin:end].clone()
        self.change = torch.zeros_like(self.gradient)
        rows = self.gradient.shape[1]
        self.width = min(max(_SERIAL // max(rows, 1), 8), 32)

    def visit_codes(self, group: int) -> None:
        width = self.state.width
        first = group * width - self.begin
        for begin in range(first, first + width, self.width):
            end = min(begin + self.width, first + width)
            moved = self._visit(begin, end, group)
            self._add(begin, end, moved)

    def _visit(self, begin: int, end: int, group: int) -> Tensor:
        """Change the codes of a few columns; returns by how much the weights grew."""
        state = self.state
        step = state.scale[group] * state.whole
        gradient = self.gradient[begin:end].clone()
        moved = torch.empty_like(gradient)
        shares = self.moment[begin:end, begin:end, None]
        inverse = state.inverse_power[self.begin + begin : self.begin + end]
        # Lists of rows: taking a row out of a tensor costs as much as the arithmetic on it.
        values = state.values[self.begin + begin : self.begin + end].unbind()
        rows = zip(values, gradient.unbind(), moved.unbind(), inverse, strict=True)
        for index, (value, slope, delta, inverse_power) in enumerate(rows):
            target = torch.addcdiv(value, slope, step, value=inverse_power)
            rounded = state.nearest(target, group)
            if state.pruned is not None:
                rounded.masked_fill_(state.pruned[self.begin + begin + index], 0)
            torch.sub(rounded, value, out=delta).mul_(step)
            value.copy_(rounded)
            gradient[index + 1 :].addcmul_(shares[index, index + 1 :], delta, value=-1)
        return moved

    def visit_scale(self, group: int) -> None:
        """Give each row's scale the value, among those of its type, near its minimum."""
        state = self.state
        first = group * state.width - self.begin
        columns = slice(first, first + state.width)
        values = state.values[group * state.width : (group + 1) * state.width]
        slope = (values * self.gradient[columns]).sum(0)
        curve = ((self.moment[columns, columns] @ values) * values).sum(0)
        scale = state.scale[group]
        step = scale * state.whole
        target = step + torch.where(curve > 0, slope / curve, 0.0)
        if not self.state.scheme.signed_scale:
            target = target.clamp(min=0)
        rounded = state.rounded_scale(target.to(torch.float64))
        delta = rounded * state.whole - step
        # Rounding to a coarse type may overshoot, and no scale is zero.
        falls = (target != 0) & (delta * (delta * curve - 2 * slope) < 0)
        delta = torch.where(falls, delta, 0.0)
        state.scale[group] = torch.where(falls, rounded, scale)
        self._add(columns.start, columns.stop, values * delta)

    def _add(self, begin: int, end: int, moved: Tensor) -> None:
        self.gradient.addmm_(self.moment[:, begin:end], moved, alpha=-1)
        self.change[begin:end] += moved

    def finish(self) -> None:
        """Pass the block's changes on to all other columns."""
        state = self.state
        state.gradient.addmm_(state.moment[:, self.begin : self.end], self.change, alpha=-1)
        state.gradient[self.begin : self.end].add_(self.change, alpha=-state.ridge)
