"""The examples in docs/extending.md work: they are written out, imported and used."""

from __future__ import annotations

import ast
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
from safetensors.torch import save_file

from compressor.calibration.collect import collect_statistics
from compressor.errors import ArtifactError, SpecError
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.types.exporter import ExportContext
from compressor.types.passes import LayerRule, PassContext
from compressor.types.statistics import Range
from tests.docs.test_docs import ALL_BLOCKS, PAGES, ROOT

EXAMPLES = {
    block.text.splitlines()[0].removeprefix("# "): block.text
    for block in ALL_BLOCKS
    if block.page == ROOT / "docs" / "extending.md" and block.language == "python"
}


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that imports an example by its file's name, others beside it."""
    package = tmp_path / "examples" / "my_package"
    package.mkdir(parents=True)
    for path, text in EXAMPLES.items():
        (package / Path(path).name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(package.parent)

    def load(name: str) -> ModuleType:
        return importlib.import_module(f"my_package.{name}")

    yield load
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


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
        "my_package/clip_weights.py",
        "my_package/clipping.py",
        "my_package/csv_file.py",
        "my_package/drop_clips.py",
        "my_package/plain.py",
        "my_package/rms.py",
        "my_package/worst_class.py",
    ]


def test_examples_import_what_is_promised_to_them() -> None:
    for path, text in EXAMPLES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("compressor"):
                assert node.module == "compressor.extension", path


def test_the_binding_of_a_weight_pass_is_short() -> None:
    assert len(EXAMPLES["my_package/clip_weights.py"].splitlines()) <= 25


def test_all_python_blocks_compile() -> None:
    for block in ALL_BLOCKS:
        if block.language == "python":
            compile(block.text, str(block), "exec")
    assert len({block.page for block in ALL_BLOCKS if block.language == "python"}) >= 4


def test_weight_pass(example: Any, carrier: OnnxCarrier) -> None:
    cls = example("clip_weights").ClipWeights
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weight_pass_on_a_streamed_checkpoint(
    example: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Rows are changed when they are read, in the type that they have."""
    weight = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 256))).to(dtype)
    weight[2, 7] = 50
    save_file({"fc.weight": weight}, tmp_path / "model.safetensors")
    carrier = open_checkpoint(tmp_path / "model.safetensors")
    step = example("clip_weights").ClipWeights(deviations=3.0)
    after = step.apply(carrier, PassContext(), {})
    (layer,) = carrier.layers()
    wanted = example("clipping").clipped(weight.to(torch.float32), 3.0).to(dtype)
    assert after.carrier.weight(layer).dtype == dtype
    assert torch.equal(after.carrier.weight(layer), wanted)
    assert after.layers[0].details["weight_sqnr_rows"] == 32


def test_planning_a_weight_pass_reads_no_weight(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"fc.weight": torch.ones(64, 256)}, tmp_path / "model.safetensors")
    carrier = open_checkpoint(tmp_path / "model.safetensors")
    step = example("clip_weights").ClipWeights()
    monkeypatch.setattr(step.__class__, "change", None)
    step.survey(carrier, PassContext())
    assert step.preview(carrier, PassContext(), {}).layers() == carrier.layers()


def test_graph_pass(example: Any) -> None:
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[n, 4] x) => (float[n, 4] y) '
        "<float low = {-1.0}, float high = {1.0}, float six = {6.0}> "
        "{ a = Clip (x, low, six) b = Add (a, six) c = Clip (b, low, high) y = Neg (c) }"
    )
    for number, node in enumerate(proto.graph.node):
        node.name = f"node{number}"
    carrier = OnnxCarrier(ir.from_proto(proto))
    step, context = example("drop_clips").DropClips(), PassContext()
    survey = step.survey(carrier, context)
    assert survey.notes == ("watches 'node0', 'node2'",)
    batch = {"x": np.array([[-0.5, 0.0, 2.0, 5.5]], np.float32)}
    statistics = collect_statistics(carrier, [batch], survey.requests)
    outcome = step.apply(carrier, context, statistics)
    assert outcome.notes == ("took out 1 nodes: 'node0'",)
    assert [n.op_type for n in outcome.carrier.graph().graph] == ["Add", "Clip", "Neg"]
    assert [n.op_type for n in carrier.graph().graph] == ["Clip", "Add", "Clip", "Neg"]
    before, after = carrier.runner().run(batch), outcome.carrier.runner().run(batch)
    np.testing.assert_array_equal(before["y"], after["y"])
    with pytest.raises(SpecError, match="finds no Clip"):
        step.survey(linear(np.ones((4, 4), np.float32)), context)


def test_observer(example: Any) -> None:
    observer = example("rms").Rms(factor=2.0)
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


def test_metric(example: Any) -> None:
    metric = example("worst_class").WORST_CLASS
    logits, labels = np.eye(3, dtype=np.float32)[[0, 1, 0, 1, 0]], np.array([0, 0, 0, 1, 1])
    # Batches: the first holds the other class alone.
    batches = [(logits[:2], labels[:2]), (logits[2:], labels[2:])]
    parts = [metric.per_sample({"y": y}, target, len(target)) for y, target in batches]
    values = metric.settled(np.concatenate(parts))
    assert metric.summary(values)["value"] == pytest.approx(50.0)
    assert values.shape == (5,)


def test_exporter(example: Any, carrier: OnnxCarrier, tmp_path: Path) -> None:
    exporter = example("plain").PlainExporter()
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
    cls = example("csv_file").CsvSource
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
