"""Work on several threads: order, room, errors, and what torch does meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from compressor.types.parallel import in_threads

ROOM = 10


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    """Let torch use three, however many the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


class Work:
    """Notes what is worked on at once; large items take longer."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.at_once: list[list[int]] = []
        self.torch_threads: set[int] = set()
        self._now: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, item: int) -> int:
        with self._lock:
            self.begun.append(item)
            self._now.append(item)
            self.at_once.append(list(self._now))
            self.torch_threads.add(torch.get_num_threads())
        time.sleep(item / 100)
        with self._lock:
            self._now.remove(item)
        if item == 4:
            raise ValueError(f"item {item}")
        return -item


def size(item: int) -> int:
    return item


def test_results_come_in_the_order_of_the_items():
    items = [9, 1, 2, 8, 1, 3]
    assert list(in_threads(Work(), items, size, 100)) == [-item for item in items]


def test_there_are_as_many_threads_as_torch_would_use_and_torch_has_one_in_each():
    work = Work()
    list(in_threads(work, [2] * 9, size, 100))
    assert max(map(len, work.at_once)) == 3
    assert work.torch_threads == {1}
    assert torch.get_num_threads() == 3


def test_on_one_thread_the_caller_works():
    torch.set_num_threads(1)
    names = in_threads(lambda _: threading.current_thread(), [1, 2], size, ROOM)
    assert set(names) == {threading.current_thread()}


def test_what_is_worked_on_at_once_fits_and_what_never_fits_is_alone():
    work, items = Work(), [3, 6, 5, 1, 12, 2, 7, 3]
    assert list(in_threads(work, items, size, ROOM)) == [-item for item in items]
    assert all(sum(now) <= ROOM or now == [12] for now in work.at_once)
    assert max(map(len, work.at_once)) > 1


def test_the_first_error_in_the_order_is_raised_and_no_work_goes_on():
    work, found = Work(), []
    with pytest.raises(ValueError, match="item 4"):
        found.extend(in_threads(work, [3, 4, *[1] * 50], size, 100))
    begun = len(work.begun)
    assert begun < 20
    assert torch.get_num_threads() == 3
    time.sleep(0.05)
    assert len(work.begun) == begun


def test_an_interrupt_ends_the_threads():
    work, before = Work(), threading.active_count()
    results = in_threads(work, [1] * 50, size, 100)
    assert next(results) == -1
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt)
    assert threading.active_count() == before
    assert len(work.begun) < 20
    assert torch.get_num_threads() == 3
