"""Files whose inner names have a few letters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from compressor.exporters import OnnxExporter
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.onnx.ort_runner import graph_runner
from compressor.types.exporter import USUAL
from tests.compressor.exporters.hand_made import CONTEXT, images, quantized, rows, sample, worst
from tests.compressor.graph.channels.channel_graphs import graph

BRANCHES = """(float[N, 4] x, bool c) => (float[N, 4] y) {
    doubled = Mul(x, two)
    chosen = If (c) <
        then_branch = then () => (float[N, 4] sum) { sum = Add(doubled, one) },
        else_branch = other () => (float[N, 4] sum) {
            inner = MatMul(doubled, square) sum = Sub(inner, one)
        }
    >
    y = Relu(chosen)
}"""


def names(model: onnx.ModelProto) -> tuple[list[str], list[str]]:
    graph = model.graph
    return [v.name for v in (*graph.input, *graph.output)], [
        t.name for t in graph.initializer if len(t.dims) >= 2
    ]


@pytest.mark.parametrize("external", ["never", "always"])
@pytest.mark.parametrize("made", [lambda: sample("digits"), quantized])
def test_short_names_change_nothing_else(made, external, tmp_path: Path) -> None:
    carrier = made()
    found = {}
    for kind in ("full", "short"):
        exporter = OnnxExporter(names=kind, external_data=external)
        exporter.check(carrier)
        (tmp_path / kind).mkdir()
        files = exporter.write(carrier, tmp_path / kind, USUAL)
        assert sum(f.stat().st_size for f in files) == exporter.predict(carrier)
        assert "read back" in exporter.check_written(carrier, files[0])
        found[kind] = files[0]
    full, short = (onnx.load(path) for path in found.values())
    assert names(full) == names(short)
    assert not any(node.name for node in short.graph.node)
    inner = {name for node in short.graph.node for name in node.output} - set(names(short)[0])
    assert max(map(len, inner)) <= 2
    assert found["short"].stat().st_size < found["full"].stat().st_size
    batch = images("digits", 3) if carrier.inputs[0].name == "image" else rows(3)
    left, right = (OnnxExporter().open(path).run(batch) for path in found.values())
    assert worst(left, right) == 0


@pytest.mark.parametrize("branch", [True, False])
def test_branches_read_what_they_read_before(branch: bool, tmp_path: Path) -> None:
    weights = {"two": (1,), "one": (4,), "square": (4, 4)}
    model = graph(BRANCHES, weights, noted=False)
    carrier = OnnxCarrier(model)
    (file,) = OnnxExporter(names="short").write(carrier, tmp_path, CONTEXT)
    feed = {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "c": np.asarray(branch)}
    (wanted,) = graph_runner(model).run(feed).values()
    (found,) = OnnxExporter().open(file).run(feed).values()
    np.testing.assert_array_equal(found, wanted)


def test_kept_names_are_given_to_nothing_else(tmp_path: Path) -> None:
    # Inputs and outputs are called as the first letters that are given.
    text = """(float[N, 4] a) => (float[N, 4] c) {
        first = Mul(a, scale) second = Relu(first) c = MatMul(second, b)
    }"""
    carrier = OnnxCarrier(graph(text, {"scale": (4,), "b": (4, 4)}))
    (file,) = OnnxExporter(names="short").write(carrier, tmp_path, CONTEXT)
    model = ir.load(file)
    values = [v.name for v in (*model.graph.inputs, *model.graph.initializers.values())]
    values += [v.name for node in model.graph for v in node.outputs]
    assert sorted(values) == ["a", "b", "c", "d", "e", "f"]
