"""What a pass measured once is there for the next run on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.run import workspace
from compressor.run.store import Store
from compressor.run.workspace import KeptNumbers

IDENTITY = {"timings": "onnxruntime", "threads": 1}


def test_numbers_outlive_the_run(tmp_path: Path):
    kept = KeptNumbers(Store(tmp_path / "store"))
    assert kept.read(IDENTITY) is None
    kept.write(IDENTITY, {"a": 0.5})
    kept.write(IDENTITY, {"a": 0.1 + 0.2, "b": 1e-7})
    again = KeptNumbers(Store(tmp_path / "store"))
    assert again.read(IDENTITY) == {"a": 0.1 + 0.2, "b": 1e-7}
    assert again.read({**IDENTITY, "threads": 2}) is None


def test_they_hold_on_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept = KeptNumbers(Store(tmp_path / "store"))
    kept.write(IDENTITY, {"a": 0.5})
    monkeypatch.setattr(workspace, "machine", lambda: {"processor": "another"})
    assert kept.read(IDENTITY) is None
