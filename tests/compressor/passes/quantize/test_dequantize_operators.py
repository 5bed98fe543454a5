"""Operators on codes become the same operators on floats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from compressor.errors import ModelError
from compressor.graph.stored_weights import is_quantized
from compressor.passes.quantize.cast.cast import Cast
from compressor.types.tensors import Array
from tests.compressor.passes.quantize import guests
from tests.compressor.passes.quantize.guests import IMAGES, ROWS, network, node, run, sqnr
from tests.compressor.passes.quantize.test_dequantize import (
    CONTEXT,
    opened,
    operators,
    outputs,
    widened,
)


def on_codes(op: str, inputs: Sequence[str], **settings: Any) -> list[onnx.NodeProto]:
    """Return an operator on the codes of the input, scale ``s`` and zero point ``z``."""
    return [
        node("QuantizeLinear", ["x", "s", "z"], ["c"]),
        node(op, inputs, ["d"], domain="com.microsoft", **settings),
        node("DequantizeLinear", ["d", "t", "u"], ["y"]),
    ]


@pytest.mark.parametrize(
    ("op", "inputs", "settings"),
    [
        ("QLinearAdd", "c s z c s z t u", {}),
        ("QLinearMul", "c s z c s z t u", {}),
        ("QLinearSigmoid", "c s z t u", {}),
        ("QLinearLeakyRelu", "c s z t u", {"alpha": 0.2}),
        ("QLinearSoftmax", "c s z t u", {"axis": -1, "opset": 13}),
        ("QLinearAveragePool", "c s z t u", {"kernel_shape": [2, 2]}),
        ("QLinearGlobalAveragePool", "c s z t u", {}),
        ("QLinearConcat", "t u c s z c s z", {"axis": 1}),
        ("QLinearWhere", "truth c s z c s z t u", {}),
    ],
)
def test_operators_on_codes(tmp_path: Path, op: str, inputs: str, settings: dict[str, Any]) -> None:
    sides = {
        "s": np.float32(0.05),
        "z": np.uint8(128),
        "t": np.float32(0.4),
        "u": np.uint8(100),
        "truth": np.ones((1, 1, 1, 1), np.bool_),
    }
    arrays = {name: sides[name] for name in sides if name in {*inputs.split(), "s", "t"}}
    guest = network(on_codes(op, inputs.split(), **settings), arrays)
    after = Cast(dtype="fp32").preview(opened(guest, tmp_path), CONTEXT, {})
    assert not is_quantized(after.graph())
    x = IMAGES.clip(-6, 6)  # half a step of 0.4, and of 0.05 times 6 twice
    assert np.abs(outputs(after, x) - run(guest, x)).max() < 0.2 + 0.3 + 0.01


def test_a_product_of_codes(tmp_path: Path) -> None:
    """Of two activations; the second one is what it reads of itself turned."""
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["c"]),
        node("Transpose", ["c"], ["d"], perm=[0, 2, 1]),
        node("QLinearMatMul", ["c", "s", "z", "d", "s", "z", "t", "u"], ["e"]),
        node("DequantizeLinear", ["e", "t", "u"], ["y"]),
    ]
    sides = {"s": np.float32(0.03), "z": np.uint8(128), "t": np.float32(0.4), "u": np.uint8(64)}
    guest = network(nodes, sides, (guests.FLOAT, [8, 5, 16]))
    after = Cast(dtype="fp32").preview(opened(guest, tmp_path), CONTEXT, {})
    assert operators(after) == ["Transpose", "MatMul"]
    assert sqnr(run(guest, ROWS), outputs(after, ROWS)) > 25


def test_what_only_moves_codes_moves_floats(tmp_path: Path) -> None:
    """Padding with the code of a number pads with the number."""
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["c"]),
        node("Pad", ["c", "pads", "fill"], ["d"]),
        node("MaxPool", ["d"], ["e"], kernel_shape=[2, 2]),
        node("Concat", ["e", "e"], ["f"], axis=1),
        node("DequantizeLinear", ["f", "s", "z"], ["y"]),
    ]
    sides = {"s": np.float32(0.1), "z": np.int8(-3), "fill": np.int8(2)}
    guest = network(nodes, {**sides, "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1])})
    after = Cast(dtype="fp32").preview(opened(guest, tmp_path), CONTEXT, {})
    assert operators(after) == ["Pad", "MaxPool", "Concat"]
    assert np.abs(run(guest, IMAGES) - outputs(after, IMAGES)).max() <= 0.051


@pytest.mark.parametrize(
    ("maker", "sides", "kept"),
    [
        ("Neg", (0.05, np.uint8(0)), "Relu"),
        ("Neg", (6 / 255, np.uint8(0)), "Clip"),
        ("Neg", (6 / 255, np.int8(-128)), "Clip"),
        ("Neg", (0.1, np.int8(0)), ""),
        ("Sigmoid", (1 / 255, np.uint8(0)), ""),
        ("Relu", (0.05, np.uint8(0)), ""),
    ],
)
def test_saturation_that_stands_for_an_activation(
    tmp_path: Path, maker: str, sides: tuple[float, Array], kept: str
) -> None:
    nodes = [
        node(maker, ["x"], ["a"]),
        node("QuantizeLinear", ["a", "s", "z"], ["c"]),
        node("DequantizeLinear", ["c", "s", "z"], ["y"]),
    ]
    guest = network(nodes, {"s": np.float32(sides[0]), "z": sides[1]})
    after = Cast(dtype="fp32").preview(opened(guest, tmp_path), CONTEXT, {})
    assert operators(after) == [maker, *filter(None, [kept])]
    ours, theirs = outputs(after, IMAGES), run(guest, IMAGES)
    assert np.abs(ours - theirs).max() <= sides[0] * 0.51


STATIC = [node("QuantizeLinear", ["x", "s", "z"], ["c"])]
DYNAMIC = [node("DynamicQuantizeLinear", ["x"], ["c", "s", "z"])]
ONE = [node("Mul", ["f", "both"], ["y"])]
TWO = [node("Mul", ["s", "t"], ["st"]), node("Mul", ["f", "st"], ["y"])]
DIVIDED = [
    node("Mul", ["s", "t"], ["dt"]),
    node("Div", ["float_bias", "dt"], ["quotient"]),
    node("Floor", ["quotient"], ["floor"]),
    node("Cast", ["floor"], ["narrow"], to=TensorProto.INT32),
    node("Reshape", ["narrow", "shape"], ["bias"]),
]


@pytest.mark.parametrize(
    ("before", "bias", "after"),
    [
        pytest.param(STATIC, None, ONE, id="one constant"),
        pytest.param(STATIC, "integers", ONE, id="bias and one constant"),
        pytest.param(STATIC, "integers", TWO, id="bias"),
        pytest.param([*DYNAMIC, *DIVIDED], "bias", TWO, id="bias as the model runs"),
    ],
)
def test_a_product_whose_bias_is_added_as_integers(
    tmp_path: Path, before: list[onnx.NodeProto], bias: str | None, after: list[onnx.NodeProto]
) -> None:
    """As files of older quantizers have it, and one constant for the two scales."""
    weight, floats = np.array([[[[1]], [[-2]], [[100]]]], np.int8), np.float32([1.5])
    nodes = [*before, node("ConvInteger", ["c", "w", "z"], ["i"])]
    nodes += [node("Add", ["i", bias], ["j"])] if bias else []
    nodes += [node("Cast", ["j" if bias else "i"], ["f"], to=TensorProto.FLOAT), *after]
    arrays = {
        "w": weight, "t": np.float32(0.5), "both": np.float32(0.03), "float_bias": floats,
        "integers": np.int32(floats / 0.03).reshape(1, 1, 1, 1),
        "shape": np.array([1, -1, 1, 1]), "s": np.float32(0.06), "z": np.uint8(128),
    }  # fmt: skip
    made = {name for n in before for name in n.output}
    guest = network(nodes, {k: v for k, v in arrays.items() if k not in made})
    cast = widened(opened(guest, tmp_path))
    assert operators(cast) == ["Conv", *["Add"][: bool(bias)]]
    wanted = np.einsum("oi,nihw->nohw", weight[:, :, 0, 0] * 0.5, IMAGES) + 1.5 * bool(bias)
    np.testing.assert_allclose(outputs(cast, IMAGES), wanted, rtol=1e-4, atol=1e-4)


def test_what_has_no_form_on_floats(tmp_path: Path) -> None:
    nodes = [
        node("QuantizeLinear", ["x", "s"], ["c"]),
        node("QLinearSigmoid", ["c", "s", "", "x0", ""], ["d"], "half", domain="com.microsoft"),
        node("DequantizeLinear", ["d", "s"], ["y"]),
    ]
    scale = node("ReduceMax", ["x"], ["x0"], keepdims=0)
    guest = network([scale, *nodes], {"s": np.float32(1)})
    guest.graph.node[2].input[1] = "x0"  # its scale depends on the data
    with pytest.raises(ModelError, match="QLinearSigmoid in node 'half' works on codes in a way"):
        Cast(dtype="fp32").survey(opened(guest, tmp_path), CONTEXT)
