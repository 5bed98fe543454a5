"""Collect statistics of calibration data, in one process or with the same result in several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from compressor import catalog
from compressor.calibration.agreement import Agreement
from compressor.calibration.histogram import Ends, extrema, row_ends
from compressor.calibration.observers.channels import ChannelSpan
from compressor.calibration.observers.ranges import (
    EndsObserver,
    ExtremeValue,
    HistogramObserver,
    MovingAverage,
    RangeObserver,
)
from compressor.calibration.portions import MOST, Portions
from compressor.errors import DataError
from compressor.types.carrier import Carrier
from compressor.types.data import ALONE, Ranks
from compressor.types.parallel import mapped
from compressor.types.statistics import Observer, Request
from compressor.types.tensors import Array, Batch, samples_in

AnyObserver: TypeAlias = Observer[Any, Any]
_Place: TypeAlias = tuple[str, str | None]
StateKey: TypeAlias = tuple[_Place, str]
_States: TypeAlias = Mapping[StateKey, Any]


def make_observer(name: str, options: Mapping[str, Any]) -> Observer[Any, Any]:
    """Build an observer from the catalog."""
    observer: Observer[Any, Any] = catalog.load("observer", name)(**options)
    return observer


def collect_statistics(
    carrier: Carrier,
    batches: Iterable[Batch],
    requests: Sequence[Request],
    progress: Callable[[int], None] | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Run a model over its data once, and return the requested statistics by ``Request.key``.

    Args:
        carrier: the model; it can be run.
        progress: called after each batch with the number of samples so far.

    Example:
        >>> request = Request("conv1_out", "min-max")
        >>> collect_statistics(carrier, batches, [request])[request.key]
        Range(low=0.0, high=6.1)

    Raises:
        DataError: see :func:`collect`.
    """
    if not requests:
        return {}
    inputs = {spec.name for spec in carrier.inputs}
    taps = dict.fromkeys(t for r in requests for t in r.tensors if t not in inputs)
    runner = carrier.runner(tuple(taps))
    # Where ranges are all, as when channels have been scaled and moments are known, portions need
    # not be large: sums of floats, which depend on them, are not among the statistics.
    ranges = all(isinstance(make_observer(r.observer, r.options), RangeObserver) for r in requests)
    most = MOST // 2 if ranges else MOST
    return collect(
        Portions(lambda part: ({**part, **runner.run(part)},), [carrier], most),
        batches,
        requests,
        progress,
        ranks,
    )


def collect(
    run: Portions | Callable[[Batch], Batch],
    batches: Iterable[Batch],
    requests: Sequence[Request],
    progress: Callable[[int], None] | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Return the requested statistics by ``Request.key``, from one pass over the data.

    With several processes, each gets its share of the batches and all return the same results: see
    :meth:`Agreement.merged`.

    Memory holds two batches, or portions of them, one being run while the other is observed, and
    one state for each observer; all histogram observers of a tensor share one.

    Args:
        run: returns the requested tensors (and perhaps others) by name, for one batch; or runs it
            in portions.
        batches: the calibration data, or this process's share of it.
        requests: what to observe; equal requests are observed once.
        progress: called after each batch with the number of samples so far.

    Raises:
        DataError: there are no samples; a tensor is missing or empty; or a value is not finite
            (the error names the tensor, the first such sample and how many values there are).
    """
    observers = {r.key: make_observer(r.observer, r.options) for r in requests}
    shared = {r.key: state_key(r, observers[r.key]) for r in requests}
    # One observer updates each state, however many results are read from it later.
    updaters = {shared[key]: observer for key, observer in observers.items()}
    states = {key: observer.start() for key, observer in updaters.items()}
    places = by_place(updaters)

    agreement, seen = Agreement(updaters, ranks), 0
    after, ends, alone = dict(states), _Ends(updaters), ranks.size == 1

    def observed(
        place: _Place, part: _Part, first: int, before: _States, held: _States
    ) -> dict[StateKey, Any]:
        try:
            values = values_at(place[0], part.outputs, place[1])
            if not values.numel():
                return {}
            feed = {key: updaters[key] for key in ends.without(places[place], values, part)}
            return _continued(feed, before, held, values, alone=alone)
        except ValueError as error:
            _blame_values(place[0], part.outputs[place[0]], first, part.samples, error)
            raise

    for part in _run_ahead(run, batches):
        # What does not depend on the batch has been observed in its first portion.
        present = [place for place in places if not part.start or place[0] in part.outputs]
        observe = partial(observed, part=part, first=seen + part.start, before=states, held=after)
        for found in mapped(observe, present):
            after.update(found)
        del observe
        if not part.last:
            continue
        after.update(ends.updated(states))
        seen += part.start + part.samples
        del part  # before the next run needs the memory
        states = agreement.kept(states, after)
        after = dict(states)
        if progress is not None:
            progress(seen)
        if agreement.done:
            break
    agreement.finish(states)
    seen = sum(ranks.gathered(seen))
    if not seen:
        raise DataError("calibration data", "has no samples", "give at least one batch")
    states = agreement.merged(states)
    results = mapped(lambda key: _result(key, observers[key], states[shared[key]]), observers)
    return dict(zip(observers, results, strict=True))


class _Part(NamedTuple):
    """A batch's portion with the model's outputs; or all of the batch."""

    start: int
    samples: int
    outputs: Batch
    last: bool


class _Ends:
    """The least and greatest values of a batch that is run in portions.

    Observers for which a batch is one observation get them once it has ended.
    """

    def __init__(self, observers: Mapping[StateKey, AnyObserver]):
        self._observers = observers
        self._seen: dict[StateKey, list[float]] = {}

    def without(self, keys: list[StateKey], values: torch.Tensor, part: _Part) -> list[StateKey]:
        """Look at values for some observers, and return the others."""
        if not part.start and part.last:
            return keys
        whole = [key for key in keys if _one_observation(key, self._observers[key])]
        if whole:
            ends = extrema(values)
            for key in whole:
                self._seen.setdefault(key, []).extend(ends)
        return [key for key in keys if key not in whole]

    def updated(self, states: _States) -> dict[StateKey, Any]:
        """Return the states after the batch, and forget it."""
        seen, self._seen = self._seen, {}
        return {
            key: self._observers[key].update(states[key], torch.tensor([ends], dtype=torch.float64))
            for key, ends in seen.items()
        }


def _one_observation(key: StateKey, observer: AnyObserver) -> bool:
    """Whether it matters to an observer which values are of one batch."""
    (_, where), _ = key
    gated = isinstance(observer, ExtremeValue) and where is not None
    return gated or isinstance(observer, MovingAverage)


def _parts(run: Portions | Callable[[Batch], Batch], batches: Iterable[Batch]) -> Iterator[_Part]:
    for batch in batches:
        if isinstance(run, Portions):
            for portion in run.of(batch):
                yield _Part(portion.start, portion.samples, portion.values[0], portion.last)
        else:
            yield _Part(0, samples_in(batch), run(batch), True)


def _run_ahead(
    run: Portions | Callable[[Batch], Batch], batches: Iterable[Batch]
) -> Iterator[_Part]:
    """Yield each portion with the model's outputs, while the next one is run in a thread."""
    parts = _parts(run, batches)
    with ThreadPoolExecutor(max_workers=1) as pool:
        running: Future[_Part | None] = pool.submit(next, parts, None)
        while (part := running.result()) is not None:
            running = pool.submit(next, parts, None)
            yield part
            del part


def _continued(
    feed: dict[StateKey, AnyObserver],
    before: _States,
    after: _States,
    values: torch.Tensor,
    *,
    alone: bool,
) -> dict[StateKey, Any]:
    """Return the states after a portion of a batch.

    An observer that has enough in the middle of a batch gets the rest of it, too: what it has seen
    then does not depend on portions.

    Args:
        before: the states before the batch.
        after: the states after its earlier portions.
        alone: no other process decides what a batch adds to, so its states may be overwritten.
    """
    anew = {key for key, o in feed.items() if o.share(before[key]) < 1 <= o.share(after[key])}
    given = {k: o.start() if k in anew else after[k] for k, o in feed.items()}
    updated = updated_states(feed, given, values, alone=alone)
    return {k: feed[k].merge(after[k], v) if k in anew else v for k, v in updated.items()}


def state_key(request: Request, observer: AnyObserver) -> StateKey:
    """Return the key of a request's state, which requests of the same tensor may share."""
    shares = isinstance(observer, HistogramObserver)
    return (request.tensor, request.where), "histogram" if shares else request.key


def by_place(keys: Iterable[StateKey]) -> dict[_Place, list[StateKey]]:
    """Return keys of states by the values that they are of."""
    places: dict[_Place, list[StateKey]] = {}
    for key in keys:
        places.setdefault(key[0], []).append(key)
    return places


def updated_states(
    feed: dict[StateKey, AnyObserver], states: _States, values: torch.Tensor, *, alone: bool
) -> dict[StateKey, Any]:
    """Return the new states; raises ``ValueError`` where a value is not finite."""
    # Observers of ranges look at every value anyway and refuse non-finite ones.
    checked = any(isinstance(o, RangeObserver | ChannelSpan) for o in feed.values())
    if values.is_floating_point() and not checked:
        extrema(values)
    ranges_first = sorted(feed.items(), key=lambda item: not isinstance(item[1], RangeObserver))
    sharing = [observer for observer in feed.values() if isinstance(observer, EndsObserver)]
    spans = [o for o in feed.values() if isinstance(o, ChannelSpan) and o.axis < values.ndim]
    peaks = ends = None
    if sharing and spans and values.dtype == torch.float32:
        peaks = spans[0].peaks(values)  # the ends of samples are those of their channels
        low, high = peaks.amax(2)
        ends = Ends((0.0 - low).tolist(), (high + 0.0).tolist())
    elif len(sharing) > 1:
        ends = row_ends(values)

    def updated(observer: AnyObserver, state: Any) -> Any:
        if ends is not None and isinstance(observer, EndsObserver):
            return observer.with_ends(state, values, ends)
        if peaks is not None and observer is spans[0]:
            return spans[0].with_peaks(state, values, peaks)
        return (observer.absorb if alone else observer.update)(state, values)

    return {key: updated(observer, states[key]) for key, observer in ranges_first}


def values_at(tensor: str, outputs: Batch, where: str | None) -> torch.Tensor:
    """Return a tensor's values; with ``where``, those at which that is positive, as one row."""
    if tensor not in outputs:
        raise DataError(
            f"tensor '{tensor}'",
            "was not computed by the model",
            "request a tensor that the graph has",
        )
    array = np.ascontiguousarray(outputs[tensor])
    if where is not None:  # ten times as fast as indexing with a mask
        array = np.compress((outputs[where] > 0).ravel(), array.ravel())[None]
    if array.dtype.kind not in "biuf":  # bfloat16 and smaller, which torch does not convert
        array = array.astype(np.float32)
    # torch.from_numpy would warn that the tensor could be used to write to the array.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _result(key: str, observer: AnyObserver, state: Any) -> Any:
    try:
        return observer.result(state)
    except ValueError as error:
        tensor = key.split("|")[0]
        raise DataError(
            f"tensor '{tensor}'",
            f"cannot be calibrated: {error}",
            "check that it has elements",
        ) from error


def _blame_values(tensor: str, array: Array, seen: int, samples: int, cause: ValueError) -> None:
    """Raise an error that locates the first value that is not finite; return if all are."""
    bad = ~np.isfinite(array.astype(np.float64))
    count = int(bad.sum())
    if not count:
        return
    where = f"samples {seen} to {seen + samples - 1}"
    rows = array.shape[0] if array.ndim else 0
    if rows and samples and rows % samples == 0:  # the first axis is the batch, or starts with it
        row = int(np.flatnonzero(bad.reshape(rows, -1).any(1))[0])
        where = f"sample {seen + row // (rows // samples)}"
    raise DataError(
        f"tensor '{tensor}'",
        f"{count} of {bad.size} values are not finite, the first in {where}",
        "look at that sample and its transform, and at the weights before this tensor",
    ) from cause
