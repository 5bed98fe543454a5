"""Direct reads into a buffer, and the share of a file in the page cache."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.models.checkpoint import reading as direct
from compressor.models.checkpoint.reading import Buffer, cached_share, open_direct

SIZE = 3 * direct._REQUEST + 777


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct") / "data"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


@pytest.fixture
def handle(file: Path) -> int:
    """The file's handle, for direct reads where they are possible here, else for usual ones."""
    try:
        return open_direct(file)
    except OSError:
        return os.open(file, os.O_RDONLY)


@settings(deadline=None, max_examples=50)
@given(first=st.integers(0, SIZE), second=st.integers(0, SIZE))
def test_any_range_is_read(file: Path, first: int, second: int) -> None:
    start, stop = sorted((first, second))
    buffer = Buffer(stop - start)
    try:
        opened = open_direct(file)
    except OSError:
        opened = os.open(file, os.O_RDONLY)
    try:
        assert buffer.fill(opened, start, stop).numpy().tobytes() == file.read_bytes()[start:stop]
    finally:
        os.close(opened)


def test_a_buffer_is_filled_again(file: Path, handle: int) -> None:
    data = file.read_bytes()
    buffer = Buffer(5000)
    for start in (0, 1, 4095, 4096, SIZE - 5000):
        assert (
            buffer.fill(handle, start, start + 5000).numpy().tobytes()
            == (data[start : start + 5000])
        )
    os.close(handle)


def test_a_file_that_is_shorter_than_it_was_is_an_error(file: Path, handle: int) -> None:
    with pytest.raises(OSError, match="Input/output"):
        Buffer(2 * SIZE).fill(handle, 0, SIZE + 5000)
    os.close(handle)


def test_systems_without_direct_reads_say_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    with pytest.raises(OSError, match="Invalid argument"):
        open_direct(file)


def test_memory_in_use_counts_as_cached() -> None:
    assert cached_share(torch.ones(1 << 20)) == 1
