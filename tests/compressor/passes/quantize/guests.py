"""Networks as other tools quantize them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

from compressor.types.tensors import Array

FLOAT, INT8, UINT8 = TensorProto.FLOAT, TensorProto.INT8, TensorProto.UINT8
GENERATOR = np.random.default_rng(7)
IMAGES = GENERATOR.standard_normal((8, 3, 8, 8)).astype(np.float32) * 2
ROWS = GENERATOR.standard_normal((8, 5, 16)).astype(np.float32)


def weight(*shape: int, size: float = 1.0) -> Array:
    """Return a weight whose rows differ in size."""
    generator = np.random.default_rng(shape)
    values = generator.standard_normal(shape) * size / np.sqrt(np.prod(shape[1:]))
    rows = np.linspace(0.5, 2, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return (values * rows).astype(np.float32)


def network(
    nodes: Sequence[onnx.NodeProto],
    arrays: Mapping[str, Array],
    x: tuple[int, Sequence[Any]] = (FLOAT, ["n", 3, 8, 8]),
    y: tuple[int, Sequence[Any] | None] = (FLOAT, None),
    opset: int = 21,
) -> onnx.ModelProto:
    """Return a model of one input ``x`` and one output ``y``."""
    graph = helper.make_graph(
        nodes,
        "guest",
        [helper.make_tensor_value_info("x", *x)],
        [helper.make_tensor_value_info("y", *y)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


node = helper.make_node


def convolutional() -> onnx.ModelProto:
    """A residual block whose ReLU and ReLU6 quantizers leave out."""
    nodes = [
        node("Conv", ["x", "one.weight", "one.bias"], ["a"], pads=[1] * 4),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "two.weight", "two.bias"], ["c"], pads=[1] * 4, group=8),
        node("Add", ["b", "c"], ["d"]),
        node("Clip", ["d", "zero", "six"], ["e"]),
        node("MaxPool", ["e"], ["f"], kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", ["f"], ["g"]),
        node("Flatten", ["g"], ["h"]),
        node("Gemm", ["h", "fc.weight", "fc.bias"], ["y"], transB=1),
    ]
    arrays = {
        "one.weight": weight(8, 3, 3, 3, size=2),
        "one.bias": np.linspace(-1, 1, 8).astype(np.float32),
        "two.weight": weight(8, 1, 3, 3, size=3),
        "two.bias": np.linspace(1, -1, 8).astype(np.float32),
        "zero": np.float32(0),
        "six": np.float32(6),
        "fc.weight": weight(4, 8),
        "fc.bias": np.linspace(-1, 1, 4).astype(np.float32),
    }
    return network(nodes, arrays)


def recurrent() -> onnx.ModelProto:
    """Products of matrices around an LSTM."""
    nodes = [
        node("MatMul", ["x", "up.weight"], ["a"]),
        node("Add", ["a", "up.bias"], ["b"]),
        node("Relu", ["b"], ["c"]),
        node("LSTM", ["c", "lstm.W", "lstm.R"], ["d"], hidden_size=8),
        node("Squeeze", ["d", "one"], ["e"]),
        node("MatMul", ["e", "out.weight"], ["y"]),
    ]
    arrays = {
        "up.weight": weight(16, 24),
        "up.bias": np.linspace(-1, 1, 24).astype(np.float32),
        "lstm.W": weight(1, 32, 24, size=4),
        "lstm.R": weight(1, 32, 8, size=4),
        "one": np.array([1]),
        "out.weight": weight(8, 4),
    }
    return network(nodes, arrays, (FLOAT, [8, 5, 16]))


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, x: Array):
        self._left: Iterable[dict[str, Array]] = iter([{"x": x}])

    def get_next(self) -> dict[str, Array] | None:
        return next(iter(self._left), None)


def by_runtime(model: onnx.ModelProto, how: str, x: Array, folder: Path) -> Path:
    """Quantize a model with ONNX Runtime: ``QDQ``, ``QOperator`` or ``dynamic``, and a type."""
    form, activations, *rest = how.split("-")
    source, path = folder / "float.onnx", folder / "guest.onnx"
    onnx.save(model, source)
    options: dict[str, Any] = {"per_channel": "tensor" not in rest, "weight_type": QuantType.QInt8}
    if form == "dynamic":
        quantize_dynamic(source, path, **{**options, "weight_type": QuantType[activations]})
    else:
        kinds = {"quant_format": QuantFormat[form], "activation_type": QuantType[activations]}
        quantize_static(source, path, _Reader(x), **kinds, **options)
    return path


def run(model: onnx.ModelProto | Path, x: Array) -> Array:
    """Return what ONNX Runtime computes."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def sqnr(reference: Array, other: Array) -> float:
    """Return the signal to noise ratio in dB, at most 150."""
    signal = float((reference.astype(np.float64) ** 2).sum())
    noise = float(((reference.astype(np.float64) - other) ** 2).sum())
    return 150.0 if noise < signal * 1e-15 else 10 * float(np.log10(signal / noise))
