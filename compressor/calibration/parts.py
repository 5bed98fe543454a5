"""Statistics of parts of the data, and of any of them together, from one pass over it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

from compressor.calibration.collect import (
    by_place,
    make_observer,
    state_key,
    updated_states,
    values_at,
)
from compressor.types.parallel import mapped
from compressor.types.statistics import Request
from compressor.types.tensors import Batch


class Parts:
    """One state a part for each observer; what is asked for are results of merged states.

    Args:
        requests: what to observe.
        count: how many parts there are.

    >>> parts = Parts([Request("x", "min-max")], 2)
    >>> parts.add(0, {"x": np.array([1.0])})
    >>> parts.add(1, {"x": np.array([2.0])})
    >>> parts.results([0])
    {'x|min-max|': Range(low=0.0, high=1.0)}
    """

    def __init__(self, requests: Sequence[Request], count: int):
        self._observers = {r.key: make_observer(r.observer, r.options) for r in requests}
        self._shared = {r.key: state_key(r, self._observers[r.key]) for r in requests}
        self._updaters = {self._shared[key]: o for key, o in self._observers.items()}
        self._places = by_place(self._updaters)
        self._states = [{k: o.start() for k, o in self._updaters.items()} for _ in range(count)]

    def add(self, part: int, outputs: Batch) -> None:
        """Observe the tensors of a batch that belongs to a part; absent ones are passed over.

        Raises:
            ValueError: a value is not finite.
        """
        states = self._states[part]

        def observed(place: tuple[str, str | None]) -> dict[Any, Any]:
            tensor, where = place
            values = values_at(tensor, outputs, where)
            feed = {key: self._updaters[key] for key in self._places[place]}
            return updated_states(feed, states, values, alone=True) if values.numel() else {}

        for found in mapped(observed, [place for place in self._places if place[0] in outputs]):
            states.update(found)

    def results(
        self, parts: Collection[int], keys: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Return the results of some parts by ``Request.key``, except those without observations.

        Args:
            keys: those that are wanted; all if left out.
        """
        asked: dict[Any, list[str]] = {}
        for key, place in self._shared.items():
            if keys is None or key in keys:
                asked.setdefault(place, []).append(key)

        def results(place: Any) -> dict[str, Any]:
            states = [self._states[part][place] for part in parts]
            merged = reduce(self._updaters[place].merge, states)
            found = dict[str, Any]()
            for key in asked[place]:
                with suppress(ValueError):  # such as values behind a gate that was never open
                    found[key] = self._observers[key].result(merged)
            return found

        return {key: found for some in mapped(results, asked) for key, found in some.items()}
