"""Weights stored as codes and multiplied with floats; ``MatMulNBits`` of ONNX Runtime for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import onnx_ir as ir
import torch

from compressor.graph.codes import BITS
from compressor.graph.editing import Editor
from compressor.graph.layers import is_bias, layer_of, with_bias
from compressor.graph.operators import operator
from compressor.graph.stored_weights import looked_up
from compressor.graph.values import INTEGER_CODES, all_nodes, input_of, maker_behind, static_shape
from compressor.models.codec.bit_stream import pack_bits
from compressor.types.layers import Layer
from compressor.types.tensors import Array

Compute = Literal["float32", "int8"]
DOMAIN = "com.microsoft"
_ALL = 3  # inputs of a DequantizeLinear whose zero point is written out
_BLOCKS = (256, 128, 64, 32, 16)
ACCURACY: dict[Compute, int] = {"float32": 1, "int8": 4}
"""The attribute ``accuracy_level``: what activations are rounded to."""

_KERNELS: dict[str, dict[int, int]] = {"float32": {4: 16}, "int8": {2: 32, 4: 16, 8: 16}}
"""The smallest block that ONNX Runtime 1.31 has a kernel for, by arithmetic and width of codes.

It accepts other combinations too, but expands all codes to floats in every run: for one token and a
weight of 1024 by 2816, that took 14 ms in place of 0.3 ms.
"""

_SIGNED = (ir.DataType.INT8, ir.DataType.INT4, ir.DataType.INT2)
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_TWO_BITS = 2
_BIAS = 5  # its place among the inputs


@dataclass(frozen=True)
class WeightOnly:
    """A weight whose codes are turned into floats and then multiplied with floats.

    Attributes:
        dequantize: the ``DequantizeLinear`` that does so.
        products: the nodes that read the result, through casts and transposes, each with its
            layer; a ``Gather`` of rows has none.
        alone: whether nothing else reads the codes.
    """

    dequantize: ir.Node
    codes: ir.Value
    products: tuple[tuple[ir.Node, Layer | None], ...]
    alone: bool

    @property
    def scale(self) -> ir.Value:
        """What the codes are multiplied with: an initializer, or computed from some."""
        value = self.dequantize.inputs[1]
        assert value is not None
        return value

    @property
    def zero_point(self) -> ir.Value | None:
        """The initializer of the zero points, if there are any."""
        return input_of(self.dequantize, 2)

    @property
    def bits(self) -> int:
        """Width of a code, which may be less than that of its element type."""
        stored = self.codes.dtype
        width = 0 if stored is None else stored.bitwidth
        return int(self.dequantize.metadata_props.get(BITS, width))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The products' layers."""
        return tuple(layer for _, layer in self.products if layer is not None)


def weight_only(model: ir.Model, target: str = "") -> list[WeightOnly]:
    """Return the weights that are stored as codes and multiplied with floats, in graph order.

    Args:
        model: weights lie in ``DequantizeLinear``.
        target: decides whether a product of codes with codes is one of integers.
    """
    weights = []
    for node in all_nodes(model.graph):
        if not operator(node).dequantizes:
            continue
        codes = _codes(node.inputs[0])
        if codes is None or codes.shape is None or len(codes.shape) < 2:
            continue
        readers = list(_readers(node.outputs[0]))
        products = [(reader, layer_of(reader)) for reader, _ in readers]
        if readers and all(_is_float(*reader, target) for reader in readers):
            alone = len(list(codes.uses())) == 1
            weights.append(WeightOnly(node, codes, tuple(products), alone))
    return weights


def _codes(value: ir.Value | None) -> ir.Value | None:
    if value is None or value.is_initializer():
        return value
    return looked_up(value.producer())


def _readers(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """Yield what reads a value, and as which input; casts and transposes are seen through."""
    for use in value.uses():
        view = operator(use.node).moves in ("same", "type", "order")
        if view and not use.node.outputs[0].is_graph_output():
            yield from _readers(use.node.outputs[0])
        else:
            yield use.node, use.idx


def _is_float(node: ir.Node, index: int, target: str) -> bool:
    """Whether a reader multiplies floats with the weight, or looks up its rows."""
    row = operator(node)
    if row.recurrent and index in (1, 2):
        return True
    if row.is_table and index == 0:
        return not any(operator(use.node).quantizes for use in node.outputs[0].uses())
    if not row.is_product or index != 1:
        return False
    # ONNX Runtime moves quantization over what only moves elements, so that after that a product
    # may still be of integers.
    if maker_behind(node.inputs[0], lambda row: row.dequantizes) is None:
        return True
    kernel = {str(name): kernel for name, kernel in row.kernels.items()}.get(target)
    if kernel == "layer-with-zero":
        weight = None if node.inputs[1] is None else node.inputs[1].producer()
        return operator(weight).dequantizes and weight is not None and len(weight.inputs) < _ALL
    return kernel == "layer-to-codes" and not _writes_codes(node.outputs[0])


def _writes_codes(value: ir.Value) -> bool:
    readers = [use.node for use in value.uses()]
    if len(readers) == 1 and operator(readers[0]).fused:
        return _writes_codes(readers[0].outputs[0])
    return any(operator(reader).quantizes for reader in readers)


@dataclass(frozen=True)
class Packing:
    """How a weight is packed.

    Attributes:
        layer: whose weight it is, ``rows`` by ``columns``.
        block: columns that share a scale.
        offset: what is added to signed codes.
        group: columns that have one scale so far; 0 where all have.
    """

    layer: Layer
    bits: int
    block: int
    offset: int
    group: int

    @property
    def blocks(self) -> int:
        """Blocks in a row, the last one padded."""
        return -(-self.layer.columns // self.block)

    @property
    def code_shape(self) -> tuple[int, int, int]:
        """Shape of the packed codes."""
        return self.layer.rows, self.blocks, self.block * self.bits // 8

    @property
    def zero_shape(self) -> tuple[int, int]:
        """Shape of the packed zero points."""
        return self.layer.rows, -(-self.blocks * self.bits // 8)

    def codes(self, stored: Array) -> Array:
        """Pack codes in the weight's stored shape."""
        matrix = self._unsigned(stored.T if self.layer.transposed else stored)
        missing = self.blocks * self.block - self.layer.columns
        padded = np.pad(matrix, ((0, 0), (0, missing)))
        return packed(padded, self.bits).reshape(self.code_shape)

    def scales(self, stored: Array) -> Array:
        """Repeat scales to one a block, ``[rows, blocks]``."""
        rows = self.layer.rows
        if stored.ndim < 2:
            return np.repeat(np.broadcast_to(stored.reshape(-1, 1), (rows, 1)), self.blocks, 1)
        by_row = stored.T if self.layer.transposed else stored
        return np.repeat(by_row, self.group // self.block, 1)[:, : self.blocks]

    def zero_points(self, stored: Array) -> Array:
        """Pack zero points, one a block."""
        matrix = self._unsigned(self.scales(stored))
        missing = self.zero_shape[1] * 8 // self.bits - self.blocks
        return packed(np.pad(matrix, ((0, 0), (0, missing))), self.bits)

    def _unsigned(self, codes: Array) -> Array:
        return (codes.astype(np.int16) + self.offset).astype(np.uint8)


def packed(codes: Array, bits: int) -> Array:
    """Pack unsigned codes ``[rows, columns]`` along columns, the low bits first."""
    stream = pack_bits(torch.from_numpy(codes), bits).numpy()
    return np.asarray(stream.reshape(codes.shape[0], -1))


def packing_of(weight: WeightOnly, compute: Compute) -> Packing | None:
    """Return how a weight is packed, or ``None`` where it has to be stored in another way."""
    dtype = weight.codes.dtype
    if dtype is None or dtype not in INTEGER_CODES or not _is_stored(weight):
        return None
    if not all(
        layer is not None and _is_plain(node, layer, weight) for node, layer in weight.products
    ):
        return None
    layer, *others = weight.layers
    group = weight.dequantize.attributes.get_int("block_size", 0)
    if any(other.transposed != layer.transposed for other in others):
        return None
    if not _runs_along_columns(weight, layer, group):
        return None
    bits = _TWO_BITS if weight.bits == _TWO_BITS else dtype.bitwidth
    block = block_of(group, layer.columns)
    if not has_kernel(bits, block, compute):
        return None
    return Packing(layer, bits, block, 1 << (bits - 1) if dtype in _SIGNED else 0, group)


def pack(editor: Editor, weight: WeightOnly, packing: Packing, compute: Compute) -> None:
    """Replace the products with a weight; what dequantized it is then read by nothing."""
    uint8, scale = ir.DataType.UINT8, weight.scale
    assert scale.dtype is not None
    blocks = (packing.layer.rows, packing.blocks)
    stored: list[ir.Value | None] = [
        replaced(editor, weight.codes, packing.codes, uint8, packing.code_shape),
        replaced(editor, scale, packing.scales, scale.dtype, blocks),
    ]
    if weight.zero_point is not None:
        zeros = packing.zero_points, uint8, packing.zero_shape
        stored.append(replaced(editor, weight.zero_point, *zeros))
    for node, layer in weight.products:
        assert layer is not None
        last, bias = with_bias(node, layer)
        inputs = [node.inputs[0], *stored]
        if bias is not None:
            inputs += [None] * (_BIAS - len(inputs)) + [bias]
        fields = {
            "K": layer.columns,
            "N": layer.rows,
            "bits": packing.bits,
            "block_size": packing.block,
            "accuracy_level": ACCURACY[compute],
        }
        last.outputs[0].type = last.outputs[0].type or node.outputs[0].type
        put_in_place(editor, (node, last), "MatMulNBits", inputs, fields, node.name)


def put_in_place(
    editor: Editor,
    nodes: tuple[ir.Node, ir.Node],
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, int | float],
    name: str | None,
) -> None:
    """Put an operator of ONNX Runtime's own in place of two nodes, or of one that is both.

    Args:
        nodes: the second gives the output.
    """
    first, last = nodes
    old = last.outputs[0]
    new = ir.Value(name=old.name, type=old.type, shape=old.shape)
    made = ir.node(op_type, inputs, attributes, domain=DOMAIN, outputs=[new], name=name)
    editor.model.opset_imports[DOMAIN] = 1
    gone = [last] if first is last else [last, first]
    assert last.graph is not None
    ir.convenience.replace_nodes_and_values(last.graph, last, gone, [made], [old], [new])


def _is_stored(weight: WeightOnly) -> bool:
    """Whether codes, scales and zero points are initializers that nothing else reads."""
    zero = weight.zero_point
    if weight.dequantize.inputs[0] is not weight.codes or not weight.alone:
        return False
    if not weight.scale.is_initializer():
        return False
    return weight.codes.dtype in _SIGNED if zero is None else zero.is_initializer()


def _runs_along_columns(weight: WeightOnly, layer: Layer, group: int) -> bool:
    """Whether the scales belong to rows, or to groups of their columns."""
    axis = weight.dequantize.attributes.get_int("axis", 1) % len(layer.shape)
    scales = static_shape(weight.scale)
    if scales == ():
        return True
    return axis == (layer.output_axis if not group else 1 - layer.output_axis)


def has_kernel(bits: int, block: int, compute: Compute) -> bool:
    """Return whether ONNX Runtime multiplies with blocks of codes without expanding them."""
    return block >= _KERNELS[compute].get(bits, block + 1)


def block_of(group: int, columns: int) -> int:
    """Return the largest block in which all columns have one scale; 0 if there is none.

    Args:
        group: columns that have one scale; 0 where all have.
    """
    if not group:
        return next((b for b in reversed(_BLOCKS) if b >= columns), _BLOCKS[0])
    return next((b for b in _BLOCKS if group % b == 0), 0)


def _is_plain(node: ir.Node, layer: Layer, weight: WeightOnly) -> bool:
    """Whether a node computes nothing but what ``MatMulNBits`` computes."""
    if weight.scale.dtype not in _FLOATS or len(layer.shape) != 2:
        return False
    value = node.inputs[1]
    while value is not None and (view := value.producer()) is not weight.dequantize:
        if view is None or operator(view).moves == "type":
            return False
        value = view.inputs[0]
    row = operator(node)
    if row.bias_is_separate:
        return True
    bias = input_of(node, 2)
    scaled = any(node.attributes.get_float(name, 1.0) != 1 for name in ("alpha", "beta"))
    turned = node.attributes.get_int("transA", 0) == 1
    return layer.is_linear and not (scaled or turned) and (bias is None or is_bias(bias, layer))


def replaced(
    editor: Editor,
    value: ir.Value,
    function: Callable[[Array], Array],
    dtype: ir.DataType,
    shape: tuple[int, ...],
    name: str = "",
) -> ir.Value:
    """Return an initializer with another form of a value; nothing is computed yet.

    Args:
        editor: the model's; the value leaves it unless something else reads it.
        value: an initializer.
        function: takes its elements and returns those of the new one.
        name: the new name; by default the value's.
    """
    tensor = value.const_value
    assert tensor is not None
    if len(list(value.uses())) == 1:
        editor.release(value)
    lazy = ir.LazyTensor(partial(_computed, tensor, function, dtype), dtype, ir.Shape(shape))
    return editor.initializer(name or value.name or "", lazy)


def _computed(
    tensor: ir.TensorProtocol, function: Callable[[Array], Array], dtype: ir.DataType
) -> ir.TensorProtocol:
    return ir.Tensor(np.ascontiguousarray(function(np.asarray(tensor.numpy()))), dtype=dtype)
