"""Let several processes observe exactly the batches that one process would have observed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from compressor.types.data import Ranks
from compressor.types.statistics import Observer

KeyT = TypeVar("KeyT")


class Agreement(Generic[KeyT]):
    """Decides, batch by batch, which states the processes keep.

    An observer that stops early would, in two processes, see twice as much before each of them
    has had enough. So after each batch the processes tell each other how much of what is needed
    they hold, and a batch counts only if those before it, whichever process has them, were not
    enough. The batches lie in the order of rounds, and in a round in that of the processes.

    Args:
        observers: by the key of their state.
        ranks: the processes.
    """

    def __init__(self, observers: Mapping[KeyT, Observer[Any, Any]], ranks: Ranks):
        self._observers = observers
        self._ranks = ranks
        stopping = any(type(o).share is not Observer.share for o in observers.values())
        self._talks = stopping and ranks.size > 1
        self.done = False
        """All observers have had enough."""
        self._somebody_works = True

    def kept(self, before: Mapping[KeyT, Any], after: Mapping[KeyT, Any]) -> dict[KeyT, Any]:
        """Return the states to go on with.

        Args:
            before: this process's states before its latest batch.
            after: the same with that batch.
        """
        if not self._talks:
            self.done = all(o.share(after[key]) >= 1 for key, o in self._observers.items())
            return dict(after)
        told = self._round(before, after, working=True)
        states = {}
        for key in self._observers:
            held = sum(first for first, _ in (own[key] for own in told))
            gained = sum(own[key][1] - own[key][0] for own in told[: self._ranks.rank])
            states[key] = after[key] if held + gained < 1 else before[key]
        return states

    def finish(self, states: Mapping[KeyT, Any]) -> None:
        """Take part in the rounds of processes that have batches still.

        Args:
            states: this process's states, after its last batch.
        """
        while self._talks and not self.done and self._somebody_works:
            self._round(states, states, working=False)

    def _round(
        self, before: Mapping[KeyT, Any], after: Mapping[KeyT, Any], *, working: bool
    ) -> list[dict[KeyT, tuple[float, float]]]:
        """Return each process's shares before and after its batch."""
        own = {k: (o.share(before[k]), o.share(after[k])) for k, o in self._observers.items()}
        told = self._ranks.gathered((working, own))
        self._somebody_works = any(works for works, _ in told)
        shares = [entry for _, entry in told]
        self.done = all(sum(entry[k][1] for entry in shares) >= 1 for k in self._observers)
        return shares
