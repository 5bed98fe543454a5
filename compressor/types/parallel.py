"""Independent work on several threads, with results in order.

PyTorch computes on one thread in each, so that no result depends on how many there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

WAITING = 2
"""Results that may wait for those before them, so that no thread does."""


@contextmanager
def one_thread_each() -> Iterator[int]:
    """Keep torch from dividing a thread's work among more threads; yields how many it would use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def in_threads(
    work: Callable[[ItemT], ResultT],
    items: Iterable[ItemT],
    nbytes: Callable[[ItemT], int],
    room: int,
) -> Iterator[ResultT]:
    """Work on items on as many threads as torch would use; yield the results in their order.

    The first error is raised in place of its result, when all work that was begun has ended.

    Args:
        work: called by several threads.
        nbytes: returns the bytes that work on an item takes besides its result.
        room: bytes that may be taken at once, unless a single item takes more.
    """
    with one_thread_each() as threads:
        if threads == 1:
            yield from map(work, items)
            return
        with ThreadPoolExecutor(threads, "work", torch.set_num_threads, (1,)) as workers:
            yield from in_order(workers, work, items, threads + WAITING, nbytes, room)


def mapped(work: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> list[ResultT]:
    """Return the results of work that takes little memory, in the order of the items.

    Args:
        work: called by as many threads as torch would use; errors as in :func:`in_threads`.
    """
    return list(in_threads(work, items, lambda _: 0, 0))


def in_order(
    workers: ThreadPoolExecutor,
    work: Callable[[ItemT], ResultT],
    items: Iterable[ItemT],
    most: int,
    nbytes: Callable[[ItemT], int] = lambda _: 0,
    room: int = 0,
) -> Iterator[ResultT]:
    """Work on several items at once and yield the results in order; at most ``most`` are held.

    Args:
        nbytes: as for :func:`in_threads`, like ``room``.
    """
    coming: deque[tuple[Future[ResultT], int]] = deque()
    try:
        for item in items:
            needed = nbytes(item)
            while coming and _taken(coming) + needed > room:
                yield coming.popleft()[0].result()
            coming.append((workers.submit(work, item), needed))
            if len(coming) >= most:
                yield coming.popleft()[0].result()
        while coming:
            yield coming.popleft()[0].result()
    finally:
        for future, _ in coming:
            future.cancel()


def _taken(coming: Iterable[tuple[Future[ResultT], int]]) -> int:
    return sum(needed for future, needed in coming if not future.done())
