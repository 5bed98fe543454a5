"""The formats of OpenVINO and of ONNX Runtime's builds for phones, each opened in its runtime."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from compressor.errors import ArtifactError, SpecError
from compressor.exporters import OnnxExporter, OpenvinoExporter, OrtExporter
from compressor.exporters.ort.sorted_file import with_sorted_kernels
from compressor.lab.bench.finding import find_artifacts
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types import exporter as exporters
from compressor.types.carrier import Carrier
from compressor.types.exporter import Exporter
from compressor.types.passes import PassContext
from tests.compressor.exporters.hand_made import CONTEXT, images, sample
from tests.compressor.passes.quantize.static_models import statistics

BOTH: tuple[Exporter, ...] = (OrtExporter(), OpenvinoExporter())
NAMES = [made.format for made in BOTH]


@pytest.fixture(scope="module")
def carrier() -> Carrier:
    """The network of the digits sample in 8 bits."""
    context = PassContext(0, frozenset({"ort-cpu", "openvino"}))
    fused = Fuse().apply(sample("digits"), context, {}).carrier
    declared = QuantizeStatic()
    found = statistics(declared, fused, context, [images("digits", 16)])
    return declared.apply(fused, context, found).carrier


@pytest.mark.parametrize("made", BOTH, ids=NAMES)
def test_an_artifact_computes_what_the_graph_does(made: Exporter, carrier: Carrier, tmp_path: Path):
    made.check(carrier)
    files = made.write(carrier, tmp_path, CONTEXT)
    assert all(file.is_file() for file in files)
    runner = made.open(files[0])
    (ours,) = runner.run(images("digits")).values()
    (theirs,) = carrier.runner().run(images("digits")).values()
    assert np.abs(ours - theirs).max() < 0.05 * np.abs(theirs).max()  # a tie may be the other code
    library = "onnxruntime" if made.format == "ort" else "openvino"
    assert runner.runtime.startswith(library)
    sizes = sum(file.stat().st_size for file in files)
    assert abs(made.predict(carrier) - sizes) < 0.5 * sizes  # an estimate
    (found,) = find_artifacts([files[0]])
    assert found.format == made.format
    if made.format == "openvino":
        assert set(found.files) == set(files)


@pytest.mark.parametrize("made", BOTH, ids=NAMES)
def test_the_same_model_gives_the_same_bytes(made: Exporter, carrier: Carrier, tmp_path: Path):
    """ONNX Runtime sorts a table by addresses, and OpenVINO counts names through a process."""
    written = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        written.append([f.read_bytes() for f in made.write(carrier, folder, CONTEXT)])
    assert written[0] == written[1] == written[2]


def test_weights_stay_codes(carrier: Carrier, tmp_path: Path):
    """No runtime's own optimizer may store floats in their place."""
    floats = tmp_path / "float"
    floats.mkdir()
    whole = OnnxExporter().write(sample("digits"), floats, CONTEXT)[0].stat().st_size
    ort = OrtExporter().write(carrier, tmp_path, CONTEXT)[0]
    xml, weights = OpenvinoExporter().write(carrier, tmp_path, CONTEXT)
    onnx = OnnxExporter().write(carrier, tmp_path, CONTEXT)[0].stat().st_size
    assert weights.stat().st_size < 1.1 * onnx < 0.5 * whole
    assert ort.stat().st_size < 0.6 * whole
    assert 'element_type="i8"' in xml.read_text()


def test_the_list_of_operators_is_that_of_the_file(carrier: Carrier, tmp_path: Path):
    ort, config = OrtExporter().write(carrier, tmp_path, CONTEXT)
    lines = config.read_text().splitlines()
    assert lines[0] == "# Operators of model.ort"  # no path of this machine
    listed = {name for line in lines[1:] for name in re.findall(r"[A-Z]\w+", line)}
    assert "QLinearConv" in listed
    held = {name.encode() for name in listed}
    assert all(name in ort.read_bytes() for name in held)


@pytest.mark.parametrize(
    "data", [b"", b"ORTM" * 30, b"\x10\0\0\0ORTM" + bytes(40), b"\x20\0\0\0" + b"\xff" * 60]
)
def test_a_file_of_another_layout_is_refused(data: bytes):
    with pytest.raises(ArtifactError, match="unknown layout"):
        with_sorted_kernels(data)


def test_damaged_files_are_refused(carrier: Carrier, tmp_path: Path):
    for made in BOTH:
        main = made.write(carrier, tmp_path, CONTEXT)[0]
        main.write_bytes(main.read_bytes()[:200])
        with pytest.raises(ArtifactError):
            made.open(main)


def test_openvino_has_to_be_installed(carrier: Carrier, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exporters, "find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r'run pip install "compressor\[openvino\]"'):
        OpenvinoExporter().check(carrier)
