"""Weights solved by ridge regression, so that a layer with fewer inputs gives what it gave.

That what remains of a pruned layer's consumer is solved by least squares on unlabelled samples is
from J.-H. Luo et al., ThiNet, 2017 (arXiv:1707.06342), section 3.2, and Y. He et al., Channel
pruning for accelerating very deep neural networks, 2017 (arXiv:1707.06168), section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from compressor.calibration.moments import mirror, with_product

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Shares of the mean input power that are tried as the penalty."""
_WIDE = 1024  # columns up to which products of single inputs are in float64, too
_FEW = 0.5  # pairs for each column up to which they are kept
_DEAD = 1e-12  # of the largest input power: what has less is taken to be always zero


class Sums:
    """Moments of a stream of inputs ``x`` and of the targets ``t`` that they are to give.

    The first pairs are kept as they are: while they are few beside the columns, what is asked of
    the moments takes a fraction of the time with the pairs themselves.

    The rows of a grouped convolution read the inputs of their group alone. So there are products
    for each group, and every group is solved by itself.

    Args:
        columns: that each row reads.
        rows: of all groups.
        groups: whose inputs, and whose rows, follow each other.

    Attributes:
        groups: how many.
        input_sum: ``Σ x``, ``[groups * columns]``.
        target_sum: ``Σ t``, ``[rows]``.
        power: ``Σ t²``, ``[rows]``.
        count: how many pairs there were.
    """

    def __init__(self, columns: int, rows: int, groups: int = 1):
        self.groups = groups
        self.input_sum = torch.zeros(groups * columns, dtype=torch.float64)
        self.target_sum, self.power = torch.zeros(2, rows, dtype=torch.float64).unbind()
        self.count = 0
        self._products: tuple[Tensor, Tensor] | None = None
        self._known = False  # the inputs are those of earlier sums
        self._kept: list[tuple[Tensor, Tensor]] = []

    @property
    def inputs(self) -> Tensor:
        """``Σ x xᵀ``, ``[columns, columns]``; of several groups ``[groups, columns, columns]``."""
        return self._multiplied()[0]

    @property
    def cross(self) -> Tensor:
        """``Σ t xᵀ``, ``[rows, columns]``."""
        return self._multiplied()[1]

    @property
    def few(self) -> tuple[Tensor, Tensor] | None:
        """All pairs, ``[count, columns]`` and ``[count, rows]``, while they are kept."""
        if self._products is not None or not self._kept:
            return None
        inputs, targets = zip(*self._kept, strict=True)
        return torch.cat(inputs).to(torch.float64), torch.cat(targets).to(torch.float64)

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Take in pairs, ``[count, groups * columns]`` and ``[count, rows]``."""
        if inputs.shape[1] <= _WIDE:
            inputs, targets = inputs.to(torch.float64), targets.to(torch.float64)
        self.target_sum += targets.sum(0, dtype=torch.float64)
        self.power += targets.to(torch.float64).square().sum(0)
        if self._known:
            self._accumulate(self.cross, targets, inputs)
            return
        self.input_sum += inputs.sum(0, dtype=torch.float64)
        self.count += len(inputs)
        if self._products is None:
            inputs, targets = inputs.clone(), targets.clone()  # of a buffer that may be reused
        self._kept.append((inputs, targets))
        self._settle()

    def again(self) -> Sums:
        """Return sums that take in the same inputs once more, with other targets.

        Products of the inputs are not computed again.
        """
        sums = self._empty()
        if self._products is not None:
            sums.input_sum, sums.count, sums._known = self.input_sum, self.count, True
            sums._products = self.inputs, torch.zeros_like(self.cross)
        return sums

    def _settle(self) -> None:
        """Keep no pairs where products take less."""
        if self._products is not None or self.groups > 1 or self.count > _FEW * len(self.input_sum):
            self._multiplied()

    def _multiplied(self) -> tuple[Tensor, Tensor]:
        if self._products is None:
            columns, rows = len(self.input_sum) // self.groups, len(self.target_sum)
            form = (columns, columns) if self.groups == 1 else (self.groups, columns, columns)
            second = torch.zeros(form, dtype=torch.float64)
            self._products = second, torch.zeros(rows, columns, dtype=torch.float64)
        second, cross = self._products
        for inputs, targets in self._kept:
            self._accumulate(second, inputs, inputs)
            self._accumulate(cross, targets, inputs)
        self._kept = []
        return self._products

    def _accumulate(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add products summed over pairs, of each group with itself.

        In float32 they are computed around the means: of inputs that hardly vary, their rounding
        would be more than the variance.
        """
        rows, columns = (value.shape[1] // self.groups for value in (left, right))
        total = total.view(self.groups, rows, columns)
        if left.dtype != torch.float64:
            one, two = left.mean(0, keepdim=True), right.mean(0, keepdim=True)
            total += self._grouped(left - one).mT @ self._grouped(right - two)
            sums = left.sum(0, keepdim=True, dtype=torch.float64)
            one, two = one.to(torch.float64), two.to(torch.float64)
            rest = right.sum(0, keepdim=True, dtype=torch.float64) - len(right) * two
            left, right = torch.cat([sums, one]), torch.cat([two, rest])
        if left is right:
            mirror(with_product(total, self._grouped(left).mT))
        else:
            total.baddbmm_(self._grouped(left).mT, self._grouped(right))

    def _grouped(self, values: Tensor) -> Tensor:
        columns = values.shape[1] // self.groups
        return values.reshape(len(values), self.groups, columns).transpose(0, 1)

    def _empty(self) -> Sums:
        return Sums(len(self.input_sum) // self.groups, len(self.target_sum), self.groups)

    def outputs(self, weight: Tensor) -> Tensor:
        """Return ``Σ W x``, ``[rows]``."""
        inputs = self.input_sum.reshape(self.groups, -1, 1)
        return (torch.unflatten(weight, 0, (self.groups, -1)) @ inputs).flatten()

    def __add__(self, other: Sums) -> Sums:
        """Return the sums of both streams."""
        joined = self._empty()
        for name in ("input_sum", "target_sum", "power", "count"):
            setattr(joined, name, getattr(self, name) + getattr(other, name))
        if self._products is other._products is None:
            joined._kept = [*self._kept, *other._kept]
            joined._settle()
        else:
            joined._products = self.inputs + other.inputs, self.cross + other.cross
        return joined

    def finite(self) -> bool:
        """Whether all that was taken in is finite, and so are its products."""
        held = (self.input_sum, self.target_sum, self.power, *(self._products or ()))
        return all(bool(torch.isfinite(tensor).all()) for tensor in held)

    def errors(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the squared error of ``weight x + bias`` in each row, ``[rows]``."""
        if (pairs := self.few) is not None:
            inputs, targets = pairs
            return (inputs @ weight.T + bias - targets).square().sum(0)
        inner = (torch.unflatten(weight, 0, (self.groups, -1)) @ self.inputs).reshape(weight.shape)
        squared = ((inner - 2 * self.cross) * weight).sum(1)
        shifted = bias * (2 * (self.outputs(weight) - self.target_sum) + self.count * bias)
        return (self.power + squared + shifted).clamp(min=0.0)


@dataclass(frozen=True, eq=False)
class Start:
    """A layer as it is before it is solved.

    Attributes:
        weight: float64 ``[rows, columns]``.
        bias: float64 ``[rows]``.
        shifts: the bias may change, too.
        importance: how much a squared error in each row counts, ``[rows]``.
    """

    weight: Tensor
    bias: Tensor
    shifts: bool
    importance: Tensor


@dataclass(frozen=True, eq=False)
class Fit:
    """A solved layer.

    Attributes:
        weight: float64 ``[rows, columns]``.
        bias: float64 ``[rows]``.
        penalty: as a share of the mean input power; infinite if only the bias is solved, or None.
        before: squared error with the given weight and bias, as a share of the targets' variance.
        after: the same with the solved ones, never more.
        variance: sum over samples and rows, each as much as its error counts.
    """

    weight: Tensor
    bias: Tensor
    penalty: float | None
    before: float
    after: float
    variance: float


def solve(
    start: Start,
    parts: Sequence[Sums],
    penalties: Sequence[float] = PENALTIES,
    variance: float | None = None,
) -> Fit:
    """Solve a layer's weight, and its bias with it, for targets.

    It minimizes ``Σ ‖W x + b - t‖² + penalty ‖W - W₀‖²``, where ``W₀`` is the weight as it is: so
    the squared error never grows, and what the inputs do not tell (of dead channels, or with fewer
    samples than columns) stays as it was. The penalty is the one that does best on the part of the
    samples that was not solved on, by turns; the weight as it is competes. Where nothing can be
    held out, the bias alone moves, by the mean error: a single number for each row.

    Args:
        parts: sums over disjoint parts of the samples.
        penalties: those to choose from, as shares of the mean power of inputs that are not dead.
        variance: what errors are a share of; that of the targets, if left out.
    """
    whole = sum(parts[1:], parts[0])
    chosen = _chosen(start, parts, penalties)
    weight, bias = start.weight, start.bias
    if chosen == inf:
        bias = (whole.target_sum - whole.outputs(weight)) / whole.count
    elif chosen is not None:
        ((weight, bias),) = _solved(start, whole, [chosen])
    if variance is None:
        around = whole.power - whole.target_sum.square() / max(whole.count, 1)
        variance = float((start.importance * around.clamp(min=0.0)).sum()) or 1.0
    before, after = (
        float((start.importance * whole.errors(w, b)).sum()) / variance
        for w, b in ((start.weight, start.bias), (weight, bias))
    )
    return Fit(weight, bias, chosen, before, after, variance)


def solved_again(start: Start, parts: Sequence[Sums], fit: Fit) -> Fit:
    """Solve a layer for other targets; return the fit as it was if that comes nearer to them.

    Shares are of the variance of the first targets. ``before`` is that of the first fit.
    """
    whole = sum(parts[1:], parts[0])
    found = solve(start, parts, variance=fit.variance)
    now = float((start.importance * whole.errors(fit.weight, fit.bias)).sum()) / fit.variance
    return fit if found.penalty is None or found.after >= now else replace(found, before=fit.before)


def clipped_targets(
    targets: Tensor, outputs: Tensor, scale: Tensor, offset: Tensor, low: float, high: float
) -> Tensor:
    """Return targets that differ from outputs only where the activation tells them apart.

    Where a target lies beyond a bound, any output beyond it does as well. X. Zhang et al.,
    Accelerating very deep convolutional networks, 2015 (arXiv:1505.06798), solve layers for what
    remains behind the ReLU, by turns for an auxiliary output and for the weight. Here the turns
    majorize and minimize (D. Hunter and K. Lange, A tutorial on MM algorithms, 2004): for every
    output, the squared error to what is returned is at least that behind the activation, and for
    the output as it is no more than the error to the targets given. So solving anew never makes
    what the activation gives worse.

    >>> import torch
    >>> t, y = torch.tensor([-1.0, -1.0, 2.0]), torch.tensor([-3.0, 1.0, 1.0])
    >>> clipped_targets(t, y, torch.ones(3), torch.zeros(3), 0.0, torch.inf)
    tensor([-3.,  0.,  2.])

    Args:
        targets: of the layer, ``[..., rows]``.
        outputs: what it gives now, likewise.
        scale: the activation reads ``scale * output + offset``, ``[rows]``; where it is zero,
            targets stay.
        offset: of any shape that broadcasts with the outputs.
        low: what is below it is as good as it.
        high: what is above it is as good as it.
    """
    aim, now = scale * targets + offset, scale * outputs + offset
    moved = torch.where(
        aim <= low, now.clamp(max=low), torch.where(aim >= high, now.clamp(min=high), aim)
    )
    return torch.where(scale == 0, targets, (moved - offset) / scale)


def without_columns(
    start: Start, sums: Sums, gone: Tensor, penalty: float = 1e-3
) -> tuple[Tensor, Tensor]:
    """Return a layer's weight and bias that come nearest to what it gives, without some columns.

    The closed form of :func:`solve` where the inputs that remain are those that there were, and
    the targets the layer's own outputs: moments of the inputs say all.

    Args:
        sums: of its inputs, all of them.
        gone: flags of columns, ``[columns]``; their weights are zero in what is returned.
        penalty: share of the mean input power.
    """
    stay, total = ~gone, sums.input_sum
    moment = sums.inputs[:, stay]
    if start.shifts:
        moment -= torch.outer(total, total[stay]) / sums.count
    ridged, missing = moment[stay], start.weight[:, gone] @ moment[gone]
    ridged.diagonal().add_(penalty * _power(ridged.diagonal()))
    weight = torch.where(stay, start.weight, 0.0)
    weight[:, stay] += _ridge(missing.mT, ridged).mT
    lost = (start.weight - weight) @ total / sums.count
    return weight, start.bias + lost if start.shifts else start.bias


def _chosen(start: Start, parts: Sequence[Sums], penalties: Sequence[float]) -> float | None:
    """Return the penalty that does best on what was held out; infinite if nothing can be."""
    errors = torch.zeros(1 + len(penalties), dtype=torch.float64)
    for index, held in enumerate(parts):
        rest = [part for place, part in enumerate(parts) if place != index and part.count]
        if not rest or not held.count:
            return inf if start.shifts else None
        fits = _solved(start, sum(rest[1:], rest[0]), penalties)
        for place, (weight, bias) in enumerate([(start.weight, start.bias), *fits]):
            errors[place] += (start.importance * held.errors(weight, bias)).sum()
    best = int(errors.argmin())
    return None if best == 0 else penalties[best - 1]


def _solved(start: Start, sums: Sums, penalties: Sequence[float]) -> list[tuple[Tensor, Tensor]]:
    """Return weight and bias for each penalty."""
    mean, target = sums.input_sum / sums.count, sums.target_sum / sums.count
    if (few := sums.few) is not None:
        centre, aim = (mean, target) if start.shifts else (torch.zeros_like(mean), start.bias)
        changes = _changes(few[0] - centre, few[1] - aim, start.weight, penalties)
        weights = [start.weight + change for change in changes]
    else:
        weights = _by_group(start, sums, penalties)
    if not start.shifts:
        return [(w, start.bias) for w in weights]
    return [(w, target - sums.outputs(w) / sums.count) for w in weights]


def _by_group(start: Start, sums: Sums, penalties: Sequence[float]) -> list[Tensor]:
    """Return the weight for each penalty, from products; each group has a matrix of its own."""
    first = torch.unflatten(start.weight, 0, (sums.groups, -1))
    inputs, cross = sums.inputs.expand(sums.groups, -1, -1), sums.cross.reshape(first.shape)
    total = sums.input_sum.reshape(sums.groups, 1, -1)
    aim = sums.target_sum / sums.count if start.shifts else start.bias
    if start.shifts:
        inputs = inputs - total.mT / sums.count * total
    missing = (cross - aim.reshape(sums.groups, -1, 1) * total - first @ inputs).mT
    power = _power(inputs.diagonal(dim1=1, dim2=2))
    weights = []
    for penalty in penalties:
        ridged = inputs.clone()
        ridged.diagonal(dim1=1, dim2=2).add_(penalty * power)
        weights.append((first + _ridge(missing, ridged).mT).flatten(0, 1))
    return weights


def _changes(
    inputs: Tensor, targets: Tensor, weight: Tensor, penalties: Sequence[float]
) -> Iterator[Tensor]:
    """Yield what a weight changes by for each penalty, from fewer pairs than columns.

    ``(XᵀX + λ)⁻¹ Xᵀ = Xᵀ (XXᵀ + λ)⁻¹``, of which the right side has a matrix ``[count, count]``.
    """
    missing, between = targets - inputs @ weight.T, inputs @ inputs.T
    power = _power(inputs.square().sum(0))
    for penalty in penalties:
        ridged = between.clone()
        ridged.diagonal().add_(penalty * power)
        yield _ridge(missing, ridged).T @ inputs


def _ridge(missing: Tensor, ridged: Tensor) -> Tensor:
    """Return the solution of symmetric systems, ``[..., columns, rows]``; zeros if there is none.

    Too little may be added to what rounding has left of a singular matrix.
    """
    factor, failed = torch.linalg.cholesky_ex(ridged)
    return torch.where(failed[..., None, None] == 0, torch.cholesky_solve(missing, factor), 0.0)


def _power(powers: Tensor) -> Tensor:
    """Return the mean input power of columns that are not dead, ``[..., 1]``."""
    alive = powers > _DEAD * powers.amax(-1, keepdim=True)
    count = alive.sum(-1, keepdim=True)
    mean = (powers * alive).sum(-1, keepdim=True) / count.clamp(min=1)
    return torch.where(count > 0, mean, 1.0)
