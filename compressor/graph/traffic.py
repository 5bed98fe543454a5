"""Count what a node reads and writes: weights and activations, in the types that are stored.

A runtime fuses what surrounds a quantized operator, so an activation counts in the type that it is
quantized to, and the quantization itself moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from compressor.graph.layers import layer_of, side_tensors, weight_source
from compressor.graph.values import dims, is_op, static_shape

_VIEWS = ("Constant", "Flatten", "Identity", "Reshape", "Shape", "Size", "Squeeze", "Unsqueeze")
_ROUNDING = ("QuantizeLinear", "DequantizeLinear")
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_FUSED = ("BatchNormalization", "Clip", "LeakyRelu", "Relu")
"""What a runtime computes while it writes a product."""


@dataclass(frozen=True)
class Traffic:
    """Elements and bytes that pass between a node and the memory.

    Attributes:
        weights: elements of weights that are read.
        weight_bytes: bytes of them, with their scales.
        activations: elements of activations that are read and written.
        activation_bytes: bytes of them.
        integer: the activation that a layer reads is stored as integers.
    """

    weights: int = 0
    weight_bytes: float = 0.0
    activations: int = 0
    activation_bytes: float = 0.0
    integer: bool = False

    @property
    def bytes(self) -> float:
        """All bytes."""
        return self.weight_bytes + self.activation_bytes


def node_traffic(node: ir.Node) -> Traffic | None:
    """Count what one node moves; ``None`` where a shape is not known.

    Args:
        node: of a graph without dynamic axes; those that remain count as 1.
    """
    if is_op(node, *_VIEWS) or _is_fused(node):
        return Traffic()
    weights = [0, 0.0]
    entering: list[ir.Value] = []
    for value in node.inputs:
        source = None if value is None else weight_source(value)[0]
        if source is not None and source.const_value is not None:
            size, moved = _read(node, source)
            weights = [weights[0] + size, weights[1] + moved]
        elif value is not None:
            entering.append(_stored(value))
    activations = [*entering, *(_written(value) for value in node.outputs if value.name)]
    shapes = [dims(value) for value in activations]
    if any(shape is None for shape in shapes):
        return None
    sizes = [prod(shape) for shape in shapes if shape is not None]
    widths = [_width(value) for value in activations]
    first = entering[0].dtype if entering else None
    return Traffic(
        weights=int(weights[0]),
        weight_bytes=weights[1],
        activations=sum(sizes),
        activation_bytes=sum(n * w for n, w in zip(sizes, widths, strict=True)),
        integer=first is not None and first.is_integer(),
    )


def _is_fused(node: ir.Node) -> bool:
    """Tell whether a node is a part of what comes before or after it."""
    if not node.inputs or node.inputs[0] is None:
        return False
    if is_op(node, "QuantizeLinear"):
        return not node.inputs[0].is_graph_input()
    if is_op(node, "DequantizeLinear"):
        return not node.outputs[0].is_graph_output()
    maker = node.inputs[0].producer()
    alone = len(tuple(node.inputs[0].uses())) == 1
    return is_op(node, *_FUSED) and alone and is_op(maker, *_PRODUCTS, *_FUSED)


def _read(node: ir.Node, source: ir.Value) -> tuple[int, float]:
    """Return how many elements of an initializer a node reads, and their bytes."""
    assert source.const_value is not None
    size, stored = prod(static_shape(source) or ()), float(source.const_value.nbytes)
    if is_op(node, "Gather") and layer_of(node) is not None:
        rows = prod(dims(node.outputs[0]) or ())  # the table is not read as a whole
        return rows, rows * stored / max(size, 1)
    if node.op_type == "MatMulNBits":
        size = node.attributes.get_int("N", 0) * node.attributes.get_int("K", 0)
        return (size if source is node.inputs[1] else 0), stored
    return size, stored + sum(_side_bytes(node, source))


def _side_bytes(node: ir.Node, source: ir.Value) -> Iterator[int]:
    graph = node.graph
    for name in side_tensors(source):
        value = None if graph is None else graph.initializers.get(name)
        if value is not None and value.const_value is not None:
            yield value.const_value.nbytes


def _stored(value: ir.Value) -> ir.Value:
    """Return the form in which an activation that a node reads is stored."""
    node = value.producer()
    while node is not None and is_op(node, "DequantizeLinear") and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _written(value: ir.Value) -> ir.Value:
    """Return the form in which an activation that a node writes is stored."""
    uses = tuple(value.uses())
    while len(uses) == 1 and is_op(uses[0].node, *_FUSED, "QuantizeLinear"):
        value = uses[0].node.outputs[0]
        uses = tuple(value.uses())
    return value


def _width(value: ir.Value) -> float:
    return 4.0 if value.dtype is None else value.dtype.itemsize
