"""Parameters of states of a network that are looked at again and again, within a bound."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from compressor.passes.prune.structured.moments import AT_ONCE
from compressor.types.tensors import Batch


class Recent:
    """Arrays that were made last, by key: at most `AT_ONCE` bytes, or those of a single key."""

    def __init__(self) -> None:
        self._held: dict[Hashable, Batch] = {}
        self._bytes = 0

    def of(self, key: Hashable, make: Callable[[], Batch]) -> Batch:
        """Return what belongs to a key; it is made if it is not held."""
        if key not in self._held:
            self._held[key] = make()
            self._bytes += _size(self._held[key])
            while self._bytes > AT_ONCE and len(self._held) > 1:
                self._bytes -= _size(self._held.pop(next(iter(self._held))))
        return self._held[key]


def _size(arrays: Batch) -> int:
    return sum(array.nbytes for array in arrays.values())
