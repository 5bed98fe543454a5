"""Small models for exporter tests: quantized graphs built by hand, and sample networks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch

from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier, open_module
from compressor.types.exporter import ExportContext
from compressor.types.tensors import Batch, TensorSpec
from samples.cifar.model import resnet20
from samples.digits.model import digits_net

CONTEXT = ExportContext(name="a-test", spec_digest="ab" * 32)
FEATURES, HIDDEN, CLASSES, BLOCK = 64, 512, 10, 32

_NUMPY = {
    ir.DataType.INT8: np.int8,
    ir.DataType.UINT8: np.uint8,
    ir.DataType.INT16: np.int16,
    ir.DataType.INT4: ml_dtypes.int4,
    ir.DataType.UINT4: ml_dtypes.uint4,
    ir.DataType.INT2: ml_dtypes.int2,
    ir.DataType.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
    ir.DataType.FLOAT4E2M1: ml_dtypes.float4_e2m1fn,
}
_LARGEST = {ir.DataType.INT8: 127, ir.DataType.INT4: 7, ir.DataType.INT2: 1}


@cache
def sample(name: str) -> TorchCarrier:
    torch.manual_seed(3)
    factory, shape = (digits_net, (1, 8, 8)) if name == "digits" else (resnet20, (3, 32, 32))
    spec = TensorSpec("image", ("batch", *shape), "float32")
    return open_module(factory, {}, [spec], "model.factory")


def images(name: str, count: int = 5) -> Batch:
    shape = (1, 8, 8) if name == "digits" else (3, 32, 32)
    noise = np.random.default_rng(1).standard_normal((count, *shape))
    return {"image": noise.astype(np.float32)}


def rows(count: int = 7) -> Batch:
    noise = np.random.default_rng(2).standard_normal((count, FEATURES))
    return {"x": noise.astype(np.float32)}


def codes(shape: Sequence[int], dtype: ir.DataType, seed: int) -> np.ndarray[Any, Any]:
    """Return random codes of an element type."""
    noise = np.random.default_rng(seed)
    if dtype.is_floating_point():
        return noise.standard_normal(shape).astype(_NUMPY[dtype])
    largest = _LARGEST.get(dtype, 15)
    low = -largest if dtype in _LARGEST else 0
    return noise.integers(low, largest + 1, shape).astype(np.int8).astype(_NUMPY[dtype])


class Builder:
    """Collects the nodes and initializers of a graph."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []

    def constant(self, name: str, array: Any) -> ir.Value:
        tensor = array if isinstance(array, ir.LazyTensor) else ir.tensor(array, name=name)
        value = ir.val(name, tensor.dtype, tensor.shape, const_value=tensor)
        self.initializers.append(value)
        return value

    def node(
        self, op: str, inputs: Sequence[ir.Value | None], name: str, domain: str = "", **fields: Any
    ) -> ir.Value:
        node = ir.node(op, inputs, fields, name=f"node_{name}", domain=domain)
        node.outputs[0].name = name
        self.nodes.append(node)
        return node.outputs[0]

    def model(
        self,
        inputs: Sequence[ir.Value],
        output: ir.Value,
        classes: int | None = CLASSES,
        opset: int = 21,
        domains: Sequence[str] = (),
    ) -> ir.Model:
        output.name, output.dtype = "output", ir.DataType.FLOAT
        output.shape = ir.Shape(["batch", classes])
        graph = ir.Graph(
            inputs,
            [output],
            nodes=self.nodes,
            initializers=self.initializers,
            opset_imports={"": opset, **dict.fromkeys(domains, 1)},
            name="made_by_hand",
        )
        return ir.Model(graph, ir_version=10, producer_name="somebody")


def entry(name: str = "x", features: int = FEATURES) -> ir.Value:
    return ir.val(name, ir.DataType.FLOAT, ["batch", features])


def quantized(
    weights: ir.DataType = ir.DataType.INT8,
    activations: ir.DataType | None = ir.DataType.INT8,
    *,
    activation_zero: int = 0,
    weight_zero: int | None = None,
    blocks: bool = False,
    integer_bias: bool = False,
    lazy: bool = False,
) -> OnnxCarrier:
    """Two dense layers, ``first`` and ``second``, with QuantizeLinear/DequantizeLinear pairs."""
    made = Builder()
    x = value = entry()
    for index, (layer, shape) in enumerate(
        (("first", (FEATURES, HIDDEN)), ("second", (HIDDEN, CLASSES)))
    ):
        if activations is not None:
            value = _fake_quantized(made, value, layer, activations, activation_zero)
        array = codes(shape, weights, index)
        stored: Any = array
        if lazy:
            stored = ir.LazyTensor(
                lambda array=array: ir.tensor(array), dtype=weights, shape=ir.Shape(shape)
            )
        scale = np.full((shape[0] // BLOCK, shape[1]) if blocks else shape[1:], 0.01, np.float32)
        scale *= np.linspace(0.5, 1.5, scale.size, dtype=np.float32).reshape(scale.shape)
        parts = [
            made.constant(f"{layer}.weight", stored),
            made.constant(f"{layer}.weight_scale", scale),
        ]
        if weight_zero is not None:
            zero = np.full(scale.shape, weight_zero).astype(np.int8).astype(_NUMPY[weights])
            parts.append(made.constant(f"{layer}.weight_zero_point", zero))
        fields = {"axis": 0, "block_size": BLOCK} if blocks else {"axis": 1}
        weight = made.node("DequantizeLinear", parts, f"{layer}_weight", **fields)
        value = made.node("MatMul", [value, weight], f"{layer}_product")
        value = made.node("Add", [value, _bias(made, layer, shape[1], integer_bias)], layer)
        if index == 0:
            value = made.node("Relu", [value], "relu")
    return OnnxCarrier(made.model([x], value))


def _fake_quantized(
    made: Builder, value: ir.Value, layer: str, dtype: ir.DataType, zero: int
) -> ir.Value:
    scale = made.constant(f"{layer}.input_scale", np.float32(0.05))
    point = made.constant(f"{layer}.input_zero_point", np.array(zero).astype(_NUMPY[dtype]))
    value = made.node("QuantizeLinear", [value, scale, point], f"{layer}_codes")
    return made.node("DequantizeLinear", [value, scale, point], f"{layer}_input")


def _bias(made: Builder, layer: str, length: int, integer: bool) -> ir.Value:
    if not integer:
        return made.constant(f"{layer}.bias", np.linspace(-1, 1, length, dtype=np.float32))
    bias = made.constant(f"{layer}.bias", np.arange(length, dtype=np.int32))
    scale = made.constant(f"{layer}.bias_scale", np.float32(0.001))
    return made.node("DequantizeLinear", [bias, scale], f"{layer}_bias")


def worst(left: Batch, right: Batch) -> float:
    """Return the largest difference, relative to the largest value."""
    assert left.keys() == right.keys()
    return max(float(np.max(np.abs(left[k] - right[k])) / np.max(np.abs(right[k]))) for k in right)


def node_by_node(carrier: OnnxCarrier, batch: Batch) -> Batch:
    """Run a graph as it is: ONNX Runtime rounds the biases of products of codes it optimizes."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    proto = ir.to_proto(carrier.graph()).SerializeToString()
    session = ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, batch), strict=True))


def stored(path: Path) -> dict[str, onnx.TensorProto]:
    return {t.name: t for t in onnx.load(path).graph.initializer}
