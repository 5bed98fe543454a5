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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from compressor.calibration.parts import Parts
from compressor.passes.quantize.static.judging import best, heavy_tails, remaining
from compressor.passes.quantize.static.replayed import FOLDS, Replay, Replayed
from compressor.passes.quantize.static.settings import Decision
from compressor.passes.quantize.static.simulation import Codes, Simulation, output_errors
from compressor.types.carrier import Carrier
from compressor.types.tensors import Array, Batch, samples_in


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
    carrier: Carrier, decision: Decision, statistics: Mapping[str, Any], replay: Replay | None
) -> ObserverChoice:
    """Return the best of those that a decision allows; the first where there is nothing to run.

    Args:
        carrier: the float model.
        decision: what is quantized in it.
        statistics: the ranges by every observer, by ``Request.key``.
        replay: runs calibration samples again.
    """
    names = decision.settings.activations.observers
    if len(names) == 1 or replay is None:
        return ObserverChoice()
    data = replay.of(carrier, decision, statistics)
    tried = dict[int, Codes]()
    for index in range(len(names)):
        codes = decision.codes({}, statistics, index, data.values)
        if codes not in tried.values():
            tried[index] = codes
    if len(tried) == 1:
        return ObserverChoice()
    rounds: list[_Round]
    if data.held_back:
        rounds = _held_back(data, _Ranges(decision, statistics, data.values))
    else:
        quarters = (data.judging[k::FOLDS] for k in range(FOLDS))
        rounds = [[_Part(1.0, q, lambda some: [tried[i] for i in some])] for q in quarters if q]
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

    def codes(
        self, parts: Parts, some: Sequence[int]
    ) -> Callable[[Sequence[int]], Sequence[Codes]]:
        """Return what returns the codes of observers by the ranges of some parts of the data."""

        @cache
        def code(observer: int) -> Codes:
            keys = {self.decision.range_requests(value)[observer].key for value in self.values}
            known = {**self.statistics, **parts.results(some, keys)}
            return self.decision.codes({}, known, observer, self.values)

        return lambda observers: [code(observer) for observer in observers]


def _held_back(data: Replayed, ranges: _Ranges) -> list[_Round]:
    """Return rounds in which samples are judged by the ranges of others."""
    folds = data.folds
    heavy = heavy_tails(folds.peaks)
    rounds: list[list[_Part]] = [[] for _ in range(FOLDS)]
    if heavy < 1.0:
        for k, step in enumerate(rounds):
            held = data.judged(data.kept[k::FOLDS])
            step.append(_Part(1.0 - heavy, held, ranges.codes(folds.parts, folds.without(k))))
    if heavy:
        ranks = folds.peaks.argsort(0, kind="stable").argsort(0).mean(1)
        order = ranks.argsort(kind="stable").tolist()
        lesser, half = order[: len(order) // 2], order[len(order) // 2 :]
        greater = data.judged([data.kept[i] for i in half])
        if folds.single:
            codes = ranges.codes(folds.parts, lesser)
        else:
            one = data.parts(1)
            for outputs in data.outputs([data.kept[i] for i in lesser]):
                one.add(0, outputs)
                del outputs
            codes = ranges.codes(one, [0])
        for k, step in enumerate(rounds):
            some = greater[k::FOLDS]
            data.remember(some)
            step.append(_Part(heavy, some, codes))
    data.close()
    return list(rounds)


def _contest(
    data: Replayed, simulation: Simulation, rounds: Sequence[_Round], observers: list[int]
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
