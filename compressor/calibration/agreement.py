"""What processes that share calibration data agree on: when there is enough, and one result."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from compressor.calibration.observers.ranges import MovingAverage
from compressor.types.data import Ranks
from compressor.types.statistics import Observer

KeyT = TypeVar("KeyT")


class Agreement(Generic[KeyT]):
    """Decides batch by batch which states the processes keep, and merges them.

    In two processes, an observer that stops early would see twice as much data before each has
    enough. So after each batch the processes exchange their shares of the data needed, and a batch
    counts only if the batches before it, in whichever process, were not enough. Batches are ordered
    by round, and within a round by process.

    Args:
        observers: by the key of their state.
    """

    def __init__(self, observers: Mapping[KeyT, Observer[Any, Any]], ranks: Ranks):
        self._observers = observers
        self._ranks = ranks
        stopping = any(type(o).share is not Observer.share for o in observers.values())
        self._talks = stopping and ranks.size > 1
        self.done = False  # whether all observers have enough data
        self._somebody_works = True
        in_order = [k for k, o in observers.items() if isinstance(o, MovingAverage)]
        self._in_order = in_order if ranks.size > 1 else []
        self._turns: list[dict[KeyT, Any]] = []  # states of these observers, one of each batch

    def kept(self, before: Mapping[KeyT, Any], after: Mapping[KeyT, Any]) -> dict[KeyT, Any]:
        """Return the states to continue with.

        Args:
            before: this process's states before its latest batch.
        """
        if not self._talks:
            self.done = all(o.share(after[key]) >= 1 for key, o in self._observers.items())
            return self._with_turn(dict(after))
        shares = self._round(before, after, working=True)
        states = {}
        for key in self._observers:
            held = sum(first for first, _ in (entry[key] for entry in shares))
            gained = sum(entry[key][1] - entry[key][0] for entry in shares[: self._ranks.rank])
            states[key] = after[key] if held + gained < 1 else before[key]
        return self._with_turn(states)

    def _with_turn(self, states: dict[KeyT, Any]) -> dict[KeyT, Any]:
        """Set aside what a batch has given to observers whose result depends on the order."""
        if self._in_order:
            self._turns.append({key: states[key] for key in self._in_order})
        return states | {key: self._observers[key].start() for key in self._in_order}

    def finish(self, states: Mapping[KeyT, Any]) -> None:
        """Take part in the rounds of processes that still have batches.

        Args:
            states: this process's states, after its last batch.
        """
        while self._talks and not self.done and self._somebody_works:
            self._round(states, states, working=False)

    def merged(self, states: Mapping[KeyT, Any]) -> dict[KeyT, Any]:
        """Return the states of all processes' batches, which each of them gets.

        They are merged in the order of the processes; of an observer whose result depends on the
        order of batches, batch by batch.

        Args:
            states: this process's states, after its last batch.
        """
        if self._ranks.size == 1:
            return dict(states)
        gathered = self._ranks.gathered((dict(states), self._turns))
        rounds = zip_longest(*(turns for _, turns in gathered), fillvalue={})
        batches = [turn for each in rounds for turn in each if turn]
        every = {k: [own[k] for own, _ in gathered] for k in self._observers}
        every |= {k: [turn[k] for turn in batches] for k in self._in_order if batches}
        return {k: reduce(o.merge, every[k]) for k, o in self._observers.items()}

    def _round(
        self, before: Mapping[KeyT, Any], after: Mapping[KeyT, Any], *, working: bool
    ) -> list[dict[KeyT, tuple[float, float]]]:
        mine = {k: (o.share(before[k]), o.share(after[k])) for k, o in self._observers.items()}
        gathered = self._ranks.gathered((working, mine))
        self._somebody_works = any(works for works, _ in gathered)
        shares = [entry for _, entry in gathered]
        self.done = all(sum(entry[k][1] for entry in shares) >= 1 for k in self._observers)
        return shares
