"""Operators around products of codes, in the forms that runtimes compute in integers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from compressor.exporters.onnx.matmul_nbits import put_in_place
from compressor.exporters.onnx.targets import quantized_type
from compressor.graph.editing import Chain, Editor
from compressor.graph.layers import layer_of, with_bias
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes, input_of, is_op, sole_reader, static_shape

_WEIGHTS = (ir.DataType.INT8, ir.DataType.UINT8)
_MERGED = 3  # axes from which on ONNX Runtime merges a sum into the product before it


def merge_biases(editor: Editor) -> bool:
    """Write products of codes and their biases as ``MatMulIntegerToFloat``; return whether any.

    ONNX Runtime (1.31) makes that operator of a product between codes that writes floats. It could
    add the bias as it scales its sums, but only dynamic products get it that way: a static one has
    an ``Add`` after it, which reads and writes once more all that the product wrote. That took
    0.25 of 3.7 ms of MiniLM with 32 tokens (nothing that thread time shows of 8 x 72), and as a
    ``BiasGelu``, or in a ``Gemm`` of floats, more.

    Signed activations stay as they are: on x86 CPUs this operator takes ten times as long for them
    as for unsigned ones, which ONNX Runtime makes of them between Q and DQ only.
    """
    merged = [_merge(editor, node) for node in tuple(editor.model.graph)]
    return any(merged)


def _merge(editor: Editor, node: ir.Node) -> bool:
    layer = layer_of(node) if operator(node).is_product and operator(node).is_matmul else None
    if layer is None:
        return False
    last, bias = with_bias(node, layer)
    activation, weight = _decoded(node.inputs[0]), _decoded(node.inputs[1])
    if bias is None or bias.dtype != ir.DataType.FLOAT or activation is None or weight is None:
        return False
    if activation.dtype != ir.DataType.UINT8 or weight.dtype not in _WEIGHTS:
        return False
    if not _is_single(activation.scale):
        return False
    sides = (activation.scale, weight.scale, activation.zero_point, weight.zero_point)
    inputs = [activation.codes, weight.codes, *sides, bias]
    put_in_place(editor, (node, last), "MatMulIntegerToFloat", inputs, {}, node.name)
    return True


class _Codes(NamedTuple):
    codes: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None
    dtype: ir.DataType | None


def _decoded(value: ir.Value | None) -> _Codes | None:
    """Return what floats were decoded from that have a scale, or one for each column."""
    node = None if value is None else value.producer()
    if node is None or not operator(node).dequantizes:
        return None
    (codes, scale), block = node.inputs[:2], node.attributes.get_int("block_size", 0)
    if codes is None or scale is None or scale.dtype != ir.DataType.FLOAT or block:
        return None
    axis = node.attributes.get_int("axis", 1)
    if axis not in (-1, len(codes.shape or ()) - 1) and not _is_single(scale):
        return None
    return _Codes(codes, scale, input_of(node, 2), quantized_type(node))


def _is_single(value: ir.Value) -> bool:
    """Whether a value has one element."""
    return static_shape(value) in ((), (1,))


def keep_apart(editor: Editor, product: ir.Node, added: ir.Node) -> bool:
    """Give a bias more axes than ONNX Runtime merges, where it would; return whether it would."""
    whole = len(static_shape(product.outputs[0]) or ()) >= _MERGED
    if not whole and not is_op(sole_reader(added.outputs[0]), "Gelu"):
        return False
    index = next((i for i, v in enumerate(added.inputs) if v is not product.outputs[0]), None)
    bias = None if index is None else added.inputs[index]
    if index is None or bias is None or not bias.is_initializer():
        return False
    if len(static_shape(bias) or ()) != 1:
        return False
    axes = editor.shared_constant("bias_axes", np.asarray([0, 1], np.int64))
    chain = Chain(editor, bias.name or "")
    apart = chain.add("Unsqueeze", [bias, axes], "_apart", bias.dtype)
    added.prepend(chain.nodes)
    added.replace_input_with(index, apart)
    return True


def write_squares(editor: Editor) -> bool:
    """Write ``x * x`` and ``x + x`` as operators of one value; return whether there was any.

    OpenVINO computes a product or a sum of what a convolution gives in the kernel of the
    convolution. Where both sides are that value, kernels of integers give zeros (2026.4).
    """
    changed = False
    for node in list(all_nodes(editor.model.graph)):
        arithmetic, dtype = operator(node).arithmetic, node.outputs[0].dtype
        if arithmetic not in ("+", "*") or node.inputs[0] is not node.inputs[1]:
            continue
        if dtype is None or not dtype.is_floating_point():
            continue
        two = editor.shared_constant(f"two_{dtype.name}", np.array(2, dtype.numpy()))
        inputs, squared = [node.inputs[0], two], arithmetic == "*"
        made = ir.node("Pow", inputs) if squared else ir.node("Mul", inputs)
        made.name, graph, value = node.name, node.graph, node.outputs[0]
        assert graph is not None
        made.outputs[0].type, made.outputs[0].shape = value.type, value.shape
        ir.convenience.replace_nodes_and_values(
            graph, node, [node], [made], [value], [made.outputs[0]]
        )
        changed = True
    return changed
