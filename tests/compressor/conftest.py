"""Fixtures for tests that run whole specs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from compressor import catalog
from compressor.models import resident_memory
from tests.compressor import spine_plugins
from tests.compressor.brief_timing import time_briefly
from tests.compressor.tiny_project import (
    Project,
    forget_catalog,
    forget_modules,
    onnx_project,
    torch_project,
)


@pytest.fixture(scope="session", autouse=True)
def steady_times() -> Iterator[None]:
    """Let all models take the same time, and time them in a moment, as the machine has much to do.

    Tests of timing play a clock (see :mod:`tests.compressor.run.played_clock`).
    """
    with pytest.MonkeyPatch.context() as patch:
        time_briefly(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """Leave it to the system when it writes: a run asks sixty times, and no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def freed_memory_is_kept() -> Iterator[None]:
    """Let the next run have the pages of the last: a run gives them back at each step.

    Half of all pages were mapped anew. Tests of memory give them back (:mod:`tests.peak_memory`).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident_memory, "_trim", lambda: None)
        yield


@contextmanager
def spine_of_tests() -> Iterator[None]:
    """Make the test plugins known."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for kind, names in (("pass", spine_plugins.PASSES), ("exporter", spine_plugins.EXPORTERS)):
            known = {**catalog.BUILT_IN[kind], **names}  # type: ignore[index]
            patch.setitem(catalog.BUILT_IN, kind, known)  # type: ignore[arg-type]
        patch.setattr(sys, "dont_write_bytecode", True)
        forget_catalog()
        forget_modules()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)
    forget_modules()
    forget_catalog()


@pytest.fixture
def spine() -> Iterator[None]:
    """Make the test plugins known."""
    with spine_of_tests():
        yield


@pytest.fixture
def on_onnx(tmp_path: Path, spine: None) -> Project:
    """A project around an ONNX file; a run takes a tenth of a second."""
    return onnx_project(tmp_path / "project")


@pytest.fixture
def on_torch(tmp_path: Path, spine: None) -> Project:
    """A project around a module and its checkpoint; a run takes a second."""
    return torch_project(tmp_path / "project")
