"""Scale the channels of a model so that its quantization is predicted to lose less."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import log10

import numpy as np
import torch
from torch import Tensor

from compressor.passes.prepare.maths.factors import find_factors, total_error
from compressor.passes.prepare.maths.parts import Columns, Part, Rows, Span
from compressor.passes.prepare.products import with_products
from compressor.passes.prepare.scales import ScaleGroup, ScaleMap
from compressor.types.carrier import Carrier
from compressor.types.channels import Units
from compressor.types.layers import Layer, Scheme
from compressor.types.statistics import ChannelSpans, Range, Request

_LEAST_GAIN = 0.5  # dB: what is predicted is not more exact
_WORTH_A_NODE = 2.0  # dB
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Rounding:
    """What will be quantized, and how finely.

    Attributes:
        values: of each value, the number of its steps, and whether its range is symmetric.
        weights: by layer name.
    """

    values: Mapping[str, tuple[int, bool]]
    weights: Mapping[str, Scheme]


@dataclass(frozen=True, eq=False)
class ScaledGroup:
    """A group of channels with the factors that it got."""

    group: ScaleGroup
    factors: Tensor  # what channels are divided by, `[count]`
    gain_db: float  # by how much the predicted error falls


@dataclass(frozen=True, eq=False)
class Balance:
    """Scaled channels of a model, with the predicted gains.

    Attributes:
        weights: the parameters that change, in stored shape and their own dtype.
        groups: the groups that are scaled.
        reach: how far values that change were seen to go, and how far they are expected to
            once scaled.
        refused: why nothing is scaled, although factors were found.
    """

    weights: Mapping[str, Tensor]
    groups: tuple[ScaledGroup, ...]
    reach: Mapping[str, tuple[Range, Range]]
    refused: str = ""

    @property
    def renamed(self) -> Mapping[str, str]:
        """The values that change, with what they were called before."""
        names = dict[str, str]()
        for group in (scaled.group for scaled in self.groups):
            names.update(zip(group.scaled_values, group.values, strict=True))
            names.update({value: value for value in group.others})
        return names

    def applied(self, carrier: Carrier) -> Carrier:
        """Return the model with its channels scaled."""
        after = carrier.with_weights(self.weights) if self.weights else carrier
        inserted = [
            (scaled.group, (1 / picked(scaled.factors, scaled.group.reads[0].index[0])).numpy())
            for scaled in self.groups
            if scaled.group.inserted
        ]
        if not inserted:
            return after
        return after.with_trainable_graph(with_products(after.graph(), inserted), ())

    @property
    def rescale(self) -> Callable[[Carrier], Carrier] | None:
        """What scales the channels of another model alike; it holds no weights."""
        return partial(_alike, self.groups) if self.groups else None

    @property
    def gains(self) -> Mapping[str, float]:
        """By how many dB the predicted error falls, by the layers that read the channels."""
        return {r.layer.name: s.gain_db for s in self.groups for r in s.group.reads}

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done, in one sentence; none where there was nothing to scale."""
        gains = [scaled.gain_db for scaled in self.groups]
        if self is NOTHING:
            return ()
        if self.refused:
            return (self.refused,)
        if not gains:
            return ("nothing was scaled: no factors lower the predicted error by half a decibel",)
        low, high = (f"{gain:.1f}" for gain in (min(gains), max(gains)))
        groups = "1 group" if len(gains) == 1 else f"{len(gains)} groups"
        return (
            f"channels of {groups} of layers were scaled, whose predicted error falls by "
            f"{low if low == high else f'{low} to {high}'} dB",
        )

    @cached_property
    def columns(self) -> Mapping[str, Tensor]:
        """What the columns of each layer are multiplied with, ``[groups, columns]``."""
        return {
            read.layer.name: picked(scaled.factors, read.index)
            for scaled in self.groups
            for read in scaled.group.reads
        }


def _alike(groups: tuple[ScaledGroup, ...], carrier: Carrier) -> Carrier:
    return Balance(scaled_weights(carrier, groups), groups, {}).applied(carrier)


NOTHING = Balance({}, (), {})
"""A model that stays as it is."""


def span_requests(scales: ScaleMap, rounding: Rounding) -> tuple[Request, ...]:
    """Ask for the extremes and the power of the channels that may be scaled."""
    requests = {}
    for group in scales.groups:
        for value in _looked_at(group, rounding):
            request = _request(value, group.values[value][0])
            requests[request.key] = request
    return tuple(requests.values())


def _looked_at(group: ScaleGroup, rounding: Rounding) -> list[str]:
    coded = any(r.layer.name in rounding.weights for r in group.reads)
    if not coded and not any(value in rounding.values for value in group.values):
        return []
    read = [r.value for r in group.reads]
    return list(dict.fromkeys([*read, *(v for v in group.values if v in rounding.values)]))


def _request(value: str, axis: int) -> Request:
    return Request(value, "channel-spans", {"axis": axis})


def balance(
    carrier: Carrier, scales: ScaleMap, rounding: Rounding, statistics: Mapping[str, object]
) -> Balance:
    """Scale each group of a model's channels if its predicted error falls.

    Args:
        carrier: the model; it is not modified.
        scales: its groups.
        rounding: what is going to be quantized.
        statistics: the answers to :func:`span_requests`.
    """
    spans = {}
    for group in scales.groups:
        for value in _looked_at(group, rounding):
            found = statistics.get(_request(value, group.values[value][0]).key)
            if isinstance(found, ChannelSpans):
                spans[value] = found
    if not spans:
        return NOTHING
    work = _Work(carrier, scales, rounding, spans)
    groups = tuple(work.scaled())
    reach = {
        after: (_ends(spans[value].seen), _ends(work.spans[value].reach))
        for scaled in groups
        for value, after in zip(scaled.group.values, scaled.group.scaled_values, strict=True)
        if value in spans
    }
    return Balance(work.parameters.changed, groups, reach)


def _ends(reach: Tensor) -> Range:
    low, high = reach.amax(1).clamp(min=0).tolist()
    return Range(-low, high)


def scaled_weights(carrier: Carrier, groups: Iterable[ScaledGroup]) -> Mapping[str, Tensor]:
    """Return the parameters that change where groups of a model's channels are scaled.

    They come in their stored shape and their own dtype.
    """
    parameters = _Parameters(carrier)
    for scaled in groups:
        parameters.scale(scaled.group, scaled.factors)
    return parameters.changed


def picked(factors: Tensor, index: Units) -> Tensor:
    """Return the factor of each number, 1 where it is -1."""
    return torch.cat([factors, torch.ones(1)])[torch.from_numpy(index)]


class _Parameters:
    """The parameters of a model as its channels are scaled."""

    def __init__(self, carrier: Carrier):
        self._stored = carrier.tensors()
        self.changed: dict[str, Tensor] = {}

    def matrix(self, layer: Layer) -> Tensor:
        """Return a layer's weight as it is now, float32 ``[groups, rows, channels, kernel]``."""
        matrix = layer.canonical(self._tensor(layer.weight)).to(torch.float32)
        groups = layer.groups if layer.is_convolution else 1
        kernel = int(np.prod(layer.shape[2:])) if layer.is_convolution else 1
        return matrix.reshape(groups, layer.rows // groups, -1, kernel)

    def scale(self, group: ScaleGroup, factors: Tensor) -> None:
        """Divide a group's channels by factors, and multiply by them what reads the channels."""
        for read in group.reads:
            rows = read.layer.rows // len(read.index)
            self._multiply(read.layer, picked(factors, read.index).repeat_interleave(rows, 0))
        for written in group.writes:
            self._multiply(written.layer, picked(factors, written.index).reciprocal()[:, None])
        for vector in group.vectors:
            before = self._tensor(vector.name)
            each = picked(factors, vector.index).to(torch.float64).reshape(before.shape)
            self.changed[vector.name] = (before.to(torch.float64) / each).to(before.dtype)

    def _multiply(self, layer: Layer, by: Tensor) -> None:
        before = self._tensor(layer.weight)
        matrix = layer.canonical(before).to(torch.float64) * by
        self.changed[layer.weight] = layer.stored(matrix).to(before.dtype)

    def _tensor(self, name: str) -> Tensor:
        return self.changed[name] if name in self.changed else self._stored[name].read()


class _Work:
    """The state of a model while its groups are scaled one after the other."""

    def __init__(
        self,
        carrier: Carrier,
        scales: ScaleMap,
        rounding: Rounding,
        spans: Mapping[str, ChannelSpans],
    ):
        self.parameters = _Parameters(carrier)
        self._scales, self._rounding = scales, rounding
        self.spans = dict(spans)
        self._layers = {step.layer.name: step for step in scales.steps if step.layer}
        self._gains: dict[str, Tensor] = {}
        # Read along another axis than that on which errors are followed, as parts of heads are.
        self._crossed = {
            read.value
            for group in scales.groups
            for read in group.reads
            if group.values[read.value][0] != scales.lines[read.value][0]
        }
        self._follow()

    def scaled(self) -> Iterator[ScaledGroup]:
        """Scale each group whose predicted error falls, and yield it."""
        for group in self._scales.groups:
            parts = list(self._parts(group))
            if not parts:
                continue
            before = total_error(list(self._parts(group, seen=True)), torch.ones(group.count))
            found = find_factors(parts, group.count, before)
            gain = 10 * log10(before / found.after) if before > 0 and found.after > 0 else 0.0
            if gain >= (_WORTH_A_NODE if group.inserted else _LEAST_GAIN):
                self._scale(group, found.factors)
                yield ScaledGroup(group, found.factors, gain)

    def _follow(self) -> None:
        """Find what a mean squared error in each channel adds to the layers at the ends.

        Errors are followed backwards through layers and what ties values. A layer behind which
        they are not followed counts by its output's power.
        """
        for step in reversed(self._scales.steps):
            behind = self._gains.get(step.output)
            for value in step.inputs:
                if step.layer is None:
                    if behind is not None:
                        self._add(value, self._moved(behind, step.output, value))
                elif value in self.spans and value not in self._crossed:
                    squares = self.parameters.matrix(step.layer).square().sum(3)
                    gain = self._row_gains(step.layer, squares)
                    self._add(value, (gain[:, :, None] * squares).sum(1).flatten())

    def _add(self, value: str, gain: Tensor) -> None:
        before = self._gains.get(value)
        self._gains[value] = gain if before is None else before + gain

    def _moved(self, gain: Tensor, output: str, value: str) -> Tensor:
        """Return for each channel of an input what holds for the same one in the output."""
        after, before = self._scales.lines[output][1], self._scales.lines[value][1]
        if np.array_equal(after, before):
            return gain
        total = torch.zeros(int(max(after.max(), before.max())) + 2)
        total.index_add_(0, torch.from_numpy(np.where(after < 0, len(total) - 1, after)), gain)
        total[-1] = 0.0  # what has no number
        return total[torch.from_numpy(before)]

    def _row_gains(self, layer: Layer, squares: Tensor) -> Tensor:
        """Return what an error in each row adds, ``[groups, rows]``."""
        step = self._layers[layer.name]
        behind = self._gains.get(step.output)
        if behind is not None and len(behind) == layer.rows:
            return behind.reshape(squares.shape[:2])
        power = self.spans[step.inputs[0]].power.reshape(squares.shape[0], 1, -1)
        mean = float((squares * power).sum(2).mean())
        # Of less than a normal number, the inverse is no float32: the layer gives nothing.
        return torch.full(squares.shape[:2], 1.0 / mean if mean >= _TINY else 0.0)

    # ------------------------------------------------------------------ one group

    def _parts(self, group: ScaleGroup, *, seen: bool = False) -> Iterator[Part]:
        """Yield what errs in a group, by how far values were seen to go or are expected to."""
        for value, (_, index) in group.values.items():
            if value in self._rounding.values and value in self.spans and value in self._gains:
                yield self._span(value, index, seen=seen)
        for read in group.reads:
            scheme = self._rounding.weights.get(read.layer.name)
            if scheme is not None and read.value in self.spans:
                yield self._columns(read.layer, read.index, self.spans[read.value], scheme)
        for written in group.writes:
            scheme = self._rounding.weights.get(written.layer.name)
            step = self._layers.get(written.layer.name)
            span = None if step is None else self.spans.get(step.inputs[0])
            gain = self._gains.get(written.value)
            if scheme is None or scheme.granularity != "tensor" or span is None or gain is None:
                continue
            weight = self.parameters.matrix(written.layer)
            power = span.power.reshape(len(weight), 1, -1).sum(2) * weight.shape[3]
            yield Rows(
                weight.abs().amax((2, 3)).flatten(),
                power.expand(weight.shape[:2]).flatten(),
                gain,
                torch.from_numpy(written.index),
                _steps(scheme),
            )

    def _span(self, value: str, index: Units, *, seen: bool) -> Span:
        known, (steps, symmetric) = self.spans[value], self._rounding.values[value]
        ends = known.seen if seen else known.reach
        return Span(ends, self._gains[value], torch.from_numpy(index), steps, symmetric)

    def _columns(self, layer: Layer, index: Units, span: ChannelSpans, scheme: Scheme) -> Columns:
        weight = self.parameters.matrix(layer)
        power = span.power.reshape(len(weight), -1) * weight.shape[3]
        return Columns(
            weight.abs().amax(3),
            power,
            self._row_gains(layer, weight.square().sum(3)),
            torch.from_numpy(np.ascontiguousarray(index[:, :: weight.shape[3]])),
            _steps(scheme),
            scheme.granularity == "tensor",
        )

    def _scale(self, group: ScaleGroup, factors: Tensor) -> None:
        """Change parameters, and what is known of values, as a group's factors ask for."""
        self.parameters.scale(group, factors)
        for value, (_, index) in group.values.items():
            each = picked(factors, index)
            if value in self._gains:
                self._gains[value] = self._gains[value] * each.square()
            if value in self.spans:
                self.spans[value] = self.spans[value].divided(each)


def _steps(scheme: Scheme) -> int:
    return scheme.high - scheme.low
