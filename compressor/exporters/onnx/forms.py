"""Rewrite weights that are stored as codes into the form that a runtime reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.exporters.onnx.float_layers import keep_floats
from compressor.exporters.onnx.images import as_images
from compressor.exporters.onnx.integer_products import (
    clip_codes,
    keep_apart,
    keep_integers,
    merge_biases,
    write_squares,
)
from compressor.exporters.onnx.matmul_nbits import (
    Compute,
    WeightOnly,
    pack,
    packed,
    packing_of,
    put_in_place,
    replaced,
    weight_only,
)
from compressor.exporters.onnx.row_products import as_gemms
from compressor.graph.editing import Chain, Editor
from compressor.graph.group_norms import as_instance_norms
from compressor.graph.half_transposes import transpose_as_floats
from compressor.graph.operators import operator, operator_named
from compressor.graph.pools import counts_beyond
from compressor.graph.stored_weights import looked_up
from compressor.graph.values import INTEGER_CODES, input_of, is_op, sole_reader, static_shape
from compressor.types.tensors import Array

_FLOAT = ir.DataType.FLOAT
_PAIR = 2  # bits: narrower than any element type of opset 21
_CAST = INTEGER_CODES | {ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2}
_SIGNED = (ir.DataType.INT4, ir.DataType.INT2)
_WIDER = {
    **dict.fromkeys((ir.DataType.INT4, ir.DataType.INT2), ir.DataType.INT8),
    **dict.fromkeys((ir.DataType.UINT4, ir.DataType.UINT2), ir.DataType.UINT8),
}
_EACH = 4  # codes of two bits in a byte


def expand(editor: Editor, weight: WeightOnly) -> None:
    """Replace a weight's ``DequantizeLinear``, and that of its scale, by elementary operators.

    Groups that do not divide the columns, and wider integers, stay as they are.
    """
    if weight.codes.dtype not in _CAST or not _divides(weight.dequantize):
        return
    scale = weight.scale.producer()
    if scale is not None and operator(scale).dequantizes:
        _Expansion(editor, scale, 0).replace()
    _Expansion(editor, weight.dequantize, weight.bits).replace()


def _divides(node: ir.Node) -> bool:
    codes, scale = node.inputs[:2]
    block = node.attributes.get_int("block_size", 0)
    if codes is None or scale is None:
        return False
    lengths, scales = static_shape(codes), static_shape(scale)
    if lengths is None or scales is None:
        return False
    axis = node.attributes.get_int("axis", 1)
    return not block or scales[axis] * block == lengths[axis]


class _Expansion:
    """The nodes that take the place of one ``DequantizeLinear``."""

    def __init__(self, editor: Editor, node: ir.Node, bits: int):
        self._editor, self._bits = editor, bits
        self._node = node
        self._name = node.outputs[0].name or ""
        self._chain = Chain(editor, f"{self._name}_")
        codes, scale = node.inputs[:2]
        assert codes is not None
        assert scale is not None
        self._codes, self._scale = codes, scale
        shape = static_shape(codes)
        assert shape is not None
        self._shape = shape

    def replace(self) -> None:
        node = self._node
        split, shared = self._shapes()
        value = self._split_codes(split)
        if (zero := input_of(node, 2)) is not None:
            shift = self._reshaped(self._float(zero), shared, "zero_point")
            value = self._chain.add("Sub", [value, shift], "shifted")
        scale = self._reshaped(self._float(self._scale), shared, "scale")
        value = self._chain.add("Mul", [value, scale], "scaled")
        value = self._reshaped(value, self._shape, "whole", split)
        named = node.attributes.get_int("output_dtype", 0)
        dtype = ir.DataType(named) if named else self._scale.dtype or _FLOAT
        if dtype != _FLOAT:
            value = self._chain.add("Cast", [value], "cast", dtype, {"to": dtype})
        value.shape = node.outputs[0].shape
        assert node.graph is not None
        ir.convenience.replace_nodes_and_values(
            node.graph, node, [node], self._chain.nodes, node.outputs, [value]
        )

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of the codes in which scales broadcast, and that of the scales."""
        scales = static_shape(self._scale) or ()
        axis = self._node.attributes.get_int("axis", 1)
        block = self._node.attributes.get_int("block_size", 0)
        if block:
            axis %= len(self._shape)
            split = (*self._shape[:axis], scales[axis], block, *self._shape[axis + 1 :])
            return split, (*scales[: axis + 1], 1, *scales[axis + 1 :])
        if len(scales) == 1 and self._shape:
            axis %= len(self._shape)
            return self._shape, (*scales, *[1] * (len(self._shape) - axis - 1))
        return self._shape, scales

    def _split_codes(self, split: tuple[int, ...]) -> ir.Value:
        """Return the codes as floats in the shape ``split``."""
        count = int(np.prod(self._shape))
        if self._bits == _PAIR and self._codes.is_initializer() and count % _EACH == 0:
            codes = self._float(self._looked_up_pairs(count))
            return self._reshaped(codes, split, "split", (count // _EACH, _EACH))
        return self._reshaped(self._float(self._codes), split, "split", self._shape)

    def _looked_up_pairs(self, count: int) -> ir.Value:
        """Store four codes of two bits in a byte, and look all four up in a table."""
        signed = self._codes.dtype in _SIGNED
        bytes_shape = (count // _EACH,)
        stored = replaced(
            self._editor, self._codes, _bytes_of_pairs, ir.DataType.UINT8, bytes_shape
        )
        name = "two_bits_signed" if signed else "two_bits"
        table = self._editor.shared_constant(name, _pairs(signed))
        kind = ir.DataType.INT32
        index = self._chain.add("Cast", [stored], "index", kind, {"to": kind})
        index.shape = stored.shape
        return self._chain.add("Gather", [table, index], "codes", table.dtype)

    def _float(self, value: ir.Value) -> ir.Value:
        if value.dtype == _FLOAT:
            return value
        cast = self._chain.add("Cast", [value], "float", attributes={"to": _FLOAT})
        cast.shape = value.shape
        return cast

    def _reshaped(
        self,
        value: ir.Value,
        shape: tuple[int, ...],
        suffix: str,
        have: tuple[int, ...] | None = None,
    ) -> ir.Value:
        if (static_shape(value) if have is None else have) == shape:
            return value
        lengths = self._editor.constant(f"{self._name}_{suffix}_shape", np.array(shape, np.int64))
        return self._chain.add("Reshape", [value, lengths], suffix)


def _bytes_of_pairs(codes: Array) -> Array:
    flat = codes.astype(np.int8).reshape(1, -1) & 3
    return packed(flat.astype(np.uint8), _PAIR).reshape(-1)


def _pairs(signed: bool) -> Array:
    """Return the four codes of two bits in each byte, int8 ``[256, 4]``, the low bits first."""
    shifted = np.arange(256)[:, None] >> np.arange(0, 8, _PAIR) & 3
    return (shifted - 4 * (shifted > 1) if signed else shifted).astype(np.int8)


def as_four_bit_floats(editor: Editor, weight: WeightOnly) -> None:
    """Store codes that are looked up in a table of doubled values as ``FLOAT4E2M1``.

    The scale is doubled in turn, to its true value. Scales of 8 bits keep their type and their own
    scale; powers of two become floats, because TensorRT's parser refuses ``FLOAT8E8M0``.
    """
    node = weight.dequantize
    if node.inputs[0] is weight.codes:
        return

    def changed(
        value: ir.Value, function: Callable[[Array], Array], dtype: ir.DataType, name: str = ""
    ) -> ir.Value:
        shape = static_shape(value)
        assert shape is not None
        return replaced(editor, value, function, dtype, shape, name)

    node.replace_input_with(0, changed(weight.codes, _patterns, ir.DataType.FLOAT4E2M1))
    scale, maker = weight.scale, weight.scale.producer()
    if maker is not None and operator(maker).dequantizes:
        half = maker.inputs[1]
        assert half is not None
        name = (half.name or "").replace("_half_scale", "_tensor_scale")
        maker.replace_input_with(1, changed(half, _doubled, _FLOAT, name))
        return
    exponents = looked_up(maker)
    if exponents is None:
        node.replace_input_with(1, changed(scale, _doubled, _FLOAT))
    else:
        node.replace_input_with(1, changed(exponents, _powers, _FLOAT))


def _patterns(codes: Array) -> Array:
    """Return the floats whose bits the codes are."""
    return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn)


def _doubled(half: Array) -> Array:
    return np.asarray(half * np.float32(2))


def _powers(exponents: Array) -> Array:
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)


def widen(editor: Editor, dequantize: ir.Node) -> None:
    """Let ONNX Runtime turn narrow codes into bytes when it loads them.

    It has kernels for products of bytes alone, and would dequantize a narrow weight in every run:
    ResNet-20 with weights of 4 bits took 2.15 ms in place of 0.70, as long as with 8.
    """
    codes = dequantize.inputs[0]
    assert codes is not None
    assert codes.dtype is not None
    wide = _WIDER[codes.dtype]
    chain = Chain(editor, codes.name or "")
    cast = chain.add("Cast", [codes], "_bytes", wide, {"to": wide})
    cast.shape = codes.shape
    dequantize.prepend(chain.nodes)
    dequantize.replace_input_with(0, cast)
    zero = input_of(dequantize, 2)
    shape = None if zero is None else static_shape(zero)
    if zero is not None and shape is not None:
        kind = np.int8 if wide == ir.DataType.INT8 else np.uint8
        stored = replaced(editor, zero, lambda array: array.astype(kind), wide, shape)
        dequantize.replace_input_with(2, stored)


def fuse_around_codes(editor: Editor) -> bool:
    """Write what ONNX Runtime does not recognize between codes as it wants it; return whether any.

    It reads ``x * sigmoid(x)`` as one operator, but not of codes, since each reader of codes gets
    a ``DequantizeLinear`` of its own. It merges a sum into the product before it where all axes
    are known, which then is none of integers any more. It quantizes in front of a pool of floats
    what is to be quantized after it. And in version 1.31 it has kernels for a bias with a GELU,
    and for a sum with a layer norm, that take longer than the two operators one by one: 1.3 times
    the former, seven times the latter.
    """
    changed = _keep_norms_apart(editor.model.graph)
    for node in tuple(editor.model.graph):
        first = input_of(node, 0)
        if first is None:
            continue
        if operator(node).quantizes and _is_pool_of_floats(first.producer()):
            _keep_behind(editor, node, first)
            changed = True
        if not operator(first.producer()).dequantizes:
            continue
        reader = sole_reader(node.outputs[0])
        if reader is None or reader.graph is not node.graph:
            continue
        if is_op(node, "Sigmoid") and operator(reader).arithmetic == "*" and first in reader.inputs:
            gate = {"alpha": 1.0}  # x * sigmoid(x) as one node
            put_in_place(editor, (node, reader), "QuickGelu", [first], gate, reader.name)
        elif operator(node).is_matmul and operator(reader).arithmetic == "+":
            if not keep_apart(editor, node, reader):
                continue
        else:
            continue
        changed = True
    return changed


def _narrow(model: ir.Model, floats: Sequence[WeightOnly]) -> list[ir.Node]:
    """Return what dequantizes narrow weights of integer products, with a scale for each row."""
    others = {weight.dequantize for weight in floats}
    return [
        node
        for node in model.graph
        if operator(node).dequantizes
        and node not in others
        and node.inputs[0] is not None
        and node.inputs[0].is_initializer()
        and node.inputs[0].dtype in _WIDER
        and not node.attributes.get_int("block_size", 0)
        and all(operator(use.node).is_product for use in node.outputs[0].uses())
    ]


def _keep_norms_apart(graph: ir.Graph) -> bool:
    """Write sums in front of layer norms so that they are not merged; return whether any."""
    sums = [
        node
        for node in graph
        if operator(node).arithmetic == "+"
        and not any(v is None or v.is_initializer() for v in node.inputs)
        and any(
            operator_named(use.node.op_type).family == "layer-norm"
            for use in node.outputs[0].uses()
        )
    ]
    for node in sums:
        node.op_type = "Sum"
    return bool(sums)


def _is_pool_of_floats(node: ir.Node | None) -> bool:
    """Whether a node chooses the greatest floats of each window, or has a wrong integer kernel."""
    row, source = operator(node), node.inputs[0] if node is not None and node.inputs else None
    if counts_beyond(node):
        return True
    pools = row.moves == "some" and row.family == "spatial"
    return pools and source is not None and not operator(source.producer()).dequantizes


def _keep_behind(editor: Editor, quantize: ir.Node, pooled: ir.Value) -> None:
    """Put a copy between a pool and what quantizes behind it, past which the runtime moves nothing.

    Codes with their channels first, as a convolution of floats leaves them, are pooled 30 times as
    slowly as floats.
    """
    chain = Chain(editor, pooled.name or "")
    copy = chain.add("Max", [pooled], "_pooled", pooled.dtype)
    copy.shape = pooled.shape
    quantize.prepend(chain.nodes)
    quantize.replace_input_with(0, copy)


def in_form_for(target: str, model: ir.Model, compute: Compute) -> ir.Model:
    """Return a model as a target reads it; the given one is not changed.

    No weight is evaluated: packed tensors are lazy, like those that they are made from.

    Args:
        target: ``ort-cpu``, ``ort-cuda``, ``openvino`` or ``tensorrt``; the last two read
            ``DequantizeLinear`` before a product, ONNX Runtime has an operator of its own.
        model: weights lie in ``DequantizeLinear``, as passes store them.
        compute: arithmetic of products in which only the weight is quantized.
    """
    changed = model.clone()
    editor = Editor(changed)
    on_cpu = target == "ort-cpu"
    norms = on_cpu and as_instance_norms(changed)
    images = on_cpu and as_images(editor)
    weights = weight_only(changed, target)
    narrow = _narrow(changed, weights) if on_cpu else []
    for node in narrow:
        widen(editor, node)
    clipped = on_cpu and clip_codes(editor)
    merged = on_cpu and merge_biases(editor)
    fused = on_cpu and fuse_around_codes(editor)
    for weight in weights:
        if target in ("tensorrt", "openvino"):
            as_four_bit_floats(editor, weight)
            continue
        packing = packing_of(weight, compute)
        if packing is None:
            expand(editor, weight)
        else:
            pack(editor, weight, packing, compute)
    rows = on_cpu and as_gemms(editor)
    kept = target.startswith("ort") and keep_floats(editor)
    integers = on_cpu and keep_integers(editor)
    wide = target.startswith("ort") and transpose_as_floats(changed)
    squares = target == "openvino" and write_squares(editor)
    around = (clipped, merged, fused, rows, kept, integers, wide, squares, images, norms)
    if not (weights or narrow or any(around)):
        return model
    common.RemoveUnusedNodesPass()(changed)
    return changed
