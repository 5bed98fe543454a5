"""The builder ``gpu``, over a stand-in for its package: no machine of these tests has a GPU.

This shows that the common interface is called as it is documented, and all around it. It cannot
show that the real package does what it says.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from compressor.errors import ArtifactError, ModelError, SpecError
from compressor.exporters import TensorrtExporter
from compressor.exporters.tensorrt import building as builders
from compressor.exporters.tensorrt import runner
from compressor.exporters.tensorrt.profiles import BatchRange
from compressor.types.exporter import ExportContext
from compressor.types.tensors import Feed
from tests.compressor.exporters.hand_made import CONTEXT, quantized, rows, worst
from tests.compressor.tiny_project import onnx_project

FAKE = Path(__file__).parent / "fake_package"
BATCH = BatchRange(min=2, opt=3, max=4)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a GPU of compute capability 8.9 and the package; tensors do not move."""
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Fake GPU")
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(runner, "_DEVICE", "cpu")
    importlib.invalidate_caches()
    yield
    sys.modules.pop("tensorrt", None)


def made(**options: Any) -> TensorrtExporter:
    return TensorrtExporter(builder="gpu", **{"batch": BATCH, **options})


@pytest.mark.usefixtures("gpu")
def test_built_and_run(tmp_path: Path) -> None:
    exporter, carrier = made(), quantized()
    exporter.check(carrier)
    path, manifest = exporter.write(carrier, tmp_path, CONTEXT)
    content = json.loads(manifest.read_text(encoding="utf-8"))
    assert content["versions"] == {"tensorrt": "", "gpu": "Fake GPU"}
    assert [row["computed"] for row in content["quantized"]] == ["int8", "int8"]
    assert exporter.cannot_run == ""
    assert exporter.predict(carrier) < 200_000  # the weights alone: nothing is measured for it
    opened = exporter.open(path)
    assert opened.runtime == "tensorrt 10.99 (Fake GPU)"
    for count in (1, 2, 4, 7):  # below the smallest batch, inside, and in parts
        assert worst(opened.run(rows(count)), carrier.runner().run(rows(count))) < 1e-5
    assert worst(opened.run(Feed(rows(3))), carrier.runner().run(rows(3))) < 1e-5
    with pytest.raises(ModelError, match=r"has shape \[7, 64\], which the engine was not built"):
        opened.run(Feed(rows(7)))  # a feed is not cut
    with pytest.raises(ModelError, match="input 'x': is missing"):
        opened.run({"y": np.zeros(3, np.float32)})
    with pytest.raises(ModelError, match=r"has shape \[2, 65\], which the engine was not built"):
        opened.run({"x": np.zeros((2, 65), np.float32)})
    path.write_bytes(b"no engine")
    with pytest.raises(ArtifactError, match=r"is not opened by TensorRT 10\.99"):
        exporter.open(path)


@pytest.mark.usefixtures("gpu")
def test_options_of_the_gpu_alone(tmp_path: Path) -> None:
    options = {
        "sparse_weights": True,
        "version_compatible": True,
        "hardware_compatibility": "ampere-plus",
        "timing_cache": "cache/timing.bin",
    }
    context = ExportContext("a-test", "0" * 64, folder=tmp_path / "spec")
    (tmp_path / "spec").mkdir()
    for name, known in (("one", b"measured;"), ("two", b"measured;measured;")):
        (tmp_path / name).mkdir()
        path = made(**options).write(quantized(), tmp_path / name, context)[0]
        assert (tmp_path / "spec" / "cache" / "timing.bin").read_bytes() == known
    engine = json.loads(path.read_bytes())
    assert engine["flags"] == ["VERSION_COMPATIBLE", "SPARSE_WEIGHTS"]
    assert engine["hardware"] == "AMPERE_PLUS"
    assert engine["profiles"] == [{"x": [[2, 64], [3, 64], [4, 64]]}]
    (tmp_path / "spec" / "cache" / "timing.bin").write_bytes(b"other version")
    (tmp_path / "three").mkdir()
    with pytest.raises(SpecError, match="timing-cache: was written by another version of TensorRT"):
        made(**options).write(quantized(), tmp_path / "three", context)
    assert "refitted" in made(strip_weights=True).cannot_run


@pytest.mark.usefixtures("gpu")
def test_what_it_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="compute-capability: is not for builder 'gpu', which"):
        made(compute_capability=("8.9",)).check(quantized())
    level = made(hardware_compatibility="same-compute-capability")
    with pytest.raises(SpecError, match="same-compute-capability: is not known to the installed"):
        level.write(quantized(), tmp_path, CONTEXT)
    assert not list(tmp_path.iterdir())


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(builders, "find_spec", lambda _: None)
    with pytest.raises(SpecError, match="'gpu': needs tensorrt, which is not installed; pip inst"):
        made().check(quantized())
    monkeypatch.setattr(builders, "find_spec", lambda _: "found")
    with pytest.raises(SpecError, match="needs an NVIDIA GPU, and PyTorch finds none; set builder"):
        made().check(quantized())


@pytest.mark.usefixtures("gpu")
def test_a_run_measures_the_engine(tmp_path: Path) -> None:
    project = onnx_project(tmp_path)
    project.spec["exports"] = [
        {"format": "tensorrt", "builder": "gpu", "batch": {"opt": 8, "max": 16}}
    ]
    project.spec["limits"]["metric-drop"] = 1.0
    assert project.run().exit_code == 0
    (artifact,) = project.report()["artifacts"]
    assert artifact["runtime"] == "tensorrt 10.99 (Fake GPU)"
    assert artifact["metric"]["value"] == 100.0
    assert artifact["latency_ms"]["p50"] > 0
    assert artifact["latency_ratio"] is None
    assert artifact["latency_ratio_reason"] == "timed on the GPU, the float model on the CPU"
    assert [limit["name"] for limit in project.report()["limits"]] == ["metric-drop"]
