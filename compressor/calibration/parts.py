"""Statistics of parts of the data, and of any of them together, from one pass over it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce
from typing import Any

from compressor.calibration.collect import (
    by_place,
    make_observer,
    state_key,
    updated_states,
    values_at,
)
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
        for (tensor, where), keys in self._places.items():
            if tensor not in outputs:
                continue
            values = values_at(tensor, outputs, where)
            if values.numel():
                feed = {key: self._updaters[key] for key in keys}
                states.update(updated_states(feed, states, values, alone=True))

    def results(
        self, parts: Collection[int], keys: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Return the results of some parts by ``Request.key``, except those without observations.

        Args:
            keys: those that are wanted; all if left out.
        """
        merged: dict[Any, Any] = {}
        found = dict[str, Any]()
        for key, observer in self._observers.items():
            if keys is not None and key not in keys:
                continue
            place = self._shared[key]
            if place not in merged:
                states = [self._states[part][place] for part in parts]
                merged[place] = reduce(observer.merge, states)
            try:
                found[key] = observer.result(merged[place])
            except ValueError:  # such as values behind a gate that was never open
                continue
        return found
