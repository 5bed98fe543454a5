"""Operators around products of codes, in the forms that runtimes compute in integers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from compressor.exporters.onnx.float_layers import copy_behind
from compressor.exporters.onnx.matmul_nbits import put_in_place
from compressor.exporters.onnx.targets import quantized_type
from compressor.graph.editing import Chain, Editor
from compressor.graph.layers import layer_of, with_bias
from compressor.graph.operators import operator
from compressor.graph.values import (
    all_nodes,
    constant_array,
    input_of,
    is_op,
    sole_reader,
    static_shape,
)
from compressor.types.tensors import Array

_INTEGER = ("layer", "layer-with-zero")  # kernels that write floats too
_WEIGHTS = (ir.DataType.INT8, ir.DataType.UINT8)
_CLIPS_BYTES = 12  # the opset from which on ``Clip`` takes them
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


def keep_integers(editor: Editor) -> bool:
    """Put a copy after each product of codes that would be one of floats; return whether any.

    Behind a ``Relu`` or ``Clip``, ONNX Runtime (1.31) wants a ``QuantizeLinear``, as the only
    reader; and of a ``MatMul`` and an ``Add`` it makes a ``Gemm`` first. Then it decodes the weight
    in every run and multiplies floats: 2048 x 2048 weights took eight times as long as in float32.
    It moves nothing past a copy.
    """
    changed = False
    for node in tuple(editor.model.graph):
        if operator(node).kernels.get("ort-cpu") not in _INTEGER or not _is_of_codes(node):
            continue
        if _is_left_alone(node.outputs[0]):
            copy_behind(editor, node.outputs[0])
            changed = True
    return changed


def clip_codes(editor: Editor) -> bool:
    """Clip codes in place of the floats that they are made of; return whether any.

    A ``Clip`` that leaves out codes of a ``QuantizeLinear``, as ranges of fewer than eight bits do,
    keeps ONNX Runtime (1.31) from computing what comes before it in integers: networks of such
    convolutions took 1.4 to 1.8 times as long as in float32. As rounding is monotone, the codes of
    the ends are the ends of the codes. It makes unsigned codes of signed ones only where nothing
    lies between Q and DQ, so those are left alone.
    """
    if editor.model.opset_imports.get("", 0) < _CLIPS_BYTES:
        return False
    changed = False
    for node in tuple(editor.model.graph):
        found = _clipped_source(node) if operator(node).quantizes else None
        if found is not None:
            _clip_behind(editor, node, *found)
            changed = True
    return changed


def _clipped_source(quantize: ir.Node) -> tuple[ir.Value, Array] | None:
    """Return what is clipped and then made codes of, and the least and the largest of these.

    Return ``None`` where all codes of the type may occur, and where the source is made of floats.
    """
    source = quantize.inputs[0]
    scale, zero = (constant_array(input_of(quantize, i)) for i in (1, 2))
    if scale is None or scale.size != 1 or zero is None or zero.dtype != np.uint8:
        return None
    all_codes = codes = np.array([0, 255], np.uint8)
    while source is not None and sole_reader(source) is not None:
        ends = _ends(source.producer())
        if ends is None:
            break
        rounded = np.rint(ends / scale.item()) + zero.item()
        codes = rounded.clip(*all_codes).astype(np.uint8).clip(*codes)
        clip = source.producer()
        source = None if clip is None else clip.inputs[0]
    if source is None or np.array_equal(codes, all_codes):
        return None  # the runtime drops what leaves no code out
    maker = source.producer()
    if maker is not None and operator(maker).rectifies and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    read = () if maker is None else maker.inputs
    integer = any(operator(v.producer()).dequantizes for v in read if v is not None)
    return (source, codes) if integer else None


def _ends(node: ir.Node | None) -> Array | None:
    """Return the least and the largest value that a ``Clip`` lets through."""
    row = operator(node)
    if node is None or row.kernels.get("ort-cpu") != "absorbed" or row.rectifies:
        return None
    low, high = (constant_array(input_of(node, i)) for i in (1, 2))
    return None if low is None or high is None else np.array([low.item(), high.item()])


def _clip_behind(editor: Editor, quantize: ir.Node, source: ir.Value, ends: Array) -> None:
    codes, clip = quantize.outputs[0], quantize.inputs[0]
    made = None if clip is None else clip.producer()
    assert made is not None
    quantize.replace_input_with(0, source)
    chain, uses = Chain(editor, codes.name or ""), tuple(codes.uses())
    limits = [editor.shared_constant(f"code_{end}", np.asarray(end)) for end in ends]
    clipped = chain.add(made.op_type, [codes, *limits], "_clipped", codes.dtype)
    clipped.shape = codes.shape
    quantize.append(chain.nodes)
    for use in uses:
        use.node.replace_input_with(use.idx, clipped)


def _is_of_codes(node: ir.Node) -> bool:
    sides = [None if value is None else value.producer() for value in node.inputs[:2]]
    return all(side is not None and operator(side).dequantizes for side in sides)


def _is_left_alone(value: ir.Value) -> bool:
    """Whether what reads a product keeps ONNX Runtime from computing it in integers."""
    reader = sole_reader(value)
    if reader is not None and operator(reader).kernels.get("ort-cpu") == "absorbed":
        uses = tuple(reader.outputs[0].uses())
        return bool(uses) and not any(operator(use.node).quantizes for use in uses)
    if reader is not None and operator(reader).arithmetic == "+":
        return value.shape is None or len(value.shape) < _MERGED
    quantized = [operator(use.node).quantizes for use in value.uses()]
    return any(quantized) and (not all(quantized) or value.is_graph_output())


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
