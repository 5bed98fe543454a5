"""Processes that share batches observe what one process would have observed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pytest
import torch

from compressor.calibration.collect import collect
from compressor.types.data import ALONE, ValueT
from compressor.types.statistics import Request
from compressor.types.tensors import Batch

COLUMNS = 6


class Threads:
    """Processes, played by threads."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, table: list[object]):
        self.rank, self.size = rank, size
        self._barrier, self._table = barrier, table

    def wait(self) -> None:
        self._barrier.wait()

    def gathered(self, value: ValueT) -> list[ValueT]:
        self._table[self.rank] = value
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        return found  # type: ignore[return-value]


def batches(sizes: Sequence[int]) -> list[Batch]:
    random = np.random.default_rng(0)
    return [{"x": random.integers(-3, 4, (n, COLUMNS)).astype(np.float32)} for n in sizes]


def alone(sizes: Sequence[int], requests: Sequence[Request]) -> dict[str, object]:
    return collect(dict, iter(batches(sizes)), requests, None, ALONE)


def together(
    count: int, sizes: Sequence[int], requests: Sequence[Request]
) -> list[dict[str, object]]:
    barrier, table = threading.Barrier(count, timeout=120), [None] * count

    def one(rank: int) -> dict[str, object]:
        own = islice(batches(sizes), rank, None, count)
        ranks = Threads(rank, count, barrier, table)
        return collect(dict, own, requests, None, ranks)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def moments(rows_per_column: int) -> Request:
    return Request("x", "second-moment", {"rows_per_column": rows_per_column})


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "sizes",
    [
        [8] * 7,  # more than enough
        [8] * 6,
        [8] * 5,  # just enough
        [8] * 2,  # too few
        [8],  # some processes have nothing
        [3, 20, 1, 40, 2, 2, 2],
        [100, 1, 1, 1],
    ],
    ids=str,
)
def test_the_same_vectors_are_seen(count: int, sizes: list[int]):
    requests = [moments(6), moments(2), Request("x", "min-max")]
    for chosen in (requests[:2], requests[:1], requests):
        wanted = alone(sizes, chosen)
        for found in together(count, sizes, chosen):
            assert found.keys() == wanted.keys()
            for request in chosen:
                ours, theirs = found[request.key], wanted[request.key]
                if request.observer == "min-max":
                    assert ours == theirs
                    continue
                assert ours.rows == theirs.rows
                # Small whole numbers: sums are exact whatever their order.
                assert torch.equal(ours.second, theirs.second)


def test_one_process_stops_when_it_has_enough():
    taken = []

    def counted():
        for batch in batches([8] * 10):
            taken.append(1)
            yield batch

    found = collect(dict, counted(), [moments(4)])
    assert found[moments(4).key].rows == 24
    assert len(taken) <= 5  # three, and what was run ahead


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("sizes", [[4] * 8, [4, 1, 3, 2], [4]])
@pytest.mark.parametrize("others", [[], [moments(8)]], ids=["alone", "beside one that stops"])
def test_the_order_of_batches_is_that_of_one_process(
    count: int, sizes: list[int], others: list[Request]
) -> None:
    """A process's batches were taken for one stretch of the data."""
    request = Request("x", "moving-average", {"constant": 0.3})
    wanted = alone(sizes, [request])[request.key]
    for found in together(count, sizes, [request, *others]):
        assert found[request.key] == wanted
