"""Which weights of a graph are stored as codes while what they are multiplied with is float."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from compressor.graph.codes import BITS
from compressor.graph.layers import layer_of, looked_up
from compressor.graph.values import all_nodes, is_op, maker_behind
from compressor.types.layers import Layer

_VIEWS = ("Cast", "Transpose", "Identity")
_PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose")


@dataclass(frozen=True)
class WeightOnly:
    """A weight whose codes are turned into floats and then multiplied with floats.

    Attributes:
        dequantize: the ``DequantizeLinear`` that does so.
        codes: the initializer of the codes.
        products: the nodes that read the result, through casts and transposes, each with its
            layer; a ``Gather`` of rows has none.
        alone: nothing else reads the codes.
    """

    dequantize: ir.Node
    codes: ir.Value
    products: tuple[tuple[ir.Node, Layer | None], ...]
    alone: bool

    @property
    def scale(self) -> ir.Value:
        """What the codes are multiplied with: an initializer, or computed of some."""
        value = self.dequantize.inputs[1]
        assert value is not None
        return value

    @property
    def zero_point(self) -> ir.Value | None:
        """The initializer of the zero points, if there are any."""
        return self.dequantize.inputs[2] if len(self.dequantize.inputs) > 2 else None

    @property
    def bits(self) -> int:
        """Width of a code, which may be less than that of its element type."""
        stored = self.codes.dtype
        width = 0 if stored is None else stored.bitwidth
        return int(self.dequantize.metadata_props.get(BITS, width))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers among the products."""
        return tuple(layer for _, layer in self.products if layer is not None)


def weight_only(model: ir.Model) -> list[WeightOnly]:
    """Find them, in the order of execution."""
    found = []
    for node in all_nodes(model.graph):
        if not is_op(node, "DequantizeLinear"):
            continue
        codes = _codes(node.inputs[0])
        if codes is None or codes.shape is None or len(codes.shape) < 2:
            continue
        readers = list(_readers(node.outputs[0]))
        products = [(reader, layer_of(reader)) for reader, _ in readers]
        if readers and all(_is_float(*reader) for reader in readers):
            alone = len(list(codes.uses())) == 1
            found.append(WeightOnly(node, codes, tuple(products), alone))
    return found


def _codes(value: ir.Value | None) -> ir.Value | None:
    if value is None:
        return None
    if value.is_initializer():
        return value
    node = value.producer()
    return None if node is None else looked_up(node)


def _readers(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """Yield what reads a value, and as which input; casts and transposes are seen through."""
    for use in value.uses():
        if is_op(use.node, *_VIEWS) and not use.node.outputs[0].is_graph_output():
            yield from _readers(use.node.outputs[0])
        else:
            yield use.node, use.idx


def _is_float(node: ir.Node, index: int) -> bool:
    """Tell whether a reader multiplies floats with the weight, or looks up its rows."""
    if is_op(node, "Gather") and index == 0:
        return not any(is_op(use.node, "QuantizeLinear") for use in node.outputs[0].uses())
    if not is_op(node, *_PRODUCTS) or index != 1:
        return False
    # ONNX Runtime moves quantization over what only moves elements, so that behind that a product
    # may still be of integers.
    return maker_behind(node.inputs[0], "DequantizeLinear") is None
