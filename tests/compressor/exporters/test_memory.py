"""Freed memory that is kept, and given back."""

from __future__ import annotations

import ctypes
import mmap
import resource
from pathlib import Path

import pytest
import torch

from compressor.models.checkpoint.reading import kept_memory


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def faults_of(rounds: int) -> int:
    """Page faults of taking four times 8 MiB and freeing them, again and again."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        held = [torch.empty(8 << 20, dtype=torch.uint8).fill_(1) for _ in range(4)]
        held.clear()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc"
)
def test_memory_is_kept_within_the_block_and_given_back_after_it() -> None:
    with kept_memory(64 << 20):
        faults_of(60)  # until the heap has grown by what is freed and taken again
        inside = faults_of(60)
        held = anonymous()
    assert inside < 60 * (8 << 20) // mmap.PAGESIZE  # less than one of four tensors
    assert anonymous() < held - (16 << 20)


def test_what_is_computed_after_the_block_maps_no_tensor_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: dict[int, int] = {}

    class Library:
        mallopt = staticmethod(limits.__setitem__)
        malloc_trim = staticmethod(lambda _: 1)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library)
    with kept_memory(64 << 20):
        pass
    trimmed, mapped = limits[-1], limits[-3]  # their numbers in <malloc.h>
    assert mapped == 32 << 20  # where glibc's own adjustment ends; it takes twice that to trim
    assert trimmed == 2 * mapped


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    with kept_memory(1 << 20):
        assert torch.ones(3).sum() == 3
