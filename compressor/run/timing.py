"""Latency, measured side by side so that ratios hold on a noisy machine."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from compressor.types.carrier import Runner
from compressor.types.tensors import Array, Batch

_ALL = 10  # groups up to which every choice of signs is tried
_DRAWN = 2000


def median_interval(groups: Sequence[Array], level: float) -> tuple[float, float]:
    """Return bounds of the median of all values.

    Args:
        groups: one array each, ``[values]``, none empty.
        level: the least probability that the bounds hold the median. With too few groups to reach
            it (six reach 0.969), the bounds are the smallest and the largest value.
    """
    ordered = [np.sort(group) for group in groups]
    pooled = np.sort(np.concatenate(ordered))
    turned = _turned(len(groups))

    def kept(index: int) -> bool:
        sums = np.array([_signs(group, pooled[index]) for group in ordered])
        as_far = np.abs(turned @ sums) >= abs(sums.sum())
        return bool(as_far.mean() > 1 - level)

    last, middle = (pooled.size - 1) // 2, pooled.size // 2
    low = bisect_left(range(last), True, key=kept)
    high = bisect_left(range(middle + 1, pooled.size), True, key=lambda i: not kept(i)) + middle
    return float(pooled[low]), float(pooled[high])


def _signs(ordered: Array, bound: float) -> int:
    """Return the number of values above the bound minus the number below it."""
    below, not_above = np.searchsorted(ordered, bound), np.searchsorted(ordered, bound, "right")
    return int(ordered.size - not_above - below)


@cache
def _turned(count: int) -> Array:
    """Return choices of signs, ``[choices, count]``, the one without a change among them."""
    if count <= _ALL:
        bits = np.arange(2**count)[:, None] >> np.arange(count) & 1
    else:
        bits = np.random.default_rng(0).integers(0, 2, (_DRAWN, count))
        bits[0] = 0
    return 1 - 2 * bits


Opener = Callable[[], Runner]

_BUDGET = 2.0  # seconds
_PRECISION = 0.01
# Stopping at the first interval that is narrow enough favours those that are narrow by chance.
# Intervals computed for two percent more keep their level.
_LEVEL = 0.97
_LEAST_OPENINGS = 7  # fewer cannot reach that level
_OPENINGS_TO_STOP = 8
_MOST_OPENINGS = 40
_LEAST_CYCLES = 3
_WINDOW = 3
_STEADY = 0.05


@dataclass(frozen=True)
class Latencies:
    """Times of interleaved rounds.

    Attributes:
        seconds: for each name and each opening, ``[cycles, inputs]``: a row for each round and a
            column for each input. Rounds pair across names.
    """

    batch: int
    seconds: Mapping[str, Sequence[Array]]

    @property
    def inputs(self) -> int:
        """The number of inputs that the models were run on in turn."""
        return int(next(iter(self.seconds.values()))[0].shape[1])

    def summary(self, name: str) -> dict[str, Any]:
        """Return percentiles in milliseconds for one run of the batch, over all inputs.

        ``mean`` is the typical time: the mean over inputs of each input's median. ``ci95`` is its
        95 % interval.
        """
        every = np.concatenate(self.seconds[name]) * 1e3
        p50, p90, p99 = np.percentile(every, [50, 90, 99])
        mean = float(np.median(every, axis=0).mean())
        typical = [np.median(_grouped(b), axis=1).mean(1) * 1e3 for b in self.seconds[name]]
        low, high = median_interval(typical, _LEVEL)
        return {
            "batch": self.batch,
            "inputs": self.inputs,
            "p50": float(p50),
            "p90": float(p90),
            "p99": float(p99),
            "mean": mean,
            # With several inputs, the mean of medians is not quite the median of means.
            "ci95": [min(low, mean), max(high, mean)],
            "rounds": int(every.size),
            "openings": len(typical),
        }

    def ratio(self, name: str, base: str) -> dict[str, Any]:
        """Return a model's typical time over another's, with its 95 % interval.

        Times are compared round by round, and the result is the median of the ratios. With several
        inputs, a ratio is the mean over them of each input's median of three rounds, weighted by
        the base's time for it.
        """
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        logs = [np.log(_ratios(_grouped(times), _grouped(other))) for times, other in pairs]
        low, high = median_interval(logs, _LEVEL)
        value = float(np.exp(np.median(np.concatenate(logs))))
        return {"value": value, "ci95": [float(np.exp(low)), float(np.exp(high))]}

    def precise(self, precision: float) -> bool:
        """Whether all ratios to the first model are known to this precision.

        Args:
            precision: half the interval's width as a share of the ratio, or of the time of a
                model that was timed alone.
        """
        base, *others = self.seconds
        ratios = [self.ratio(name, base) for name in others]
        if not others:
            summary = self.summary(base)
            ratios = [{"value": summary["mean"], "ci95": summary["ci95"]}]
        return all(f["ci95"][1] - f["ci95"][0] <= 2 * precision * f["value"] for f in ratios)


def already_open(runners: Mapping[str, Runner]) -> dict[str, Opener]:
    """Return openers of open models, which are not opened again."""

    def opener(runner: Runner) -> Opener:
        return lambda: runner

    return {name: opener(runner) for name, runner in runners.items()}


def measure(
    models: Mapping[str, Opener],
    inputs: Sequence[Batch],
    budget: float | None = None,
    precision: float = _PRECISION,
) -> Latencies:
    """Time several models in turn on the same inputs.

    Args:
        models: openers by name; the first model is the base of the ratios.
        inputs: batches of one size, which rounds use in turn: several if a model's time depends
            on their content. If the budget is too small for all, the first ones.
        budget: seconds for everything, 2 if not given; each model is opened and timed at least
            seven times, however long that takes.
        precision: stop as soon as all ratios are this precise; see :meth:`Latencies.precise`.

    Raises:
        CompressorError: a model cannot be opened or run.
    """
    budget = _BUDGET if budget is None else budget
    rng = np.random.default_rng(0)
    openings, rounds = _orders(models, rng), _orders(models, rng)
    start = time.perf_counter()
    if len(inputs) > 1:
        inputs = inputs[: _affordable(models, inputs[0], budget)]
    size = len(next(iter(inputs[0].values())))
    blocks: dict[str, list[Array]] = {name: [] for name in models}
    latencies = Latencies(size, blocks)
    for count in range(1, _MOST_OPENINGS + 1):
        runners = {name: models[name]() for name in next(openings)}
        block = _timed(runners, inputs, rounds, budget / _MOST_OPENINGS)
        # All are closed before one is opened again, or each would get its own memory back.
        runners.clear()
        for name, times in block.items():
            blocks[name].append(times)
        if count >= _LEAST_OPENINGS and time.perf_counter() - start > budget:
            break
        if count >= _OPENINGS_TO_STOP and latencies.precise(precision):
            break
    return latencies


def _timed(
    runners: Mapping[str, Runner],
    inputs: Sequence[Batch],
    orders: Iterator[list[str]],
    share: float,
) -> dict[str, Array]:
    """Time open models for ``share`` seconds; return ``[cycles, inputs]`` for each."""
    for runner in runners.values():
        _warm_up(runner, inputs, share)
    cycles: dict[str, list[list[float]]] = {name: [] for name in runners}
    start = time.perf_counter()
    done = 0
    while done < _LEAST_CYCLES or time.perf_counter() - start < share:
        for times in cycles.values():
            times.append([])
        for batch in inputs:
            for name in next(orders):
                cycles[name][-1].append(_seconds(runners[name], batch))
        done += 1
    return {name: np.asarray(times) for name, times in cycles.items()}


def _warm_up(runner: Runner, inputs: Sequence[Batch], limit: float) -> None:
    """Run until a few runs take as long as the few before them, or time is up."""
    start, before = time.perf_counter(), 0.0
    while True:
        now = float(np.median([_seconds(runner, inputs[0]) for _ in range(_WINDOW)]))
        if abs(now - before) <= _STEADY * before or time.perf_counter() - start > limit:
            break
        before = now
    for batch in inputs[1:]:
        runner.run(batch)


def _affordable(models: Mapping[str, Opener], batch: Batch, budget: float) -> int:
    """Return the number of inputs that a budget allows in all openings."""
    runners = [models[name]() for name in models]
    seconds = 0.0
    for runner in runners:
        _warm_up(runner, [batch], 0.0)
        seconds += _seconds(runner, batch)
    return max(1, int(budget / (_LEAST_OPENINGS * (_LEAST_CYCLES + 1) * seconds)))


def _seconds(runner: Runner, batch: Batch) -> float:
    begin = time.perf_counter()
    runner.run(batch)
    return time.perf_counter() - begin


def _orders(names: Iterable[str], rng: np.random.Generator) -> Iterator[list[str]]:
    """Yield random orders, each followed by its reverse, so that positions are balanced."""
    ordered = list(names)
    while True:
        order = [ordered[i] for i in rng.permutation(len(ordered))]
        yield order
        yield order[::-1]


def _grouped(times: Array) -> Array:
    """Return ``[values, rounds, inputs]`` of ``[cycles, inputs]``: the rounds of each value.

    With a single input, each round is a value. With several inputs one or another is always
    disturbed, so three rounds make a value; incomplete ones are left out.
    """
    cycles, inputs = times.shape
    rounds = 1 if inputs == 1 else min(_LEAST_CYCLES, cycles)
    return times[: cycles // rounds * rounds].reshape(-1, rounds, inputs)


def _ratios(times: Array, base: Array) -> Array:
    weights = np.median(base, axis=1)
    ratios: Array = (np.median(times / base, axis=1) * weights).sum(1) / weights.sum(1)
    return ratios
