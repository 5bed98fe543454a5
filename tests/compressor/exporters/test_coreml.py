"""Core ML packages: names, codes and bytes; nothing here runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from compressor.errors import ArtifactError, SpecError
from compressor.exporters import CoremlExporter
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types import exporter as exporters
from compressor.types.carrier import Carrier
from tests.compressor.exporters.hand_made import CONTEXT
from tests.compressor.exporters.test_litert import TARGET, Network, noise, opened
from tests.compressor.passes.quantize.static_models import statistics

SIZE = (3, 24, 24)
LAYERS = 6


def written(carrier: Carrier, folder: Path) -> Path:
    exporter = CoremlExporter()
    exporter.check(carrier)
    files = exporter.write(carrier, folder, CONTEXT)
    package = folder / "model.mlpackage"
    assert set(files) == {x for x in package.rglob("*") if x.is_file()}
    return package


@pytest.fixture(scope="module")
def network() -> Carrier:
    return Fuse().apply(opened(Network(), *SIZE), TARGET, {}).carrier


@pytest.fixture(scope="module")
def in_codes(network: Carrier) -> Carrier:
    declared = QuantizeStatic()
    found = statistics(declared, network, TARGET, [noise(16, *SIZE, seed=3)])
    return declared.apply(network, TARGET, found).carrier


@pytest.fixture(scope="module")
def package(in_codes: Carrier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(in_codes, tmp_path_factory.mktemp("coreml"))


def program(package: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the names of inputs and outputs, and the operators."""
    from coremltools.models.utils import load_spec

    spec = load_spec(str(package))
    (function,) = spec.mlProgram.functions.values()
    operators = function.block_specializations[function.opset].operations
    return (
        [x.name for x in spec.description.input],
        [x.name for x in spec.description.output],
        [x.type for x in operators],
    )


def test_a_package_has_the_names_and_codes_of_the_model(in_codes: Carrier, package: Path):
    inputs, outputs, operators = program(package)
    assert inputs == ["x"]
    assert outputs == [value.name for value in in_codes.graph().graph.outputs]
    assert operators.count("constexpr_affine_dequantize") == LAYERS
    assert operators.count("quantize") >= LAYERS
    compared = CoremlExporter().check_written(in_codes, package)
    assert compared == f"the codes of {LAYERS} weights"
    size = sum(file.stat().st_size for file in package.rglob("*") if file.is_file())
    assert size == pytest.approx(CoremlExporter().predict(in_codes), rel=0.6)


@pytest.mark.slow
def test_the_same_model_gives_the_same_bytes(in_codes: Carrier, package: Path, tmp_path: Path):
    again = written(in_codes, tmp_path)
    for file in package.rglob("*"):
        if file.is_file():
            assert (again / file.relative_to(package)).read_bytes() == file.read_bytes(), file


def test_other_codes_are_found(in_codes: Carrier, package: Path, tmp_path: Path):
    weights = "Data/com.apple.CoreML/weights/weight.bin"
    other = tmp_path / "model.mlpackage"
    for file in package.rglob("*"):
        if file.is_file():
            target = other / file.relative_to(package)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    data = bytearray((other / weights).read_bytes())
    data[-1] ^= 1
    data[len(data) // 2] ^= 1
    (other / weights).write_bytes(bytes(data))
    with pytest.raises(ArtifactError, match=f"holds the codes of . of {LAYERS} weights"):
        CoremlExporter().check_written(in_codes, other)
    (other / weights).unlink()
    with pytest.raises(ArtifactError, match="Core ML Tools do not read it"):
        CoremlExporter().check_written(in_codes, other)


def test_weights_alone_stay_codes(tmp_path: Path):
    module = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 8, 3))
    model = QuantizeWeights(bits=8, group=None).apply(opened(module, *SIZE), TARGET, {}).carrier
    package = written(model, tmp_path)
    assert CoremlExporter().check_written(model, package) == "the codes of 2 weights"
    weights = 3 * 64 * 9 + 64 * 8 * 9
    held = package / "Data/com.apple.CoreML/weights/weight.bin"
    assert held.stat().st_size < 2 * weights


def test_what_cannot_be_written_is_named(network: Carrier, monkeypatch: pytest.MonkeyPatch):
    grouped = QuantizeWeights(bits=4, group=8).apply(opened(nn.Linear(16, 4), 16), TARGET, {})
    with pytest.raises(SpecError, match="has scales for groups of a row, which Core ML has not"):
        CoremlExporter().check(grouped.carrier)
    with pytest.raises(ArtifactError, match="only Apple's systems run Core ML"):
        CoremlExporter().open(Path("model.mlpackage"))
    monkeypatch.setattr(exporters, "find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r'run pip install "compressor\[coreml\]"'):
        CoremlExporter().check(network)


@pytest.mark.slow
def test_float16_is_an_option(tmp_path: Path):
    carrier = opened(nn.Conv2d(3, 8, 3), *SIZE)
    CoremlExporter(precision="float16").write(carrier, tmp_path, CONTEXT)
    assert "cast" in program(tmp_path / "model.mlpackage")[2]
