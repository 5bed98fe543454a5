"""Graphs that other tools quantized: changed where nothing is lost, refused by name elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import SpecError
from compressor.exporters import OnnxExporter
from compressor.exporters.tensorrt.graph_form import in_terms_of_tensorrt, with_node_names
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.onnx.ort_session import OrtRunner
from tests.compressor.exporters.hand_made import Builder, entry, quantized, rows

UINT8 = ir.DataType.UINT8
TENSORRT = OnnxExporter(target="tensorrt")


def as_written(carrier: OnnxCarrier) -> Any:
    """Run a graph as it is, without the runtime's integer kernels."""
    proto = ir.to_proto(carrier.graph()).SerializeToString()
    return OrtRunner(proto, "graph", optimize=False).run(rows())["output"]


EXACT: list[dict[str, Any]] = [
    {"activations": UINT8, "activation_zero": 128},
    {"weights": UINT8, "weight_zero": -128, "activations": None},
    {"weights": UINT8, "weight_zero": -128, "activations": UINT8, "activation_zero": 128},
    {"integer_bias": True},
    {"activations": UINT8, "activation_zero": 128, "integer_bias": True},
]  # codes of 128 are written as int8 there, -128


@pytest.mark.parametrize("options", EXACT)
def test_what_is_exact_is_changed(options: dict[str, Any]) -> None:
    carrier = quantized(**options)
    with pytest.raises(SpecError):
        TENSORRT.check(carrier)
    changed = OnnxCarrier(in_terms_of_tensorrt(carrier.graph()))
    TENSORRT.check(changed)
    left, right = as_written(changed), as_written(carrier)
    np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)  # sums may be in another order
    assert {v.dtype for v in changed.graph().graph.initializers.values()} <= {
        ir.DataType.INT8,
        ir.DataType.FLOAT,
    }


def test_what_needs_no_change_is_left_alone() -> None:
    graph = quantized().graph()
    assert in_terms_of_tensorrt(graph) is graph
    assert with_node_names(graph) is graph


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"activations": UINT8, "activation_zero": 0},
            "layer 'first', node 'node_first_codes': is uint8 with zero point 0; TensorRT takes "
            "int8 with zero point 0, which is the same only for uint8 with 128; quantize the float",
        ),
        ({"activations": UINT8, "activation_zero": 131}, "is uint8 with zero point 131"),
        ({"weights": UINT8, "activations": None}, "layer 'first'.*is uint8 with zero point 0"),
    ],
)
def test_what_is_not_exact_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        in_terms_of_tensorrt(quantized(**options).graph())


def test_codes_that_something_else_reads_are_refused() -> None:
    made, x = Builder(), entry()
    scale = made.constant("scale", np.float32(0.05))
    zero = made.constant("zero", np.uint8(128))
    codes = made.node("QuantizeLinear", [x, scale, zero], "codes")
    moved = made.node("Flatten", [codes], "moved")
    result = made.node("Cast", [moved], "y", to=int(ir.DataType.FLOAT))
    model = made.model([x], result, 64)
    with pytest.raises(SpecError, match=r"gives uint8 codes to node 'node_y' \(Cast\), which int8"):
        in_terms_of_tensorrt(model)


def test_nodes_without_a_name_get_one() -> None:
    graph = quantized().graph().clone()
    nodes = list(graph.graph)
    nodes[0].name, nodes[1].name, nodes[2].name = "", None, nodes[3].name
    named = with_node_names(graph)
    names = [node.name for node in named.graph]
    assert len(set(names)) == len(names)
    assert all(names)
    assert [node.name for node in graph.graph][0] == ""  # noqa: RUF015
    assert names == [node.name for node in with_node_names(graph).graph]
