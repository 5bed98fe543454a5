"""Bodies of loops whose states grow, that return constants, or that hold axes of their own."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from compressor.exporters.onnx.file import check_message, lay_out
from compressor.graph.plain import make_plain
from compressor.graph.skeleton import skeleton
from compressor.types.tensors import Array

_LOOP = """g (float[N, 4] x) => (float[M, K] y) {{
    count = Constant<value = int64 {{3}}>() yes = Constant<value_int = 1>() go = Cast<to = 9>(yes)
    {outside}
    y = Loop(count, go, start) <
        body = b (int64 turn, bool again, float[{lengths}] before)
            => (bool on, float[P, Q] after) {{
            {inside}
        }}
    >
}}"""


def looped(inside: str, outside: str, lengths: str) -> ir.Model:
    text = _LOOP.format(inside=inside, outside=outside, lengths=lengths)
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    onnx.checker.check_model(proto)
    return ir.from_proto(proto)


def run(model: ir.Model, x: Array) -> Array:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    made = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(made, options, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": x})
    return np.asarray(result)


NOTHING = "shape = Constant<value_ints = [0, 4]>() start = ConstantOfShape(shape)"
# what is inside, outside, and the lengths that are noted for the state
BODIES = {
    "a list that grows, with nothing in it at first": (
        "on = Identity(again) after = Concat<axis = 0>(before, x)",
        NOTHING,
        "0, 4",
    ),
    "a list that grows from one row": (
        "on = Identity(again) s = Shape(before) o = Expand(one, s) m = Add(before, o) "
        "after = Concat<axis = 0>(m, x)",
        "shape = Constant<value_ints = [1, 4]>() start = ConstantOfShape(shape) "
        "one = Constant<value_float = 1.0>()",
        "1, 4",
    ),
    "a condition that is always true": (
        "on = Identity(go) after = Add(before, x)",
        "start = Identity(x)",
        "N, 4",
    ),
    "axes and lengths of its own": (
        """a = Constant<value_ints = [0]>() b = Constant<value_ints = [2]>() z = Neg(a)
        on = Identity(go) s = Shape(before) n = Slice(s, a, b, z) i = Expand(x, n)
        after = Add(before, i)""",
        "start = Identity(x)",
        "N, 4",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_loop_is_the_same_behind_cleaning_and_in_a_file(name: str) -> None:
    model = looped(*BODIES[name])
    x = np.random.default_rng(3).standard_normal((2, 4)).astype(np.float32)
    wanted = run(model, x)
    make_plain(model)
    assert np.array_equal(run(model, x), wanted)
    parts = skeleton(model)
    assert {t.name for t in parts.proto.graph.initializer} == parts.tensors.keys()
    layout = lay_out(parts, external=False)
    assert check_message(layout) is None
    for tensor in parts.proto.graph.initializer:
        tensor.raw_data = parts.tensors[tensor.name].tobytes()
    assert np.array_equal(run(ir.from_proto(parts.proto), x), wanted)


def test_a_long_array_that_a_body_returns_is_copied() -> None:
    table = np.arange(80, dtype=np.float32).reshape(20, 4)
    model = looped("on = Identity(again) after = Identity(before)", NOTHING, "K, 4")
    value = ir.Value(name="table", const_value=ir.tensor(table, name="table"))
    body = next(node for node in model.graph if node.op_type == "Loop").attributes["body"]
    body.as_graph().register_initializer(value)
    for node in body.as_graph():
        if node.outputs[0].name == "after":
            node.replace_input_with(0, value)
    x = np.zeros((2, 4), np.float32)
    make_plain(model)
    parts = skeleton(model)
    assert parts.tensors.keys() == {t.name for t in parts.proto.graph.initializer}
    assert check_message(lay_out(parts, external=False)) is None
    for tensor in parts.proto.graph.initializer:
        tensor.raw_data = parts.tensors[tensor.name].tobytes()
    assert np.array_equal(run(ir.from_proto(parts.proto), x), table)
