"""Latency, measured side by side so that ratios hold on a busy machine.

Models run in turn in blocks. Where a model computes on the calling thread alone, a block counts by
its time on the processor, which other processes do not lengthen but for the caches that they leave
cold. Each slice of the scheduler ends with that, so blocks are longer than slices: both models then
lose the same share. The best or the median of short runs would not do: a model of runs half as long
has more of them between two interruptions.
"""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from compressor.types.tensors import Array, Batch, cut, samples_in

if TYPE_CHECKING:  # devices, to which this file is sent, have no PyTorch
    from compressor.types.carrier import Runner

_ALL, _DRAWN = 10, 2000  # groups up to which every choice of signs is tried; choices otherwise


def median_interval(groups: Sequence[Array], level: float) -> tuple[float, float]:
    """Return bounds of the median of all values, given arrays ``[values]``, none empty.

    Args:
        level: the least probability that the bounds hold the median. With too few groups to reach
            it (six reach 0.969), the bounds are the smallest and the largest value.
    """
    ordered = [np.sort(group) for group in groups]
    pooled = np.sort(np.concatenate(ordered))
    turned = _turned(len(groups))

    def kept(index: int) -> bool:
        sums = np.array([_signs(group, pooled[index]) for group in ordered])
        as_far = np.abs(turned @ sums) >= abs(sums.sum())
        return bool(np.count_nonzero(as_far) / len(turned) > 1 - level)

    last, middle = (pooled.size - 1) // 2, pooled.size // 2
    low = bisect_left(range(last), True, key=kept)
    high = bisect_left(range(middle + 1, pooled.size), True, key=lambda i: not kept(i)) + middle
    return float(pooled[low]), float(pooled[high])


def _signs(ordered: Array, bound: float) -> int:
    """Return the number of values above the bound minus the number below it."""
    # For a few values, numpy's functions of the same names take several times as long.
    return int(ordered.size - ordered.searchsorted(bound, "right") - ordered.searchsorted(bound))


@cache
def _turned(count: int) -> Array:
    """Return choices of signs, ``[choices, count]``, the one without a change among them."""
    if count <= _ALL:
        bits = np.arange(2**count)[:, None] >> np.arange(count) & 1
    else:
        bits = np.random.default_rng(0).integers(0, 2, (_DRAWN, count))
        bits[0] = 0
    return 1.0 - 2 * bits  # not integers, which BLAS does not multiply


Opener: TypeAlias = "Callable[[], Runner]"
Runners: TypeAlias = "Mapping[str, Runner]"
Clock = Literal["cpu", "wall"]

_BUDGET = 5.0  # seconds
PRECISION = 0.05
# Stopping at the first interval that is narrow enough favours those that are narrow by chance.
# Intervals computed for two percent more keep their level.
_LEVEL = 0.97
_LEAST_OPENINGS = 7  # fewer cannot reach that level
_MOST_OPENINGS = 40
_LEAST_CYCLES = 2
_LONG = 0.1  # seconds of a cycle whose blocks are so long that an opening needs no second one
_BLOCK = 0.005  # seconds: several slices of the scheduler
_MOST_RUNS = 200
_UNEQUAL = 4  # times the fastest model's run, from which on blocks have fewer runs
_RESOLUTION = 1e-6  # seconds that a clock tells apart
_PATIENCE = 4  # shares of wall time that an opening may be timed for
_MOST_SECONDS = 3.0  # that the least timing of a larger batch may take
_WARM_UP, _WINDOW, _STEADY = 0.05, 3, 0.05
_ALONE = 0.8  # least share of the process's time on the processor of a thread that computes alone
_CPU, _WALL = 0, 1


@dataclass(frozen=True)
class Latencies:
    """Times of interleaved blocks.

    Attributes:
        seconds: for each name and each opening, ``[2, cycles, inputs, runs]``: the calling
            thread's time on the processor and the wall time. A cycle has a block of runs for each
            input; cycles pair across names.
        clock: of the ratios: ``cpu`` if each model computes on the calling thread alone.
        load: processes that wanted to run, on average over the last minute.
    """

    batch: int
    seconds: Mapping[str, list[Array]]
    clock: Clock = "wall"
    load: float | None = None

    @property
    def inputs(self) -> int:
        """The number of inputs that the models were run on in turn."""
        return int(next(iter(self.seconds.values()))[0].shape[2])

    def summary(self, name: str) -> dict[str, Any]:
        """Return a model's times, in milliseconds for one run of the batch, over all inputs.

        ``mean`` is the typical wall time: the mean over inputs of each input's median; ``ci95`` is
        its 95 % interval. ``best`` is the mean of the best block, ``cpu_ms`` that of the typical
        block's time on the processor. ``waiting`` is the share of the wall time that was not spent
        on the processor, and ``drift`` is how much slower the second half of the blocks was than
        the first, as a share.
        """
        wall = [_per_input(times[_WALL]) * 1e3 for times in self.seconds[name]]
        p50, p90, p99 = np.percentile(np.concatenate(wall), [50, 90, 99])
        mean = float(np.median(np.concatenate(wall), axis=0).mean())
        low, high = median_interval([times.mean(1) for times in wall], _LEVEL)
        blocks = np.concatenate(self._blocks(name)) / self.inputs
        half = len(blocks) // 2
        totals = np.sum([times.sum((1, 2, 3)) for times in self.seconds[name]], axis=0)
        best = min(times[_WALL].mean((1, 2)).min() for times in self.seconds[name])
        single = self.clock == "cpu"
        return {
            "batch": self.batch,
            "inputs": self.inputs,
            "p50": float(p50),
            "p90": float(p90),
            "p99": float(p99),
            "mean": mean,
            # With several inputs, the mean of medians is not quite the median of means.
            "ci95": [min(low, mean), max(high, mean)],
            "best": float(best) * 1e3,
            "cpu_ms": float(np.median(blocks)) * 1e3 if single else None,
            "waiting": max(0.0, float(1 - totals[_CPU] / totals[_WALL])) if single else None,
            "drift": float(np.median(blocks[half:]) / np.median(blocks[:half]) - 1),
            "load": self.load,
            "rounds": int(sum(times.size for times in wall)),
            "openings": len(wall),
        }

    def ratio(self, name: str, base: str) -> dict[str, Any]:
        """Return a model's time over another's, with its 95 % interval.

        Times are compared cycle by cycle, and the result is the median of the ratios. A cycle's
        time is the sum over inputs of each block's mean; of the wall time, each block's median.
        """
        pairs = zip(self._blocks(name), self._blocks(base), strict=True)
        logs = [np.log(times / other) for times, other in pairs]
        low, high = median_interval(logs, _LEVEL)
        value = float(np.exp(np.median(np.concatenate(logs))))
        return {
            "value": value,
            "ci95": [float(np.exp(low)), float(np.exp(high))],
            "clock": self.clock,
        }

    def precise(self, precision: float) -> bool:
        """Whether all ratios to the first model are known to this precision.

        Args:
            precision: half the interval's width as a share of the ratio, or of the time of a
                model that was timed alone.
        """
        base, *others = self.seconds
        found = [self.ratio(name, base) for name in others] or [self.summary(base)]
        known = [(*f["ci95"], f.get("value", f.get("mean"))) for f in found]
        return all(high - low <= 2 * precision * value for low, high, value in known)

    def _blocks(self, name: str) -> list[Array]:
        """Return ``[cycles]`` for each opening: the time of each cycle for one run per input."""
        if self.clock == "cpu":
            return [times[_CPU].mean(2).sum(1) for times in self.seconds[name]]
        return [np.median(times[_WALL], axis=2).sum(1) for times in self.seconds[name]]


def _per_input(times: Array) -> Array:
    """Return ``[cycles * runs, inputs]`` of ``[cycles, inputs, runs]``."""
    return times.transpose(0, 2, 1).reshape(-1, times.shape[1])


def already_open(runners: Runners) -> dict[str, Opener]:
    """Return openers of open models, which are not opened again."""
    return {name: repeat(runner).__next__ for name, runner in runners.items()}


def measure(
    models: Mapping[str, Opener],
    inputs: Sequence[Batch],
    budget: float | None = None,
    precision: float = PRECISION,
    clock: Clock = "cpu",
) -> Latencies:
    """Time several models in turn on the same inputs.

    Args:
        models: openers by name; the first model is the base of the ratios.
        inputs: batches of one size, which cycles use in turn: several if a model's time depends
            on their content. If the budget is too small for all, the first ones.
        budget: seconds for everything, 5 if not given; each model is opened and timed at least
            seven times, however long that takes.
        precision: stop as soon as all ratios are this precise; see :meth:`Latencies.precise`.
        clock: ``wall`` if something other than the processor computes. ``cpu`` becomes ``wall``
            too where other threads than the calling one turn out to compute.

    Raises:
        CompressorError: a model cannot be opened or run.
    """
    return measure_sizes(models, [inputs], budget, precision, clock)[0]


def measure_sizes(
    models: Mapping[str, Opener],
    sizes: Sequence[Sequence[Batch]],
    budget: float | None = None,
    precision: float = PRECISION,
    clock: Clock = "cpu",
    smallest_only: Collection[str] = (),
) -> list[Latencies]:
    """Time several models in turn on batches of several sizes; each opening serves all sizes.

    Args:
        models: as for :func:`measure`, like the other arguments.
        sizes: inputs of each size, the smallest first. Batches after the first are halved until
            the least timing takes three seconds, or left out where that makes them too small.
        budget: seconds for each size.
        smallest_only: models that are timed on the first size alone.
    """
    budget = _BUDGET if budget is None else budget
    rng = np.random.default_rng(0)
    openings, orders = _orders(models, rng), _orders(models, rng)
    others = [name for name in models if name not in smallest_only]
    measured = [_Size(others if i else models, inputs, clock) for i, inputs in enumerate(sizes)]
    left = list(measured)
    for count in range(1, _MOST_OPENINGS + 1):
        start = time.perf_counter()
        needed = set().union(*(size.latencies.seconds for size in left))
        runners = {name: models[name]() for name in next(openings) if name in needed}
        opening = time.perf_counter() - start
        for before, size in zip([None, *left], tuple(left), strict=False):
            if count > 1 or before is None or size.fits(runners, before):
                size.spent += opening
                size.time(runners, orders, budget, settle=before is None)
            else:
                measured.remove(size)
        # All are closed before one is opened again, or each would get its own memory back.
        runners.clear()
        left = [s for s in measured if s in left and not s.done(count, budget, precision)]
        if not left:
            break
    return [replace(size.latencies, load=os.getloadavg()[0]) for size in measured]


class _Size:
    """Batches of one size; how long models take for one, and what timing them has taken."""

    def __init__(self, names: Iterable[str], inputs: Sequence[Batch], clock: Clock):
        self.latencies = Latencies(samples_in(inputs[0]), {name: [] for name in names}, clock)
        self._once, self._inputs, self._clock = dict[str, float](), inputs, clock
        self.spent = self._here = self._everywhere = 0.0

    def fits(self, runners: Runners, before: _Size) -> bool:
        """Halve batches that take too long; return whether more samples are left than before."""
        least, count = before.latencies.batch, self.latencies.batch
        fewer = _least_seconds(sum(before._once[name] for name in self.latencies.seconds))
        # Samples take less time in batches, but hardly a quarter; memory is not asked for in vain.
        seconds = fewer * count / least / 4
        while fewer <= _MOST_SECONDS:
            count >>= max(0, math.ceil(math.log2(seconds / _MOST_SECONDS)))
            if count <= least:
                break
            self._inputs = [cut(batch, 0, count) for batch in self._inputs]
            seconds = _least_seconds(sum(self._warm_up(runners, settle=False).values()))
            if seconds <= _MOST_SECONDS:
                self.latencies = replace(self.latencies, batch=count)
                return True
        return False

    def time(
        self, runners: Runners, orders: Iterator[list[str]], budget: float, *, settle: bool
    ) -> None:
        """Warm up and time open models; those that ran on smaller batches need not settle."""
        start, now = time.perf_counter(), self._warm_up(runners, settle=settle)
        # The least of all openings: one that was disturbed would leave blocks too short for good.
        self._once = {n: min(seconds, self._once.get(n, seconds)) for n, seconds in now.items()}
        self._inputs, runs = _affordable(self._once, self._inputs, budget)
        here, everywhere = time.thread_time(), time.process_time()
        opened = _timed(runners, self._inputs, orders, runs, budget / _MOST_OPENINGS)
        self._here += time.thread_time() - here
        self._everywhere += time.process_time() - everywhere
        for name, times in opened.items():
            self.latencies.seconds[name].append(times)
        if self._here < _ALONE * self._everywhere or not self._here:
            self.latencies = replace(self.latencies, clock="wall")
        self.spent += time.perf_counter() - start

    def _warm_up(self, runners: Runners, *, settle: bool) -> dict[str, float]:
        clock, first = _CPU if self._clock == "cpu" else _WALL, self._inputs[0]
        own = {n: runner for n, runner in runners.items() if n in self.latencies.seconds}
        return {n: _warm_up(runner, first, clock, settle=settle) for n, runner in own.items()}

    def done(self, openings: int, budget: float, precision: float) -> bool:
        """Whether ratios are as precise as asked after so many openings, or time is up."""
        enough = openings >= _LEAST_OPENINGS
        return enough and (self.spent > budget or self.latencies.precise(precision))


def _timed(
    runners: Runners,
    inputs: Sequence[Batch],
    orders: Iterator[list[str]],
    runs: Mapping[str, int],
    share: float,
) -> dict[str, Array]:
    """Time open models for ``share`` seconds; return ``[2, cycles, inputs, runs]`` of each."""
    for batch in inputs[1:]:
        for name in runs:
            runners[name].run(batch)
    cycles: dict[str, list[list[Array]]] = {name: [] for name in runs}
    start, busy, done, enough = time.perf_counter(), time.process_time(), 0, False
    # A part of an opening's share: opening and warming up take theirs. Where others use the
    # processor, it is a share of the processor's time, so that as much is measured, up to a limit.
    while not enough:
        for name in filter(runs.__contains__, next(orders)):
            cycles[name].append([_block(runners[name], batch, runs[name]) for batch in inputs])
        done += 1
        used, waited = time.process_time() - busy, time.perf_counter() - start
        over = used >= share / 4 or waited >= _PATIENCE * share
        enough = over if done >= _LEAST_CYCLES else used >= max(_LONG, share / 4)
    return {name: np.asarray(blocks).transpose(3, 0, 1, 2) for name, blocks in cycles.items()}


def _block(runner: Runner, batch: Batch, runs: int) -> Array:
    """Return ``[runs, 2]``: time on the processor and wall time of each run."""
    marks = [(time.thread_time(), time.perf_counter())]
    for _ in range(runs):
        runner.run(batch)
        marks.append((time.thread_time(), time.perf_counter()))
    return np.diff(marks, axis=0)


def _warm_up(runner: Runner, batch: Batch, clock: int, *, settle: bool) -> float:
    """Run until times settle or some time is up, or twice; return the last times' least."""
    start, busy = time.perf_counter(), time.process_time()

    def best(runs: int) -> float:
        return float(_block(runner, batch, runs)[:, clock].min())

    def early() -> bool:  # a fast model may wait for the processor for long
        waited, used = time.perf_counter() - start, time.process_time() - busy
        return (max(used, waited / _PATIENCE) if clock == _CPU else waited) <= _WARM_UP

    now = best(1)  # of slow models, a single run
    if early():  # memory for a batch is whole after two runs
        now = min(now, best(_WINDOW - 1 if settle else 1))
    while settle and early():
        before, now = now, best(_WINDOW)
        if abs(now - before) <= _STEADY * before:
            break
    return now


def _affordable(
    seconds: Mapping[str, float], inputs: Sequence[Batch], budget: float
) -> tuple[Sequence[Batch], dict[str, int]]:
    """Return the inputs that a budget allows and the runs of a block: of very slow models fewer."""
    least = _least_seconds(sum(seconds.values()))
    inputs = inputs[: max(1, int(budget / 2 / least))]  # others may have half of the processor
    each = {name: max(once * len(inputs), _RESOLUTION) for name, once in seconds.items()}
    least = min(each.values())
    most = min(int(_BLOCK / least) + 1, _MOST_RUNS)
    return inputs, {n: math.ceil(most / max(1, t / least / _UNEQUAL)) for n, t in each.items()}


def _least_seconds(once: float) -> float:
    """Return about the least that timing models takes, if an input takes so long for all."""
    return _LEAST_OPENINGS * (_LEAST_CYCLES + 1) * max(once, _RESOLUTION)


def _orders(names: Iterable[str], rng: np.random.Generator) -> Iterator[list[str]]:
    """Yield random orders, each followed by its reverse, so that positions are balanced."""
    ordered = list(names)
    while True:
        order = [ordered[i] for i in rng.permutation(len(ordered))]
        yield from (order, order[::-1])
