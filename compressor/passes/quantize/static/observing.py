"""Choose the observer with whose ranges a model's outputs err least on calibration samples.

Activations are rounded as they will be, and weights stay floats: their codes hardly depend on the
ranges. Scales and zero points are inputs of one session, so that an observer costs a run of some
samples.

No calibration sample exceeds the ranges much, since they are made of all of them. A later one may:
it has the greatest of ``N + 1`` values of an activation with probability ``1 / (N + 1)``, whatever
their distribution, since any of them is as likely to come last. If one of the activations is likely
to be exceeded, each quarter of the samples is judged by the ranges that the others have
(cross-validation).

That tells what later samples cost if they are like these. Where the greatest values of samples have
a heavy tail, it does not: what is clipped of later ones depends on a few that these may not hold.
With a tail index of 1/4 or more the squares of what exceeds a range have no variance, so no mean
over samples is to be relied on. As far as activations are such, the half of the samples with the
greatest values is judged by the ranges that the lesser half has. (Hill, A simple general approach
to inference about the tail of a distribution, 1975.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from compressor.calibration.parts import Parts
from compressor.graph.costs import batch_macs
from compressor.passes.quantize.static.judging import best, exceeding, heavy_tails, remaining
from compressor.passes.quantize.static.settings import Decision
from compressor.passes.quantize.static.simulation import Codes, Simulation, output_errors
from compressor.run.evaluate import CachingRunner
from compressor.types.carrier import Carrier, Runner
from compressor.types.data import Samples
from compressor.types.passes import PassContext
from compressor.types.tensors import (
    Array,
    Batch,
    Feed,
    cut,
    fixed_batch,
    picked,
    samples_in,
)

MOST_SAMPLES = 64
"""Calibration samples that are run with each observer, at most."""

_FEWEST = 16  # samples that are run at least, if there are so many
_FEWEST_JUDGED = 8  # of them, samples that each observer is judged by
_MOST_MACS = 16e9  # of more samples than these, in the float model
_MOST_BYTES = 64 << 20  # of these samples
_MOST_INNER = 128 << 20  # bytes of the inner values of samples in a run
_MOST_OUTPUTS = 16 << 20  # bytes of outputs that are kept until they are judged by
_TOGETHER = 8  # samples in a run
_FOLDS = 4
_FEWEST_HELD = 4  # of fewer, a single one could decide against what all samples say
_RARELY = 0.1  # how often a later sample may exceed a range before that counts


@dataclass(frozen=True)
class ObserverChoice:
    """The observer that was chosen.

    Attributes:
        observer: which of those that a decision allows.
        note: by how much it is better, on how many samples; empty where there was no choice.
    """

    observer: int = 0
    note: str = ""


class _Part(NamedTuple):
    """Samples of one kind that observers are judged on: any, or those with the greatest values.

    Attributes:
        share: how much the mean error of all samples of their kind counts.
        codes: returns the codes by some observers' ranges.
    """

    share: float
    samples: Sequence[Batch]
    codes: Callable[[Sequence[int]], Sequence[Codes]]


_Round: TypeAlias = Sequence[_Part]
"""A part of each kind: after each round, observers are dropped by what is known of all kinds."""


def choose_observer(
    carrier: Carrier, decision: Decision, statistics: Mapping[str, Any], context: PassContext
) -> ObserverChoice:
    """Return the best of those that a decision allows; the first where there is nothing to run.

    Args:
        carrier: the float model.
        decision: what is quantized in it.
        statistics: the ranges by every observer, by ``Request.key``.
        context: with the calibration data.
    """
    names, samples = decision.settings.activations.observers, context.samples
    if len(names) == 1 or samples is None or samples.made_up:
        return ObserverChoice()
    pixels = decision.pixel_inputs()
    exact = {pixel.value for pixel in pixels if statistics[pixel.request.key] is not None}
    values = [value for value in decision.placement.values if value not in exact]
    tried = dict[int, Codes]()
    for index in range(len(names)):
        codes = decision.codes({}, statistics, index, values)
        if codes not in tried.values():
            tried[index] = codes
    if len(tried) == 1:
        return ObserverChoice()
    ranges = _Ranges(decision, statistics, values)
    data = _Data(carrier, samples, values, decision)
    rounds: list[_Round]
    if exceeding(len(values), data.seen) <= _RARELY or len(data.kept) < _FOLDS * _FEWEST_HELD:
        quarters = (data.judging[k::_FOLDS] for k in range(_FOLDS))
        rounds = [[_Part(1.0, q, lambda some: [tried[i] for i in some])] for q in quarters if q]
    else:
        rounds = _held_back(data, ranges)
    index, gain = _contest(data, Simulation(decision.model, tried[0]), rounds, list(tried))
    result = f"is {gain:.1f} dB less than with {names[0]}" if index else "is not less with another"
    count = len(data.judging) * (samples_in(data.kept[0]) if data.whole else 1)
    on = f"{count} calibration sample{'s' if count > 1 else ''}"
    return ObserverChoice(index, f"observer {names[index]}: on {on}, the outputs' error {result}")


@dataclass(frozen=True)
class _Ranges:
    """What some values are rounded by if ranges come from other data than all.

    Attributes:
        statistics: of all data, which count where the others say nothing.
    """

    decision: Decision
    statistics: Mapping[str, Any]
    values: Sequence[str]

    def parts(self, count: int) -> Parts:
        """Return what observes some parts of the data."""
        requests = [r for value in self.values for r in self.decision.range_requests(value)]
        return Parts(requests, count)

    def codes(
        self, parts: Parts, some: Sequence[int]
    ) -> Callable[[Sequence[int]], Sequence[Codes]]:
        """Return what returns the codes of observers by the ranges of some parts of the data."""
        names = self.decision.settings.activations.observers

        @cache
        def code(observer: int) -> Codes:
            known = {**self.statistics, **parts.results(some, [names[observer]])}
            return self.decision.codes({}, known, observer, self.values)

        return lambda observers: [code(observer) for observer in observers]


def _held_back(data: _Data, ranges: _Ranges) -> list[_Round]:
    """Return rounds in which samples are judged by the ranges of others."""
    parts = ranges.parts(_FOLDS)
    peaks = np.zeros((len(data.kept), len(ranges.values)))
    for k in range(_FOLDS):
        rows = list[Array]()
        for outputs in data.outputs(data.kept[k::_FOLDS]):
            parts.add(k, outputs)
            rows.append(data.peaks(outputs))
            del outputs  # before the next run needs the memory
        peaks[k::_FOLDS] = np.concatenate(rows)
    heavy = heavy_tails(peaks)
    rounds: list[list[_Part]] = [[] for _ in range(_FOLDS)]
    if heavy < 1.0:
        for k, step in enumerate(rounds):
            others = [other for other in range(_FOLDS) if other != k]
            held = data.judged(data.kept[k::_FOLDS])
            step.append(_Part(1.0 - heavy, held, ranges.codes(parts, others)))
    if heavy:
        order = peaks.argsort(0, kind="stable").argsort(0).mean(1).argsort(kind="stable").tolist()
        ordered = [data.kept[i] for i in order]
        lesser, greater = ordered[: len(order) // 2], data.judged(ordered[len(order) // 2 :])
        one = ranges.parts(1)
        for outputs in data.outputs(lesser):
            one.add(0, outputs)
            del outputs
        codes = ranges.codes(one, [0])
        for k, step in enumerate(rounds):
            some = greater[k::_FOLDS]
            data.remember(some)
            step.append(_Part(heavy, some, codes))
    data.close()
    return list(rounds)


def _contest(
    data: _Data, simulation: Simulation, rounds: Sequence[_Round], observers: list[int]
) -> tuple[int, float]:
    """Return the best observer, and by how many dB its error is less than the first's.

    After each round, those that are clearly worse than the best of the others are dropped.
    """
    shares = [part.share for part in rounds[0]]
    errors, signals = [list[Array]() for _ in shares], [list[Array]() for _ in shares]
    for step in rounds:
        for kind, part in enumerate(step):
            batches = data.together(part.samples)
            error, signal = output_errors(data.judge, simulation, part.codes(observers), batches)
            errors[kind].append(error)
            signals[kind].append(signal)
        counts = [share / sum(map(len, each)) for share, each in zip(shares, signals, strict=True)]
        total = sum(x * np.concatenate(s).sum(0) for x, s in zip(counts, signals, strict=True))
        each = [x * np.concatenate(e, 1) for x, e in zip(counts, errors, strict=True)]
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.concatenate(each, 1) / total
        left = remaining(relative)
        if step is not rounds[-1]:
            errors = [[error[left] for error in kind] for kind in errors]
            observers = [observers[i] for i in left]
        if len(observers) == 1:
            return observers[0], 0.0
    place, gain = best(relative)
    return observers[place], gain


class _Data:
    """Calibration samples that judge.

    Args:
        carrier: the float model.
        values: names of its values that are rounded.
        decision: says behind which others, that may stay floats, some of these matter.
    """

    def __init__(self, carrier: Carrier, samples: Samples, values: list[str], decision: Decision):
        self._carrier, self._values = carrier, values
        self._watched = dict.fromkeys((*values, *decision.placement.gates.values()))
        self.whole = fixed_batch(carrier.inputs) is not None
        self._inputs = carrier.inputs
        batches = (picked(b, [spec.name for spec in carrier.inputs]) for b in samples.batches())
        self.kept, places = spread(batches, whole=self.whole)
        self.seen = places * samples_in(self.kept[0]) if self.whole else places
        work = batch_macs(carrier, self.kept[0])
        while len(self.kept) >= 2 * _FEWEST and len(self.kept) * work > _MOST_MACS:
            self.kept = self.kept[::2]
        enough = len(self.kept) >= 2 * _FEWEST_JUDGED
        self._dear = enough and len(self.kept) * work > _MOST_MACS
        # One by one, what the float model gives for them is known however rounds put them together.
        self._together = 1 if self._dear else _TOGETHER
        self._taps = list[str]()

    @cached_property
    def runner(self) -> Runner:
        """The float model, with the values that are rounded once those were asked for."""
        return self._carrier.runner(self._taps)

    def judged(self, samples: Sequence[Batch]) -> Sequence[Batch]:
        """Return those of some samples that observers are judged by: half of what takes long."""
        return samples[::2] if self._dear else samples

    @property
    def judging(self) -> Sequence[Batch]:
        """All samples that observers are judged by."""
        return self.judged(self.kept)

    @cached_property
    def judge(self) -> CachingRunner:
        """The float model; outputs that :meth:`outputs` has seen are not computed again."""
        return CachingRunner(lambda: self.runner, _MOST_OUTPUTS)

    def close(self) -> None:
        """Give the float model's memory back until it is needed again."""
        self.judge.close()
        self.__dict__.pop("runner", None)

    def outputs(self, samples: Sequence[Batch]) -> Iterator[Batch]:
        """Run samples; yield their inputs, outputs, and the values that are rounded."""
        if not self._taps:
            inputs = {spec.name for spec in self._inputs}
            self._taps = [value for value in self._watched if value not in inputs]
            size = sum(array.nbytes for array in self.runner.run(self.kept[0]).values())
            self._together = max(1, min(self._together, _MOST_INNER // max(size, 1)))
        ends = [output.name or "" for output in self._carrier.graph().graph.outputs]
        for batch in self.together(samples):
            found = type(batch)({**batch, **self.runner.run(batch)})
            self.judge.remember(batch, {name: found[name] for name in ends})
            yield found
            del found  # before the next run needs the memory

    def remember(self, samples: Sequence[Batch]) -> None:
        """Run samples that were run before, but in other company, while the model is open."""
        if self._together > 1:
            for outputs in self.outputs(samples):
                del outputs

    def peaks(self, outputs: Batch) -> Array:
        """Return the greatest absolute values ``[samples, values]``."""
        rows = 1 if self.whole else samples_in(outputs)

        def greatest(array: Array) -> Array:
            sizes = np.abs(array)
            if array.ndim and array.size % rows == 0:
                return np.asarray(sizes.reshape(rows, -1).max(1, initial=0.0))
            return np.full(rows, sizes.max(initial=0.0))

        return np.stack([greatest(outputs[value]) for value in self._values], 1)

    def together(self, samples: Sequence[Batch]) -> Iterator[Batch]:
        """Yield samples, neighbours of the same shapes as one batch."""

        def shapes(sample: Batch) -> list[tuple[int, ...]]:
            return [array.shape for array in sample.values()]

        for _, alike in groupby(samples, shapes):
            group = list(alike)
            if self.whole or isinstance(group[0], Feed):
                yield from group
                continue
            for start in range(0, len(group), self._together):
                some = group[start : start + self._together]
                yield {name: np.concatenate([s[name] for s in some]) for name in some[0]}


def spread(batches: Iterable[Batch], *, whole: bool) -> tuple[list[Batch], int]:
    """Return up to 64 single samples, in the same distance from each other over all of the data.

    Returns:
        The samples, and how many there are in all.

    Args:
        whole: batches cannot be cut: each counts as a sample.
    """
    kept: list[Batch] = []
    step, seen = 1, 0
    for batch in batches:
        for row in range(1 if whole else samples_in(batch)):
            if seen % step == 0:
                sample = batch if whole else cut(batch, row, row + 1)
                kept.append(type(batch)((name, array.copy()) for name, array in sample.items()))
                size = sum(array.nbytes for held in kept for array in held.values())
                if len(kept) > MOST_SAMPLES or (len(kept) > 1 and size > _MOST_BYTES):
                    kept, step = kept[::2], 2 * step
            seen += 1
    return kept, seen
