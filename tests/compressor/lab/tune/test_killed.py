"""A search that is killed, and goes on when it is called again."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.compressor.tiny_project import Project, sample_images


def started(folder: Path) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-m", "compressor", "tune", "spec.yaml")
    options = ("--max-metric-drop", "30", "--rounds", "2")
    return subprocess.Popen([*command, *options], cwd=folder, stderr=subprocess.DEVNULL)


def entries(folder: Path) -> int:
    return len(list(folder.glob("out/.compressor/*/??/*/result.json")))


@pytest.mark.slow
def test_a_search_that_is_killed_twice_ends_with_the_same_spec(on_onnx: Project):
    on_onnx.spec["passes"] = [{"pass": "quantize-static", "activations": {"observer": "min-max"}}]
    np.savez(on_onnx.folder / "calib.npz", image=sample_images(2, 256))
    on_onnx.spec["data"]["calibration"]["samples"] = 64
    assert on_onnx.path.is_file()
    alone = on_onnx.folder.parent / "alone"
    shutil.copytree(on_onnx.folder, alone)
    for least in (4, 12):
        process = started(on_onnx.folder)
        while entries(on_onnx.folder) < least:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.02)
        process.kill()
        assert process.wait() == -9
    for folder in (on_onnx.folder, alone):
        assert started(folder).wait() == 0
    for name in ("tuned.yaml", "out/tiny-tuned/model.onnx"):
        assert (on_onnx.folder / name).read_bytes() == (alone / name).read_bytes()
