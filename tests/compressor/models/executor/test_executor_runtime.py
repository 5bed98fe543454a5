"""Operators of the torch graph executor against ONNX Runtime, which serves exported graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from compressor.models.executor import GraphModule
from tests.compressor.models.executor.parity import (
    assert_node_same,
    assert_same,
    floats,
    make_model,
)

STEPS: dict[str, Callable[[str, str], onnx.NodeProto]] = {
    "relu": lambda x, y: helper.make_node("Relu", [x], [y]),
    "sigmoid": lambda x, y: helper.make_node("Sigmoid", [x], [y]),
    "gelu": lambda x, y: helper.make_node("Gelu", [x], [y]),
    "add": lambda x, y: helper.make_node("Add", [x, "x"], [y]),
    "mul": lambda x, y: helper.make_node("Mul", [x, "x"], [y]),
    "softmax": lambda x, y: helper.make_node("Softmax", [x], [y], axis=1),
    "conv": lambda x, y: helper.make_node("Conv", [x, "w", "b"], [y], pads=[1, 1, 1, 1]),
    "depthwise": lambda x, y: helper.make_node("Conv", [x, "d"], [y], pads=[2, 0, 0, 2], group=4),
    "average": lambda x, y: helper.make_node(
        "AveragePool", [x], [y], kernel_shape=[3, 3], pads=[1, 1, 1, 1]
    ),
    "max": lambda x, y: helper.make_node(
        "MaxPool", [x], [y], kernel_shape=[3, 3], auto_pad="SAME_UPPER"
    ),
    "matmul": lambda x, y: helper.make_node("MatMul", [x, "m"], [y]),
    "transpose": lambda x, y: helper.make_node("Transpose", [x], [y], perm=[0, 1, 3, 2]),
    "norm": lambda x, y: helper.make_node("InstanceNormalization", [x, "s", "b"], [y]),
    "layer": lambda x, y: helper.make_node("LayerNormalization", [x, "l"], [y]),
}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=8), st.integers(0, 999))
def test_random_chains(steps: list[str], seed: int) -> None:
    names = ["x", *(f"v{i}" for i in range(len(steps)))]
    nodes = [
        STEPS[step](name, following)
        for step, name, following in zip(steps, names, names[1:], strict=False)
    ]
    weights = {
        "w": floats(4, 4, 3, 3, seed=seed) * 0.3,
        "b": floats(4, seed=seed + 1),
        "s": floats(4, seed=seed + 2),
        "d": floats(4, 1, 3, 3, seed=seed + 3) * 0.3,
        "m": floats(6, 6, seed=seed + 4) * 0.4,
        "l": floats(6, seed=seed + 5),
    }
    inputs = {"x": floats(2, 4, 6, 6, seed=seed + 6)}
    assert_same(make_model(nodes, inputs, weights), inputs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "coordinates", ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]
)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("scale", [0.6, 1.0, 1.5, 2.0, 3.0])
def test_resize(mode: str, coordinates: str, scale: float) -> None:
    inputs = {"x": floats(1, 2, 7, 5)}
    scales = np.array([1, 1, scale, scale], np.float32)
    node = helper.make_node(
        "Resize", ["x", "", "scales"], ["y"], mode=mode, coordinate_transformation_mode=coordinates
    )
    assert_same(make_model([node], inputs, {"scales": scales}), inputs)


@pytest.mark.parametrize(("length", "scale"), [(3, 5 / 3), (5, 7 / 5), (7, 9 / 7), (6, 5 / 3)])
def test_resize_to_whole_rows(length: int, scale: float) -> None:
    """As many rows as the product has in float32, where in float64 it is just below."""
    inputs = {"x": floats(1, 1, length, length)}
    scales = np.array([1, 1, scale, scale], np.float32)
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="nearest")
    assert_same(make_model([node], inputs, {"scales": scales}), inputs)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("size", [3, 4, 6, 12])
def test_resize_with_antialiasing(mode: str, size: int) -> None:
    inputs = {"x": floats(1, 2, 10, 9)}
    node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode=mode, antialias=1)
    sizes = np.array([1, 2, size, size], np.int64)
    assert_same(make_model([node], inputs, {"sizes": sizes}), inputs)


@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize("whole", [0, 1])
@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]])
@pytest.mark.parametrize("kernel", [2, 3])
def test_average_pool(kernel: int, pads: list[int], whole: int, ceil: int) -> None:
    attributes = {
        "kernel_shape": [kernel, kernel],
        "strides": [2, 2],
        "pads": pads,
        "count_include_pad": whole,
        "ceil_mode": ceil,
    }
    assert_node_same("AveragePool", {"x": floats(1, 2, 8, 9)}, attributes)


@pytest.mark.parametrize("op", ["AveragePool", "MaxPool"])
@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 2, 1, 0]])
@pytest.mark.parametrize("dilation", [1, 3])
def test_one_window_larger_than_the_plane(op: str, pads: list[int], dilation: int) -> None:
    """As in EfficientNet; 40,000 rows and columns would fill 50 GB."""
    attributes = {
        "kernel_shape": [40_000, 40_000],
        "strides": [200_000, 200_000],
        "pads": pads,
        "dilations": [dilation, dilation],
        "ceil_mode": 1,
    }
    assert_node_same(op, {"x": floats(1, 2, 8, 9)}, attributes)


@pytest.mark.parametrize("form", [
    {"pads": [1, 0, 0, 2], "strides": [2, 3], "output_padding": [1, 2]},
    {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    {"auto_pad": "SAME_LOWER", "strides": [3, 2]},
    {"output_shape": [9, 11], "strides": [2, 2]},
    {"pads": [1, 1, 1, 1], "dilations": [2, 1], "group": 2},
])  # fmt: skip
def test_transposed_convolution(form: dict[str, Any]) -> None:
    weight = floats(4, 6 // form.get("group", 1), 3, 3)
    inputs = {"x": floats(2, 4, 5, 5), "w": weight, "b": floats(6)}
    assert_node_same("ConvTranspose", inputs, form)


@pytest.mark.parametrize(
    "form", [{"output_shape": [15, 16]}, {"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"}]
)
def test_transposed_convolution_with_gaps(form: dict[str, Any]) -> None:
    inputs = {"x": floats(1, 3, 5, 5), "w": floats(3, 2, 1, 2), "b": floats(2)}
    assert_node_same("ConvTranspose", inputs, {**form, "strides": [3, 3]})


def test_not() -> None:
    assert_node_same("Not", {"x": np.array([True, False])}, {})


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrent(op: str, gates: int, direction: str) -> None:
    directions, size = (2 if direction == "bidirectional" else 1), 5
    inputs = {
        "x": floats(6, 3, 4),
        "w": floats(directions, gates * size, 4, seed=1) * 0.5,
        "r": floats(directions, gates * size, size, seed=2) * 0.5,
        "b": floats(directions, 2 * gates * size, seed=3),
        "lengths": np.array([6, 4, 5], np.int32),
        "h": floats(directions, 3, size, seed=4),
    }
    attributes: dict[str, Any] = {"hidden_size": size, "direction": direction}
    if op == "LSTM":
        inputs |= {"c": floats(directions, 3, size, seed=5)}
        inputs |= {"p": floats(directions, 3 * size, seed=6)}
    if op == "GRU":
        attributes["linear_before_reset"] = 1
    assert_node_same(op, inputs, attributes, outputs=3 if op == "LSTM" else 2)


@pytest.mark.parametrize("centred", [0, 1])
@pytest.mark.parametrize("threshold", [0.1, 0.5])
def test_non_max_suppression(threshold: float, centred: int) -> None:
    rng = np.random.default_rng(0)
    inputs = {
        "boxes": rng.random((2, 40, 4), np.float32),
        "scores": rng.random((2, 3, 40), np.float32),
        "most": np.array([8], np.int64),
        "overlap": np.array([threshold], np.float32),
        "least": np.array([0.3], np.float32),
    }
    assert_node_same("NonMaxSuppression", inputs, {"center_point_box": centred})


@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("form", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align(mode: str, form: str, ratio: int) -> None:
    rng = np.random.default_rng(0)
    corners = rng.random((5, 2), np.float32) * 8 - 1
    inputs = {
        "x": floats(2, 3, 9, 11),
        "rois": np.concatenate([corners, corners + rng.random((5, 2), np.float32) * 6], 1),
        "batches": np.array([0, 1, 1, 0, 1], np.int64),
    }
    attributes = {
        "coordinate_transformation_mode": form,
        "mode": mode,
        "sampling_ratio": ratio,
        "output_height": 3,
        "output_width": 2,
        "spatial_scale": 0.9,
    }
    assert_node_same("RoiAlign", inputs, attributes)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_grid_sample(mode: str, padding: str) -> None:
    inputs = {"x": floats(2, 3, 6, 7), "grid": floats(2, 4, 5, 2, seed=1)}
    assert_node_same("GridSample", inputs, {"mode": mode, "padding_mode": padding})


def test_top_k_takes_the_first_of_equals() -> None:
    values = np.random.default_rng(0).integers(0, 4, (3, 50)).astype(np.float32)
    inputs = {"x": values, "k": np.array([20], np.int64)}
    assert_node_same("TopK", inputs, {}, outputs=2)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_matmul_integer(dtype: type[np.generic]) -> None:
    rng = np.random.default_rng(0)
    inputs = {
        "a": rng.integers(0, 256, (2, 3, 40), dtype=np.uint8),
        "b": rng.integers(0, 65, (40, 5)).astype(dtype),  # pairs that no 16-bit sum cuts
        "az": np.array(77, np.uint8),
        "bz": rng.integers(0, 100, 5).astype(dtype),
    }
    weights = {name: inputs.pop(name) for name in ("b", "az", "bz")}
    node = helper.make_node("MatMulInteger", ["a", "b", "az", "bz"], ["y"])
    assert_same(make_model([node], inputs, weights), inputs, rtol=0, atol=0)


def test_dynamic_quantization() -> None:
    assert_node_same("DynamicQuantizeLinear", {"x": floats(3, 50) * 3 + 1}, {}, outputs=3)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
@given(seed=st.integers(0, 99))
@settings(max_examples=5, deadline=None, derandomize=True)
def test_quantize_then_dequantize(dtype: type[np.generic], seed: int) -> None:
    rng = np.random.default_rng(seed)
    limits = np.iinfo(dtype)  # type: ignore[type-var]
    weights = {
        "s": (rng.random(3) * 0.1 + 1e-3).astype(np.float32),
        "z": rng.integers(limits.min, limits.max, 3).astype(dtype),
    }
    inputs = {"x": rng.standard_normal((2, 3, 5)).astype(np.float32) * 10}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    assert_same(make_model(nodes, inputs, weights), inputs)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint16, None])
@pytest.mark.parametrize("channels", [(), (3,)])
def test_what_is_rounded_at_once_is_what_its_codes_mean(
    dtype: type[np.generic] | None, channels: tuple[int, ...]
) -> None:
    """The same as two graphs of one node each, bit by bit."""
    rng = np.random.default_rng(0)
    weights = {"s": (2.0 ** rng.integers(-6, -3, channels)).astype(np.float32) * np.float32(1.1)}
    if dtype is not None:
        weights["z"] = np.asarray(rng.integers(0, 100, channels)).astype(dtype)
    x = (rng.standard_normal((2, 3, 500)) * 30).astype(np.float32)
    x[0, :, :400] = np.arange(-200, 200) * weights["s"].reshape(-1, 1) / 2  # halves of steps, too
    there = helper.make_node("QuantizeLinear", ["x", *weights], ["q"])
    back = helper.make_node("DequantizeLinear", ["q", *weights], ["y"])

    def run(nodes: list[onnx.NodeProto], name: str, value: np.ndarray[Any, Any]) -> torch.Tensor:
        module = GraphModule(ir.from_proto(make_model(nodes, {name: value}, weights)))
        (result,) = module(torch.from_numpy(value)).values()
        return cast("torch.Tensor", result)

    codes = run([there], "x", x)
    assert torch.equal(run([there, back], "x", x), run([back], "q", codes.numpy()))


@pytest.mark.parametrize("scale", ["s", "t"])
def test_codes_that_are_read_elsewhere_or_scaled_otherwise_are_made(scale: str) -> None:
    """``q`` is an output, or is given back its values by another scale than its own."""
    weights = {"s": np.array(0.1, np.float32), "t": np.array(0.3, np.float32)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", scale], ["y"]),
        helper.make_node("Cast", ["q"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Concat", ["y", "c"], ["both"], axis=0),
    ]
    inputs = {"x": floats(4, 8)}
    assert_same(make_model(nodes, inputs, weights), inputs)
    assert_same(make_model(nodes[:2], inputs, weights), inputs)


def test_four_bit_blocks() -> None:
    codes = np.random.default_rng(0).integers(-8, 8, (8, 6)).astype(np.int8)
    tensor = helper.make_tensor("w", TensorProto.INT4, codes.shape, codes.reshape(-1).tolist())
    node = helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=0, block_size=4)
    product = helper.make_node("MatMul", ["x", "d"], ["y"])
    inputs = {"x": floats(2, 8)}
    model = make_model([node, product], inputs, {"s": floats(2, 6, seed=1)})
    model.graph.initializer.append(tensor)
    assert_same(model, inputs)


def test_loop_and_if_capture_outer_values() -> None:
    """The sum of the first rows, negated where it is negative."""
    body = helper.make_graph(
        [
            helper.make_node("Gather", ["x", "i"], ["row"]),
            helper.make_node("Mul", ["row", "k"], ["scaled"]),
            helper.make_node("Add", ["sum_in", "scaled"], ["sum_out"]),
            helper.make_node("Identity", ["go"], ["go_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum_in", TensorProto.FLOAT, [3]),
        ],
        [
            helper.make_tensor_value_info("go_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum_out", TensorProto.FLOAT, [3]),
            helper.make_tensor_value_info("scaled", TensorProto.FLOAT, [3]),
        ],
    )
    branches = {
        name: helper.make_graph(
            [helper.make_node(op, ["total"], ["r"])],
            name,
            [],
            [helper.make_tensor_value_info("r", TensorProto.FLOAT, [3])],
        )
        for name, op in (("then_branch", "Neg"), ("else_branch", "Identity"))
    }
    nodes = [
        helper.make_node("Loop", ["n", "", "start"], ["total", "rows"], body=body),
        helper.make_node("ReduceSum", ["total"], ["all"], keepdims=0),
        helper.make_node("Less", ["all", "zero"], ["negative"]),
        helper.make_node("If", ["negative"], ["result"], **branches),
        helper.make_node("Concat", ["result", "total"], ["y"], axis=0),
    ]
    weights = {
        "n": np.array(4, np.int64),
        "start": np.zeros(3, np.float32),
        "zero": np.array(0, np.float32),
        "k": np.array([1, 2, 3], np.float32),
    }
    for seed in range(4):
        inputs = {"x": floats(6, 3, seed=seed)}
        assert_same(make_model(nodes, inputs, weights), inputs)


@pytest.mark.parametrize("turns", [0, 3])
def test_loop_that_may_not_run(turns: int) -> None:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_out"]),
            helper.make_node("Add", ["state", "x"], ["next"]),
            helper.make_node("Cast", ["next"], ["whole"], to=TensorProto.INT32),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, [3]),
        ],
        [
            helper.make_tensor_value_info("go_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [3]),
            helper.make_tensor_value_info("whole", TensorProto.INT32, [3]),
        ],
    )
    node = helper.make_node("Loop", ["n", "", "x"], ["last", "rows"], body=body)
    inputs = {"x": floats(3)}
    assert_same(make_model([node], inputs, {"n": np.array(turns, np.int64)}), inputs)


def test_codes_with_channels_last_are_pooled() -> None:
    """PyTorch refuses them where a sample has more values than the type counts."""
    node = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2], strides=[2, 2])
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.UINT8, [1, 4, *plane])
        for name, plane in (("x", [30, 12]), ("y", [15, 6]))
    )
    model = helper.make_model(
        helper.make_graph([node], "codes", [x], [y]), opset_imports=[helper.make_opsetid("", 21)]
    )
    codes = torch.randint(0, 255, (1, 4, 30, 12), dtype=torch.uint8)
    module = GraphModule(ir.from_proto(model))
    pooled = module(codes.contiguous(memory_format=torch.channels_last))["y"]
    expected = torch.nn.functional.max_pool2d(codes.float(), 2).to(torch.uint8)
    assert torch.equal(pooled, expected)
