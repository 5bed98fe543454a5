"""Reading parts of files before they are used."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from os import fsync  # as it is before tests begin, which then wait for no disk
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compressor.errors import ModelError
from compressor.models.checkpoint.reading import FileTensor, MappedFile, ReadAhead, Span
from compressor.models.codec.headers import read_header

ROWS, WIDTH = 16, 1 << 18  # a row is 1 MiB
MIB = 1 << 20


@pytest.fixture
def tensor(tmp_path: Path) -> FileTensor:
    """Rows whose elements are their numbers, in a file that is not in the page cache."""
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.arange(ROWS, dtype=torch.float32)[:, None].repeat(1, WIDTH)}, path)
    with path.open("rb") as stream:
        fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    header = read_header(path)
    return FileTensor(MappedFile(path, header.nbytes), header.tensors["w"])


@pytest.fixture(params=["direct", "mapped", "cached"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How parts are read."""
    if request.param == "mapped":
        monkeypatch.setattr(MappedFile, "load", lambda *_: False)
    if request.param == "cached":
        monkeypatch.setattr(MappedFile, "cached", lambda *_: True)
    return str(request.param)


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("read-ahead")]


def spans_of(tensor: FileTensor) -> list[Span]:
    return [tensor.span(row, row + 1) for row in range(ROWS)]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


def test_what_is_used_is_what_the_file_holds(tensor: FileTensor, way: str) -> None:
    with ReadAhead(spans_of(tensor), distance=3 * MIB) as ahead:
        for row, span in enumerate(spans_of(tensor)):
            with ahead.using(span):
                assert bool((tensor.rows(row, row + 1) == row).all())


def test_several_users_share_one_order(tensor: FileTensor, way: str) -> None:
    rows = iter(range(ROWS))
    found: list[int] = []

    def use() -> None:
        while (row := next(rows, None)) is not None:
            with ahead.using(tensor.span(row, row + 1)):
                found.append(int(tensor.rows(row, row + 1).sum() / WIDTH))

    # Less room than there are users: each holds a part, and none waits for ever.
    with ReadAhead(spans_of(tensor), distance=MIB) as ahead, ThreadPoolExecutor(5) as users:
        for job in [users.submit(use) for _ in range(5)]:
            job.result(timeout=120)
    assert sorted(found) == list(range(ROWS))


def test_a_part_that_comes_twice_is_read_twice(tensor: FileTensor, way: str) -> None:
    span = tensor.span(3, 5)
    with ReadAhead([span, span]) as ahead:
        with ahead.using(span), ahead.using(span):
            assert tensor.rows(3, 5).unique().tolist() == [3, 4]
        assert tensor.rows(3, 5).unique().tolist() == [3, 4]


def test_no_more_is_read_than_the_distance(
    tensor: FileTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    monkeypatch.setattr(MappedFile, "load", lambda *_: False)
    monkeypatch.setattr(MappedFile, "touch", lambda _, start, stop: read.append(stop - start))
    spans = spans_of(tensor)
    with ReadAhead(spans, distance=3 * MIB) as ahead:
        for row, span in enumerate(spans):
            wait_for(lambda row=row: sum(read) >= min(ROWS, row + 3) * MIB)  # type: ignore[misc]
            time.sleep(0.005)
            assert sum(read) == min(ROWS, row + 3) * MIB
            with ahead.using(span):
                pass


def test_memory_is_that_of_the_parts_in_use(
    tensor: FileTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = spans_of(tensor)
    with ReadAhead(spans, distance=2 * MIB) as ahead:
        for span in spans:
            with ahead.using(span):
                assert len(tensor.file._loaded) <= 2
        made = len(ahead._free)
    assert made <= 3, "buffers are used again"


def test_pages_that_were_cached_before_stay(
    tensor: FileTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[int] = []
    monkeypatch.setattr(MappedFile, "forget", lambda _, *span: forgotten.append(span[0]))
    for state, expected in ((True, 0), (False, ROWS)):
        monkeypatch.setattr(MappedFile, "cached", lambda *_, state=state: state)
        monkeypatch.setattr(MappedFile, "load", lambda *_: False)
        with ReadAhead(spans_of(tensor)) as ahead:
            for span in spans_of(tensor):
                with ahead.using(span):
                    pass
        assert len(forgotten) == expected


def test_it_ends_when_the_block_does(tensor: FileTensor, way: str) -> None:
    with pytest.raises(KeyboardInterrupt), ReadAhead(spans_of(tensor), distance=1):
        raise KeyboardInterrupt


def test_whoever_uses_a_file_that_has_gone_is_told(tensor: FileTensor) -> None:
    tensor.file.path.unlink()
    span = tensor.span(0, 1)
    with (
        ReadAhead([span]) as ahead,
        pytest.raises(ModelError, match="cannot be read"),
        ahead.using(span),
    ):
        tensor.rows(0, 1)


def test_a_failure_of_the_reader_reaches_the_user(
    tensor: FileTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bool:
        raise MemoryError("no buffer")

    monkeypatch.setattr(MappedFile, "load", fail)
    monkeypatch.setattr(MappedFile, "cached", lambda *_: False)
    span = tensor.span(0, 1)
    with (
        ReadAhead([span]) as ahead,
        pytest.raises(MemoryError, match="no buffer"),
        ahead.using(span),
    ):
        pass
