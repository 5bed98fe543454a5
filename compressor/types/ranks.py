"""The processes that a run is spread over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol, TypeVar

ValueT = TypeVar("ValueT")


class Ranks(Protocol):
    """Processes that do the same work on different parts; the first writes what is left of it."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def wait(self) -> None:
        """Go on once all processes have come here."""
        ...

    def gathered(self, value: ValueT) -> list[ValueT]:
        """Return each process's value, in their order, to all of them."""
        ...


class Alone:
    """A run in one process."""

    rank = 0
    size = 1

    def wait(self) -> None:
        """Go on."""

    def gathered(self, value: ValueT) -> list[ValueT]:
        """Return the only value."""
        return [value]


ALONE = Alone()


def share(items: Iterable[ValueT], ranks: Ranks) -> Iterator[ValueT]:
    """Return every so-many-th item, so that each process has its own and all are had."""
    return islice(items, ranks.rank, None, ranks.size)
