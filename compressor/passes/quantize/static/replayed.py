"""Calibration samples that a model is run for again, once its first statistics are known.

Where channels were scaled, their ranges are found on them; and they judge observers. One run of the
scaled model serves both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from compressor.calibration.collect import collect_statistics
from compressor.calibration.histogram import SIDE
from compressor.calibration.parts import Parts
from compressor.graph.costs import batch_macs
from compressor.passes.quantize.static.judging import exceeding
from compressor.passes.quantize.static.settings import Decision
from compressor.run.evaluate import CachingRunner
from compressor.types.carrier import Carrier, Runner
from compressor.types.data import Samples
from compressor.types.statistics import Request
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
"""Calibration samples that are run again, at most."""

FOLDS = 4
"""Parts of the samples, each judged by the ranges that the others have."""

_FEWEST = 16  # samples that are run at least, if there are so many
_FEWEST_JUDGED = 8  # of them, samples that each observer is judged by
_MOST_MACS = 16e9  # of more samples than these, in the float model
_MOST_BYTES = 64 << 20  # of these samples
_MOST_INNER = 128 << 20  # bytes of the inner values of samples in a run, or of their histograms
_HISTOGRAM = 2 * SIDE * 8  # bytes
_MOST_OUTPUTS = 16 << 20  # bytes of outputs that are kept until they are judged by
_TOGETHER = 8  # samples in a run
_FEWEST_HELD = 4  # of fewer, a single one could decide against what all samples say
_RARELY = 0.1  # how often a later sample may exceed a range before that counts


class Replay:
    """Runs some of the calibration samples again, which are read once.

    Args:
        samples: the calibration data.
    """

    def __init__(self, samples: Samples):
        self.samples = samples
        self._kept: tuple[list[Batch], int] | None = None
        self._replayed: tuple[Carrier, Replayed] | None = None

    def of(self, carrier: Carrier, decision: Decision, statistics: Mapping[str, Any]) -> Replayed:
        """Return the samples as a model sees them.

        Args:
            carrier: the float model.
            decision: what is quantized in it.
            statistics: what is known of it, or was known before channels were scaled.
        """
        if self._kept is None:
            names = [spec.name for spec in carrier.inputs]
            batches = (picked(batch, names) for batch in self.samples.batches())
            self._kept = spread(batches, whole=fixed_batch(carrier.inputs) is not None)
        if self._replayed is None or self._replayed[0] is not carrier:
            self._replayed = carrier, Replayed(carrier, *self._kept, decision, statistics)
        return self._replayed[1]

    def collect(self, carrier: Carrier, requests: Sequence[Request]) -> dict[str, Any]:
        """Gather statistics over all calibration data."""
        return collect_statistics(carrier, self.samples.batches(), requests)


@dataclass(frozen=True, eq=False)
class Folds:
    """What the float model yields for the parts of the samples.

    Attributes:
        parts: the ranges of each part, or of each sample.
        peaks: the greatest absolute values, ``[samples, values]``.
        single: ``parts`` are of single samples.
    """

    parts: Parts
    peaks: Array
    single: bool

    def without(self, fold: int) -> list[int]:
        """Return which of ``parts`` are of the other folds; all for ``FOLDS``."""
        count = len(self.peaks) if self.single else FOLDS
        return [index for index in range(count) if index % FOLDS != fold]


class Replayed:
    """Samples that a float model is run for.

    Args:
        kept: single samples, spread over the data.
        places: how many there are in all.
        decision: says which values are rounded, and behind which others, that may stay floats, some
            of these matter.
        statistics: say which values are pixels, and so exact.
    """

    def __init__(
        self,
        carrier: Carrier,
        kept: Sequence[Batch],
        places: int,
        decision: Decision,
        statistics: Mapping[str, Any],
    ):
        self._carrier, self._decision = carrier, decision
        pixels = decision.pixel_inputs()
        exact = {pixel.value for pixel in pixels if statistics.get(pixel.request.key) is not None}
        self.values = [value for value in decision.placement.values if value not in exact]
        self._watched = dict.fromkeys((*self.values, *decision.placement.gates.values()))
        self.whole = fixed_batch(carrier.inputs) is not None
        self._inputs = carrier.inputs
        self.kept = kept
        self._seen = places * samples_in(kept[0]) if self.whole else places
        work = batch_macs(carrier, kept[0])
        while len(self.kept) >= 2 * _FEWEST and len(self.kept) * work > _MOST_MACS:
            self.kept = self.kept[::2]
        enough = len(self.kept) >= 2 * _FEWEST_JUDGED
        self._dear = enough and len(self.kept) * work > _MOST_MACS
        # One by one, what the float model gives for them is known however rounds put them together.
        self._together = 1 if self._dear else _TOGETHER
        self._taps = list[str]()

    @property
    def held_back(self) -> bool:
        """Whether samples are judged by the ranges of others.

        They are if several observers compete and a later sample is likely to exceed some range.
        """
        several = len(self._decision.settings.activations.observers) > 1
        likely = exceeding(len(self.values), self._seen) > _RARELY
        return several and likely and len(self.kept) >= FOLDS * _FEWEST_HELD

    def ranges(self, keys: Collection[str]) -> dict[str, Any]:
        """Return ranges of values by ``Request.key``, but where no sample has any."""
        found = self.folds.parts.results(self.folds.without(FOLDS), keys)
        if not self.held_back:
            self.close()
        return found

    def parts(self, count: int) -> Parts:
        """Return what observes some parts of the data."""
        requests = [r for value in self.values for r in self._decision.range_requests(value)]
        return Parts(requests, count)

    @cached_property
    def folds(self) -> Folds:
        """What the float model yields for each part of the samples."""
        samples, values = len(self.kept), len(self.values)
        # What takes long is not run again for ranges of other samples together.
        single = self._together == 1 and samples * values * _HISTOGRAM <= _MOST_INNER
        parts = self.parts(samples if single else FOLDS)
        peaks = np.zeros((samples, values))
        for k in range(min(FOLDS, samples)):
            rows = list[Array]()
            for outputs in self.outputs(self.kept[k::FOLDS]):
                parts.add(k + FOLDS * len(rows) if single else k, outputs)
                rows.append(self._peaks(outputs))
                del outputs  # before the next run needs the memory
            peaks[k::FOLDS] = np.concatenate(rows)
        return Folds(parts, peaks, single)

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
            if self._together > 1:
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

    def _peaks(self, outputs: Batch) -> Array:
        """Return the greatest absolute values ``[samples, values]``."""
        rows = 1 if self.whole else samples_in(outputs)

        def greatest(array: Array) -> Array:
            sizes = np.abs(array)
            if array.ndim and array.size % rows == 0:
                return np.asarray(sizes.reshape(rows, -1).max(1, initial=0.0))
            return np.full(rows, sizes.max(initial=0.0))

        return np.stack([greatest(outputs[value]) for value in self.values], 1)

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
