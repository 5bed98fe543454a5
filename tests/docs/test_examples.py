"""The examples in docs/extending.md work: they are written out, imported and used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper, parser

import compressor.calibration.observers
import compressor.calibration.sources
import compressor.exporters
import compressor.passes
from compressor.errors import ArtifactError, SpecError
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.types.exporter import ExportContext
from compressor.types.passes import LayerRule, PassContext
from compressor.types.statistics import Range
from tests.docs.test_docs import ALL_BLOCKS, PAGES, ROOT

PACKAGES = (
    compressor.passes,
    compressor.exporters,
    compressor.calibration.observers,
    compressor.calibration.sources,
)
EXAMPLES = {
    block.text.splitlines()[0].removeprefix("# "): block.text
    for block in ALL_BLOCKS
    if block.page == ROOT / "docs" / "extending.md" and block.language == "python"
}


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that imports an example by its path, others beside it."""
    for path, text in EXAMPLES.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for package in PACKAGES:
        place = tmp_path.joinpath(*package.__name__.split("."))
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(place)])
    names = {path: path.removesuffix(".py").replace("/", ".") for path in EXAMPLES}

    def load(path: str) -> ModuleType:
        return importlib.import_module(names[path])

    yield load
    kept = {package.__name__ for package in PACKAGES}
    for name in names.values():
        for module in {name, name.rpartition(".")[0]} - kept:
            sys.modules.pop(module, None)


def linear(weight: np.ndarray[Any, Any]) -> OnnxCarrier:
    rows, columns = weight.shape
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> '
        f"g (float[n, {columns}] x) => (float[n, {rows}] y) "
        "{ y = Gemm <transB = 1> (x, w) }"
    )
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return OnnxCarrier(ir.from_proto(proto))


@pytest.fixture
def carrier() -> OnnxCarrier:
    weight = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
    weight[2, 7] = 50
    return linear(weight)


def test_examples_are_complete() -> None:
    assert sorted(EXAMPLES) == [
        "compressor/calibration/observers/rms.py",
        "compressor/calibration/sources/csv_file.py",
        "compressor/exporters/plain/exporter.py",
        "compressor/passes/clip/clip_weights.py",
        "compressor/passes/clip/clipping.py",
    ]


def test_all_python_blocks_compile() -> None:
    for block in ALL_BLOCKS:
        if block.language == "python":
            compile(block.text, str(block), "exec")
    assert len({block.page for block in ALL_BLOCKS if block.language == "python"}) >= 4


def test_pass(example: Any, carrier: OnnxCarrier) -> None:
    cls = example("compressor/passes/clip/clip_weights.py").ClipWeights
    step, context = cls(deviations=3.0), PassContext()
    survey = step.survey(carrier, context)
    assert [(row.action, row.touched) for row in survey.layers] == [("clip", True)]
    (layer,) = carrier.layers()
    before, after = carrier.weight(layer), step.apply(carrier, context, {}).carrier.weight(layer)
    row = before[2]
    assert after[2, 7] == pytest.approx(float(row.mean() + 3 * row.std(correction=0)), rel=1e-5)
    assert after[2, 7] < 20
    inside = (before - before.mean(1, keepdim=True)).abs() < 2.9 * before.std(1, keepdim=True)
    assert torch.equal(after[inside], before[inside])
    with pytest.raises(SpecError, match="touches no layer"):
        cls(layers=(LayerRule(match="*", skip=True),)).survey(carrier, context)


def test_observer(example: Any) -> None:
    observer = example("compressor/calibration/observers/rms.py").Rms(factor=2.0)
    values = torch.tensor([3.0, -4.0, 0.0, 1.0])
    whole = observer.update(observer.start(), values)
    parts = observer.merge(
        observer.update(observer.start(), values[:3]), observer.update(observer.start(), values[3:])
    )
    reach = 2 * (26 / 4) ** 0.5
    for state in (whole, parts):
        found = observer.result(state)
        assert (found.low, found.high) == pytest.approx((-reach, reach))
    assert observer.placeholder() == Range(-1.0, 1.0)
    with pytest.raises(ValueError, match="no values"):
        observer.result(observer.start())


def test_exporter(example: Any, carrier: OnnxCarrier, tmp_path: Path) -> None:
    exporter = example("compressor/exporters/plain/exporter.py").PlainExporter()
    exporter.check(carrier)
    staging = tmp_path / "staging"
    staging.mkdir()
    (path,) = exporter.write(carrier, staging, ExportContext("name", "0" * 64))
    assert list(staging.iterdir()) == [path]
    assert 0 < path.stat().st_size - exporter.predict(carrier) < 1000
    batch = {"x": np.ones((2, 256), np.float32)}
    outputs, wanted = exporter.open(path).run(batch), carrier.runner().run(batch)
    np.testing.assert_array_equal(outputs["y"], wanted["y"])
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ArtifactError):
        exporter.open(path)


def test_source(example: Any, tmp_path: Path) -> None:
    cls = example("compressor/calibration/sources/csv_file.py").CsvSource
    path = tmp_path / "table.csv"
    path.write_text("a,b\n1,10\n2,20\n3,30\n", encoding="utf-8")
    source = cls(path=path, fields={"x": "b"}, samples=2)
    info = source.info()
    assert info.samples == 2
    assert [str(field) for field in info.fields] == ["x float32[batch, 1]"]
    batches = [batch["x"].tolist() for batch in source.batches(2)]
    assert batches == [[[10.0], [20.0]]]
    digest = source.digest()
    path.write_text("a,b\n1,10\n2,21\n3,30\n", encoding="utf-8")
    assert source.digest() != digest


def test_pages_name_no_place_of_this_machine() -> None:
    home = str(ROOT)
    for page in PAGES:
        assert home not in page.read_text(encoding="utf-8"), page
