"""Fixtures for tests that run whole specs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compressor import catalog
from compressor.run import timing
from tests.compressor import spine_plugins
from tests.compressor.tiny_project import (
    Project,
    forget_catalog,
    forget_modules,
    onnx_project,
    torch_project,
)


@pytest.fixture
def spine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the test plugins known, and time artifacts in a few rounds only."""
    for kind, names in (("pass", spine_plugins.PASSES), ("exporter", spine_plugins.EXPORTERS)):
        monkeypatch.setitem(
            catalog.BUILT_IN,  # type: ignore[arg-type]
            kind,
            {**catalog.BUILT_IN[kind], **names},  # type: ignore[index]
        )
    monkeypatch.setattr(timing, "_BUDGET", 0.0)
    monkeypatch.setattr(timing, "_LEAST_OPENINGS", 2)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    forget_catalog()
    forget_modules()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    forget_modules()
    forget_catalog()


@pytest.fixture
def on_onnx(tmp_path: Path, spine: None) -> Project:
    """A project around an ONNX file; a run takes a tenth of a second."""
    return onnx_project(tmp_path / "project")


@pytest.fixture
def on_torch(tmp_path: Path, spine: None) -> Project:
    """A project around a module and its checkpoint; a run takes a second."""
    return torch_project(tmp_path / "project")
