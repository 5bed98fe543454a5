"""Temporary folders go when their process does, however that ends."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from compressor.files import scratch


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def age(folder: Path, seconds: float = 3600.0) -> None:
    past = time.time() - seconds
    os.utime(folder, (past, past))


def test_what_a_killed_process_left_is_removed_by_the_next(parent: Path) -> None:
    child = os.fork()
    if child == 0:
        with scratch() as folder:
            (folder / "weights").write_text("1")
            os._exit(9)
    os.waitpid(child, 0)
    (left,) = parent.iterdir()
    with scratch():
        assert left.exists()  # it may be one that is about to be locked
    age(left)
    with scratch() as folder:
        assert list(parent.iterdir()) == [folder]
    assert not list(parent.iterdir())


def test_those_of_living_processes_and_of_others_stay(parent: Path) -> None:
    foreign, link = parent / "other-1", parent / "compressor-link"
    foreign.mkdir()
    link.symlink_to(foreign)
    with scratch() as outer:
        (outer / "weights").write_text("1")
        for folder in (outer, foreign):
            age(folder)
        with scratch():
            assert (outer / "weights").exists()
    assert sorted(parent.iterdir()) == [link, foreign]
