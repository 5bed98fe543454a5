"""Evaluation data are read and transformed once for all models, if they are small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from compressor.run.data import CachedSource, Data
from compressor.types.data import SourceInfo
from compressor.types.tensors import Batch


class Counted:
    """Five samples, and how many have been read."""

    def __init__(self) -> None:
        self.read = 0

    def info(self) -> SourceInfo:
        return SourceInfo(5, ())

    def digest(self) -> str:
        return "five"

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        for start in range(0, limit or 5, size):
            values = np.arange(start, min(start + size, limit or 5), dtype=np.float32)
            self.read += len(values)
            yield {"x": values}


def rows(batches: Iterator[Batch]) -> list[list[float]]:
    return [batch["x"].tolist() for batch in batches]


def test_small_data_are_read_once_for_each_size_of_batches():
    source = Counted()
    cached = CachedSource(source)
    assert rows(cached.batches(2)) == rows(cached.batches(2)) == [[0, 1], [2, 3], [4]]
    assert source.read == 5
    assert rows(cached.batches(3)) == [[0, 1, 2], [3, 4]]
    assert source.read == 10
    assert rows(cached.batches(2, 3)) == [[0, 1], [2]], "a part is not held, nor taken for all"
    assert rows(cached.batches(2)) == [[0, 1], [2, 3], [4]]
    assert source.read == 13
    assert (cached.info().samples, cached.digest()) == (5, "five")


@pytest.mark.parametrize(("most", "read"), [(20, 5), (19, 10)])
def test_data_are_held_up_to_so_many_bytes(most: int, read: int):
    source = Counted()
    cached = CachedSource(source, most)
    assert rows(cached.batches(2)) == rows(cached.batches(2))
    assert source.read == read


def test_whoever_changes_a_batch_changes_no_other():
    cached = CachedSource(Counted())
    for _ in range(3):
        for batch in cached.batches(5):
            assert batch["x"].tolist() == [0, 1, 2, 3, 4]
            batch["x"] += 1


def test_an_interrupted_reading_is_not_taken_for_all():
    cached = CachedSource(Counted())
    next(cached.batches(2))
    assert rows(cached.batches(2)) == [[0, 1], [2, 3], [4]]


def test_feeds_are_read_again():
    data = Data("evaluation", Counted(), None, 2, "", "spec")
    assert isinstance(data.cached().source, CachedSource)
    assert replace(data, feeds=True).cached().source is data.source
