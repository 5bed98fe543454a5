"""Opsets of the ONNX export: stated ones, the one by default, and what each cannot express."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.errors import SpecError
from compressor.exporters import OnnxExporter
from compressor.exporters.onnx.opsets import convert, newest_opset
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from tests.compressor.exporters.hand_made import (
    CLASSES,
    CONTEXT,
    FEATURES,
    HIDDEN,
    Builder,
    entry,
    quantized,
    rows,
    sample,
    stored,
)
from tests.compressor.graph.test_inference import with_sequences


def test_an_opset_that_nobody_knows() -> None:
    with pytest.raises(SpecError):
        OnnxExporter(opset=16)
    with pytest.raises(SpecError, match=f"opset: .*set opset: {newest_opset()} or lower"):
        OnnxExporter(opset=newest_opset() + 1).check(quantized())


def test_an_opset_too_low_for_4_bits_names_the_layer() -> None:
    carrier = quantized(ir.DataType.INT4, None, blocks=True)
    with pytest.raises(SpecError, match=r"layer 'first': .*int4; set opset: 21"):
        OnnxExporter(opset=20, target="tensorrt").check(carrier)


def test_sequences_and_optional_values_have_types_of_their_own(tmp_path: Path) -> None:
    carrier, made = open_onnx(with_sequences(tmp_path / "source.onnx"), 21), OnnxExporter()
    made.check(carrier)
    written = made.write(carrier, tmp_path, CONTEXT)[0]
    given = np.ones((2, 3), np.float32)
    assert made.open(written).run({"x": given})["y"].shape == (6, 3)


@pytest.mark.parametrize("opset", [17, 21, 25])
def test_codes_of_2_bits_are_stored_in_2_bits(opset: int, tmp_path: Path) -> None:
    carrier = quantized(ir.DataType.INT2, None, blocks=True)
    made = OnnxExporter(opset=opset)
    made.check(carrier)
    path = made.write(carrier, tmp_path, CONTEXT)[0]
    assert len(stored(path)["first.weight"].raw_data) == FEATURES * HIDDEN // 4
    assert made.open(path).run(rows())["output"].shape == (7, CLASSES)


def test_an_opset_without_blocks() -> None:
    carrier = quantized(ir.DataType.INT8, None, blocks=True)
    OnnxExporter().check(carrier)
    with pytest.raises(SpecError, match="set opset: 21"):
        OnnxExporter(opset=20, target="tensorrt").check(carrier)


@pytest.mark.parametrize(("operator", "first"), [("Gelu", 20), ("Mish", 18)])
def test_an_opset_without_the_operator(operator: str, first: int) -> None:
    made = Builder()
    x = entry()
    carrier = OnnxCarrier(made.model([x], made.node(operator, [x], "y"), FEATURES))
    with pytest.raises(SpecError, match=rf"node_y.*{operator}.*set opset: {first}"):
        OnnxExporter(opset=17).check(carrier)
    OnnxExporter(opset=first).check(carrier)


@pytest.mark.parametrize(
    ("have", "operator", "written"),
    [(21, "Relu", 21), (23, "Relu", 21), (23, "RMSNormalization", 23)],
)
def test_the_opset_that_nobody_states(
    tmp_path: Path, have: int, operator: str, written: int
) -> None:
    """It is 21, or a later one where the model has operators that 21 does not know."""
    made = Builder()
    x = entry()
    inputs = (
        [x, made.constant("scale", np.ones(FEATURES, np.float32))]
        if operator.startswith("RMS")
        else [x]
    )
    model = made.model([x], made.node(operator, inputs, "y"), FEATURES)
    model.opset_imports[""] = have
    carrier = OnnxCarrier(model)
    OnnxExporter().check(carrier)
    path = OnnxExporter().write(carrier, tmp_path, CONTEXT)[0]
    assert onnx.load(path).opset_import[0].version == written


def padded(*, axes: bool = False, mode: str = "constant") -> onnx.ModelProto:
    """Pad ``[n, 4]`` on all axes, or on the last, and take the positive part."""
    constants = {"pads": np.array([1, 1] if axes else [1, 2, 1, 0]), "value": np.float32(3)}
    constants |= {"axes": np.array([1])} if axes else {}
    nodes = [
        helper.make_node("Pad", ["x", *constants], ["wide"], mode=mode),
        helper.make_node("Relu", ["wide"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "padded",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", "columns"])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
def test_padding_of_all_axes_is_brought_down(mode: str) -> None:
    """The converter knows no Pad below opset 18, which static int8 puts before convolutions."""
    lower = ir.to_proto(convert(ir.from_proto(padded(mode=mode)), 17))
    assert [(e.domain, e.version) for e in lower.opset_import] == [("", 17)]
    onnx.checker.check_model(lower, full_check=True)
    x = np.arange(12, dtype=np.float32).reshape(3, 4) - 5
    ours, theirs = (
        ort.InferenceSession(m.SerializeToString()).run(None, {"x": x})[0]
        for m in (lower, padded(mode=mode))
    )
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("given", [{"axes": True}, {"mode": "wrap"}])
def test_an_operator_that_cannot_be_brought_down(given: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"Pad cannot be converted .* to 17; set opset: 18"):
        convert(ir.from_proto(padded(**given)), 17)


def test_a_network_that_pads_has_the_oldest_opset(tmp_path: Path) -> None:
    carrier = sample("cifar")
    made = OnnxExporter(opset=17)
    made.check(carrier)
    path = made.write(carrier, tmp_path, CONTEXT)[0]
    assert "Pad" in {node.op_type for node in onnx.load(path).graph.node}
