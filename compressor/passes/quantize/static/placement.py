"""Where a runtime fuses Q/DQ into integer kernels, one small table a target."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from compressor.graph.layers import activation_input, layer_of
from compressor.graph.values import constant_array, constant_of, is_op
from compressor.types.layers import Layer


@dataclass(frozen=True)
class Profile:
    """What a runtime does with quantized tensors.

    Attributes:
        layers: operators with a constant weight that have an integer kernel.
        output_needed: those whose integer kernel exists only with a quantized output.
        joins: operators without a weight that have an integer kernel, if all that they read and
            write is quantized.
        carriers: operators that move elements and so work on codes as they are.
        absorbed: activations that the kernel before them takes in.
        integer_bias: biases are stored as int32 codes.
        explicit_zero: operators whose integer kernel wants the weight's zero point written out.
        unsigned: asymmetric activations are uint8; where false, activations must be symmetric.
        kept: why an operator stays in floating point.
    """

    layers: frozenset[str]
    output_needed: frozenset[str]
    joins: frozenset[str]
    carriers: frozenset[str]
    absorbed: frozenset[str]
    integer_bias: bool
    unsigned: bool
    explicit_zero: frozenset[str] = frozenset()
    kept: Mapping[str, str] = field(default_factory=dict)


# ONNX Runtime, CPU provider: QLinearConv, QGemm, MatMulIntegerToFloat, QLinearAdd/Mul/Concat,
# QLinearAveragePool/GlobalAveragePool, QLinearSigmoid/LeakyRelu. Relu and Clip before a
# QuantizeLinear are dropped, since saturation does the same.
ORT_CPU = Profile(
    layers=frozenset({"Conv", "Gemm", "MatMul"}),
    output_needed=frozenset({"Conv"}),
    joins=frozenset(
        {"Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "Sigmoid", "LeakyRelu"}
    ),
    carriers=frozenset(
        {"MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Pad"}
    ),
    absorbed=frozenset({"Relu", "Clip"}),
    integer_bias=True,
    unsigned=True,
    explicit_zero=frozenset({"Gemm"}),
    kept={"ConvTranspose": "ONNX Runtime has no integer kernel for it"},
)

# TensorRT: explicit quantization; the builder moves Q/DQ over data movement by itself, adds a
# residual in the convolution's epilogue, and wants float biases and zero points 0.
TENSORRT = Profile(
    layers=frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"}),
    output_needed=frozenset(),
    joins=frozenset({"Add", "AveragePool", "GlobalAveragePool"}),
    carriers=frozenset(),
    absorbed=frozenset({"Relu"}),
    integer_bias=False,
    unsigned=False,
)

# OpenVINO, CPU plugin 2026.4, by the precisions that its compiled model reports for ResNet-20: a
# layer with a float output is int8 all the same, and a residual sum goes into the convolution
# before it. Biases in float save it a conversion.
OPENVINO = Profile(
    layers=frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"}),
    output_needed=frozenset(),
    joins=frozenset({"Add", "Concat", "AveragePool", "GlobalAveragePool"}),
    carriers=ORT_CPU.carriers,
    absorbed=frozenset({"Relu", "Clip"}),
    integer_bias=False,
    unsigned=True,
)

# ONNX Runtime, CUDA provider: it has kernels for Q/DQ and none for products of integers, so that
# every Q/DQ that is not there is time saved; int32 biases would be computed on the CPU.
ORT_CUDA = Profile(
    layers=frozenset({"Conv", "Gemm", "MatMul"}),
    output_needed=frozenset(),
    joins=frozenset(),
    carriers=frozenset(),
    absorbed=frozenset({"Relu"}),
    integer_bias=False,
    unsigned=True,
    kept={"ConvTranspose": "ONNX Runtime has no integer kernel for it"},
)

PROFILES: Mapping[str, Profile] = {
    "tensorrt": TENSORRT,
    "ort-cpu": ORT_CPU,
    "openvino": OPENVINO,
    "ort-cuda": ORT_CUDA,
}
"""By target; what suits one suits all that come after it."""


def profile_for(targets: frozenset[str]) -> Profile:
    """Return the rules to follow: the strictest of the targets', ONNX Runtime's without one."""
    named = (profile for target, profile in PROFILES.items() if target in targets)
    return next(named, ORT_CPU)


@dataclass(frozen=True)
class Placement:
    """Which values get Q/DQ and which nodes read them.

    Attributes:
        values: names of the values to quantize, in the order of execution.
        layers: the layers that become integer, with the value each reads.
        integer: names of all nodes that read dequantized values.
        carried: names of the nodes that work on codes.
        gates: for values that only matter where another value is positive, that value.
        readers: for values to quantize, the names of the layers that read their codes.
    """

    values: tuple[str, ...]
    layers: tuple[tuple[Layer, str], ...]
    integer: frozenset[str]
    carried: frozenset[str]
    gates: Mapping[str, str]
    readers: Mapping[str, tuple[str, ...]]


class _Placer:
    def __init__(self, model: ir.Model, profile: Profile, chosen: Collection[str]):
        self.graph = model.graph
        self.profile = profile
        self.chosen = set(chosen)
        self.wanted: set[ir.Value] = set()
        self.integer: dict[ir.Node, None] = {}
        self.layers: list[tuple[Layer, str]] = []
        self.readers: dict[str, list[str]] = {}

    def run(self) -> Placement:
        for node in self.graph:
            layer = layer_of(node)
            if layer is not None and layer.name in self.chosen:
                self._want_layer(node, layer)
        joins = [n for n in self.graph if is_op(n, *self.profile.joins)]
        changed = True
        while changed:
            found = [self._want_join(n) for n in joins if n not in self.integer]
            changed = any(found)
        carried = self._carried()
        order = [*self.graph.inputs, *(v for n in self.graph for v in n.outputs)]
        return Placement(
            values=tuple(v.name or "" for v in order if v in self.wanted),
            layers=tuple(self.layers),
            integer=frozenset(n.name or "" for n in self.integer),
            carried=frozenset(n.name or "" for n in carried),
            gates={v.name or "": g for v in self.wanted if (g := _gate(v)) is not None},
            readers={name: tuple(layers) for name, layers in self.readers.items()},
        )

    def _want_layer(self, node: ir.Node, layer: Layer) -> None:
        value = activation_input(node)
        if value is None or not _is_float(value):
            return
        root = self._root(value)
        self._want(root)
        self.readers.setdefault(root.name or "", []).append(layer.name)
        self.integer[node] = None
        self.layers.append((layer, value.name or ""))
        if node.op_type in self.profile.output_needed:
            self.wanted.add(self._absorbing(node))

    def _want_join(self, node: ir.Node) -> bool:
        """Make a join integer where what it writes is wanted and what it reads can be had."""
        inputs = [v for v in node.inputs if v is not None]
        if any(constant_of(v) is not None or not _is_float(v) for v in inputs):
            return False
        if self._root(self._absorbing(node)) not in self.wanted:
            return False
        roots = [self._root(v) for v in inputs]
        if not all(r in self.wanted or self._can_emit(r) for r in roots):
            return False
        for root in roots:
            self._want(root)
        self.integer[node] = None
        return True

    def _want(self, value: ir.Value) -> None:
        """Note that a value has to be quantized, unless it is."""
        if quantized_source(value) is None:
            self.wanted.add(value)

    def _can_emit(self, value: ir.Value) -> bool:
        """Tell whether an integer kernel could write the value, or does."""
        if quantized_source(value) is not None:
            return True
        node = value.producer()
        if is_op(node, *self.profile.absorbed) and node is not None and node.inputs[0] is not None:
            node = node.inputs[0].producer()
        return node is not None and (node in self.integer or is_op(node, *self.profile.joins))

    def _absorbing(self, node: ir.Node) -> ir.Value:
        """The value that a node writes, after the activation that its kernel takes in."""
        value = node.outputs[0]
        uses = list(value.uses())
        if value.is_graph_output() or len(uses) != 1:
            return value
        reader = uses[0].node
        return reader.outputs[0] if is_op(reader, *self.profile.absorbed) else value

    def _root(self, value: ir.Value) -> ir.Value:
        """Follow a value back over nodes that only move elements."""
        node = value.producer()
        while node is not None and self._moves(node) and node.inputs[0] is not None:
            value = node.inputs[0]
            node = value.producer()
        return value

    def _moves(self, node: ir.Node) -> bool:
        if not is_op(node, *self.profile.carriers) or len(node.outputs) != 1:
            return False
        if node.op_type != "Pad":
            return True
        mode = node.attributes.get_string("mode", "constant")
        fill = node.inputs[2] if len(node.inputs) > 2 else None
        filled = None if fill is None else constant_array(fill)
        zero = fill is None or (filled is not None and not np.any(filled))
        return mode != "constant" or zero

    def _carried(self) -> dict[ir.Node, None]:
        """Nodes between a quantized value and an integer node that only move elements."""
        found: dict[ir.Node, None] = {}
        for reader in self.integer:
            for value in reader.inputs:
                node = None if value is None else value.producer()
                while node is not None and self._moves(node) and node.inputs[0] is not None:
                    found[node] = None
                    node = node.inputs[0].producer()
        return found


def place(model: ir.Model, profile: Profile, chosen: Collection[str]) -> Placement:
    """Choose the values to quantize.

    Layers' inputs are quantized, and outputs where the integer kernel needs it. Joins (residual
    adds, concats, pooling) become integer where everything around them is; what only moves
    elements then works on codes.

    Args:
        model: the graph; subgraphs stay in floating point.
        profile: the target's rules.
        chosen: names of the layers to make integer.
    """
    return _Placer(model, profile, chosen).run()


def quantized_source(value: ir.Value) -> ir.Node | None:
    """Return the ``DequantizeLinear`` of one scale that writes an activation, if it is one."""
    node = value.producer()
    if node is None or not is_op(node, "DequantizeLinear") or len(node.inputs) < 2:
        return None
    scale = constant_array(node.inputs[1])
    single = scale is not None and scale.size == 1 and constant_of(node.inputs[0]) is None
    return node if single else None


def _gate(value: ir.Value) -> str | None:
    """Return the output of the ReLU behind the one addition that reads the value.

    Where that is zero, the sum was negative, and the value's exact size made no difference.
    """
    add = _only_reader(value)
    relu = None if not is_op(add, "Add") or add is None else _only_reader(add.outputs[0])
    return relu.outputs[0].name if relu is not None and is_op(relu, "Relu") else None


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _is_float(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype == ir.DataType.FLOAT
