"""Pieces whose number is open become slices, and what the library cannot fold stays."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from compressor.graph.plain import clean
from compressor.graph.values import all_nodes
from compressor.types.tensors import Array

_HALF = "s = Shape<start = 1, end = 2>(x) two = Constant<value = int64 {2}>() "
_HALF += "none = Constant<value_ints = [0]>() h = Div(s, two) half = Squeeze(h, none) "


def parsed(body: str) -> ir.Model:
    text = f"g (float[B, T, 4] x) => (float[B, N, 4] y) {{ {body} }}"
    return ir.from_proto(
        onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    )


def run(model: ir.Model, x: Array) -> Array:
    made = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(made, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": x})
    return np.asarray(result)


def ops(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in all_nodes(model.graph))


@pytest.mark.parametrize("axis", [1, -2])
@pytest.mark.parametrize("half", [_HALF, "half = Constant<value = int64 {4}>() "])
def test_pieces_of_an_axis_of_open_length(half: str, axis: int) -> None:
    """The library fails where their length is computed, which ended as an internal error."""
    body = (
        f"{half} q = SplitToSequence<axis = {axis}>(x, half) "
        "i = Constant<value = int64 {0}>() j = Constant<value = int64 {1}>() "
        "a = SequenceAt(q, i) b = SequenceAt(q, j) y = Sub(b, a)"
    )
    model, before = parsed(body), parsed(body)
    clean(model)
    assert ops(model)["Slice"] == 2
    assert not ops(model).keys() & {"SplitToSequence", "SequenceAt"}
    x = np.random.default_rng(3).standard_normal((2, 8, 4)).astype(np.float32)
    assert np.array_equal(run(model, x), run(before, x))


def test_a_sequence_that_is_joined_stays() -> None:
    body = f"{_HALF} q = SplitToSequence<axis = 1>(x, half) y = ConcatFromSequence<axis = 1>(q)"
    model = parsed(body)
    clean(model)
    assert ops(model)["SplitToSequence"] == 1
    x = np.random.default_rng(3).standard_normal((2, 8, 4)).astype(np.float32)
    assert np.array_equal(run(model, x), x)


def test_a_constant_that_is_computed_has_its_own_shape() -> None:
    """Its length was open as that of the value which it replaces, and pruning failed on it."""
    model = parsed(
        f"{_HALF} q = SplitToSequence<axis = 1>(x, half) i = Constant<value = int64 {{0}}>() "
        "a = SequenceAt(q, i) low = Constant<value = float {0.0}>() "
        "high = Constant<value = float {4.0}>() step = Constant<value = float {1.0}>() "
        "row = Range(low, high, step) y = Add(a, row)"
    )
    clean(model)
    assert "Range" not in ops(model)
    assert all(
        v.shape is not None and v.shape.is_static() for v in model.graph.initializers.values()
    )


def test_pads_that_start_from_zeros_are_computed() -> None:
    """Every ``F.pad`` in a file by PyTorch's older exporter left six operators, and no pads."""
    body = (
        "n = Constant<value = int64[1] {4}>() z = ConstantOfShape<value = int64[1] {0}>(n) "
        "ends = Constant<value = int64[2] {1, 2}>() all = Concat<axis = 0>(ends, z) "
        "two = Constant<value = int64[2] {-1, 2}>() t = Reshape(all, two) "
        "u = Transpose<perm = [1, 0]>(t) one = Constant<value = int64[1] {-1}>() "
        "pads = Reshape(u, one) y = Pad(x, pads)"
    )
    model, before = parsed(body), parsed(body)
    clean(model)
    assert ops(model) == {"Pad": 1}
    x = np.random.default_rng(3).standard_normal((2, 8, 4)).astype(np.float32)
    assert np.array_equal(run(model, x), run(before, x))
