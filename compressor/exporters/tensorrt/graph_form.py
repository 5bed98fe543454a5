"""A model in the form that TensorRT takes, and a stand-in for it with made-up weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Final

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx_ir import DataType

from compressor.errors import SpecError
from compressor.exporters.onnx import opsets
from compressor.exporters.onnx.exporter import OnnxExporter
from compressor.exporters.onnx.forms import in_form_for
from compressor.exporters.onnx.targets import Owners, is_dynamic, quantized_type
from compressor.graph.blocks import all_initializers
from compressor.graph.editing import Editor
from compressor.graph.operators import operator
from compressor.graph.skeleton import Skeleton
from compressor.graph.values import all_nodes, constant_array, constant_of, moved
from compressor.types.carrier import Carrier
from compressor.types.tensors import Array

_MIDDLE = 128
TARGET: Final = "tensorrt"
_FIRST_OPSET = 21
_LAST = 2  # dimensions along which blocks may lie, counted from the last
_ARGUMENT = 64  # elements: longer constants are weights, not sizes, axes or pads
_LARGEST = {DataType.INT8: 127, DataType.INT4: 7}


def in_terms_of_tensorrt(model: ir.Model) -> ir.Model:
    """Return a model in which uint8 around 128 is int8, and biases with a scale are floats.

    The model itself is returned where nothing has to change. Only biases are evaluated.

    Raises:
        SpecError: a tensor is uint8 and int8 cannot hold it, naming its layer or node.
    """
    linear = [node for node in all_nodes(model.graph) if operator(node).family == "quantization"]
    if not any(_is_integer_bias(node) or _reads_unsigned(node) for node in linear):
        return model
    changed = model.clone()
    editor = Editor(changed)
    linear = [node for node in all_nodes(changed.graph) if operator(node).family == "quantization"]
    biases = [node for node in linear if _is_integer_bias(node)]
    unsigned = [node for node in linear if _reads_unsigned(node)]
    for node in unsigned:
        _check_exact(node, changed)
    for node in biases:
        _store_float(editor, node)
    for node in unsigned:
        _shift(editor, node)
    common.RemoveUnusedNodesPass()(changed)
    return changed


def _is_integer_bias(node: ir.Node) -> bool:
    if not operator(node).dequantizes:
        return False
    tensor = constant_of(node.inputs[0])
    return tensor is not None and tensor.dtype == DataType.INT32


def _reads_unsigned(node: ir.Node) -> bool:
    """Whether a node's codes are uint8; nodes with computed scales do not count."""
    return not is_dynamic(node) and quantized_type(node) == DataType.UINT8


def _check_exact(node: ir.Node, model: ir.Model) -> None:
    subject = Owners(model).subject(node)
    if node.name and node.name not in subject:
        subject = f"{subject}, node {node.name!r}"
    zero = constant_array(node.inputs[2]) if len(node.inputs) > 2 else np.zeros((), np.uint8)
    remedy = "quantize the float model again, with symmetric int8"
    if zero is None:
        raise SpecError(subject, "has a uint8 zero point that is computed", remedy)
    wrong = zero.astype(np.int64).ravel()[zero.ravel() != _MIDDLE]
    if wrong.size:
        raise SpecError(
            subject,
            f"is uint8 with zero point {wrong[0]}; TensorRT takes int8 with zero point 0, which "
            f"is the same only for uint8 with {_MIDDLE}",
            remedy,
        )
    other = _reader_of_codes(node)
    if other:
        raise SpecError(
            subject, f"gives uint8 codes to {other}, which int8 codes would change", remedy
        )


def _reader_of_codes(node: ir.Node) -> str:
    """Return what reads the codes of a node besides DequantizeLinear, or nothing."""
    values = [node.outputs[0]] if operator(node).quantizes else []
    while values:
        value = values.pop()
        if value.is_graph_output():
            return f"the model's output {value.name!r}"
        for use in value.uses():
            if moved(use.node) is not None and use.idx == 0:
                values.append(use.node.outputs[0])
            elif not (operator(use.node).dequantizes and use.idx == 0):
                return f"node {use.node.name!r} ({use.node.op_type})"
    return ""


def _store_float(editor: Editor, node: ir.Node) -> None:
    codes, scale = constant_array(node.inputs[0]), constant_array(node.inputs[1])
    result = node.outputs[0]
    if codes is None or scale is None:
        return  # the target's rules refuse it, by name
    bias = codes.astype(np.float32) * scale.astype(np.float32)
    name = node.inputs[0].name if node.inputs[0] is not None else None
    value = editor.constant(f"{name or result.name}_float", bias.astype(scale.dtype))
    result.replace_all_uses_with(value)


def _shift(editor: Editor, node: ir.Node) -> None:
    """Make the codes int8, whose zero point is 0."""
    value = node.inputs[0]
    if operator(node).dequantizes and value is not None:
        tensor = constant_of(value)
        if tensor is not None and tensor.dtype == DataType.UINT8:
            node.replace_input_with(0, _signed(editor, value, tensor))
        elif tensor is None:
            value.type = ir.TensorType(DataType.INT8)
    else:
        node.outputs[0].type = ir.TensorType(DataType.INT8)
        _retype_moves(node.outputs[0])
        if "output_dtype" in node.attributes:
            node.attributes["output_dtype"] = ir.AttrInt64("output_dtype", int(DataType.INT8))
    scale = constant_of(node.inputs[1])
    shape = () if scale is None else tuple(int(d) for d in scale.shape.numpy())
    zero = editor.constant(f"{node.name or node.outputs[0].name}_zero", np.zeros(shape, np.int8))
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, zero)


def _retype_moves(value: ir.Value) -> None:
    for use in value.uses():
        if moved(use.node) is not None:
            use.node.outputs[0].type = ir.TensorType(DataType.INT8)
            _retype_moves(use.node.outputs[0])


def _signed(editor: Editor, value: ir.Value, tensor: ir.TensorProtocol) -> ir.Value:
    """Return an initializer with the codes less 128; they are computed when they are read."""
    name = f"{value.name}_int8"
    shared = editor.model.graph.initializers.get(name)
    if shared is not None:
        return shared
    shape = ir.Shape(tensor.shape.numpy())
    return editor.initializer(
        name, ir.LazyTensor(partial(_shifted, tensor), dtype=DataType.INT8, shape=shape)
    )


def _shifted(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    codes: Array = np.asarray(tensor.numpy()).astype(np.int16) - _MIDDLE
    return ir.Tensor(codes.astype(np.int8))


def with_node_names(model: ir.Model) -> ir.Model:
    """Return a model in which every node has a unique name: the model itself if it is so already.

    A node without a name is named after what it writes.
    """
    counted = Counter(node.name or "" for node in all_nodes(model.graph))
    if "" not in counted and all(count == 1 for count in counted.values()):
        return model
    changed = model.clone()
    taken = {name for name, count in counted.items() if name and count == 1}
    for node in all_nodes(changed.graph):
        if node.name and counted[node.name] == 1:
            continue
        base = node.name or next((v.name for v in node.outputs if v.name), "") or node.op_type
        name, number = base, 1
        while name in taken:
            name, number = f"{base}_{number}", number + 1
        node.name = name
        taken.add(name)
    return changed


@dataclass(frozen=True)
class Form:
    """A model as TensorRT gets it.

    Attributes:
        carrier: the model; every node has a name.
        model: what the ONNX file holds, its weights lazy.
        onnx: writes the file.
    """

    carrier: Carrier
    model: ir.Model
    onnx: OnnxExporter


def form_of(carrier: Carrier) -> Form:
    """Return the form of a model; no weight is evaluated.

    Raises:
        SpecError: no opset has all of it, or it is quantized in a way that
            TensorRT does not take.
    """
    graph = carrier.graph()
    changed = with_node_names(in_terms_of_tensorrt(graph))
    changed_carrier = carrier if changed is graph else carrier.with_graph(changed)
    formed = in_form_for(TARGET, changed, "float32")
    opset = _opset(formed)
    onnx = OnnxExporter(target=TARGET, opset=opset)
    return Form(changed_carrier, opsets.convert(formed, opset), onnx)


def _opset(model: ir.Model) -> int:
    """Return the first opset, from 21 on, that has all of a graph."""
    first: SpecError | None = None
    for opset in range(_FIRST_OPSET, opsets.newest_opset() + 1):
        try:
            opsets.check_opset(opsets.convert(model, opset), opset)
        except SpecError as error:
            first = first or error
        else:
            return opset
    assert first is not None
    raise SpecError(first.subject, first.problem, "leave out the export tensorrt") from first


def check_blocks(model: ir.Model) -> None:
    """Check that blocks of weights lie along dimensions that TensorRT takes.

    Those of a convolution's weight, ``[outputs, inputs, height, width]``, lie along the inputs.

    Raises:
        SpecError: naming the layer.
    """
    for node in all_nodes(model.graph):
        if not operator(node).dequantizes or not node.attributes.get_int("block_size", 0):
            continue
        tensor = constant_of(node.inputs[0])
        if tensor is None:
            continue
        rank = len(tensor.shape)
        axis = node.attributes.get_int("axis", 1) % rank
        if rank - axis > _LAST:
            raise SpecError(
                Owners(model).subject(node),
                f"is quantized in groups along dimension {axis} of {rank}, but TensorRT takes only "
                "the last two",
                "give it 8 bits and one scale per channel, or skip it with a rule under layers",
            )


def stand_in(parts: Skeleton) -> bytes:
    """Return a serialized model with made-up weights; none of the model's weights is evaluated.

    Small constants that need no computing keep their values, because shapes depend on them.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(parts.proto)
    for index, tensor in enumerate(all_initializers(proto.graph)):
        value = parts.tensors[tensor.name]
        if value.dtype == DataType.STRING:
            tensor.string_data.extend(ir.serde.serialize_tensor(value).string_data)
            continue
        shape = tuple(int(d) for d in value.shape.numpy())
        kept = prod(shape) <= _ARGUMENT and not isinstance(value, ir.LazyTensor)
        made = value if kept else _made_up(value.dtype, shape, index)
        tensor.raw_data = made.tobytes()
    return bytes(proto.SerializeToString(deterministic=True))


def weight_bytes(parts: Skeleton) -> int:
    """Return the bytes of all initializers."""
    return sum(tensor.nbytes for tensor in parts.tensors.values())


def _made_up(dtype: DataType, shape: tuple[int, ...], seed: int) -> ir.TensorProtocol:
    """Return numbers that differ, since TensorRT stores a tensor of equal numbers as one.

    Floats are positive, as scales and variances must be; indices are 0, which always exists.
    """
    random = np.random.default_rng(seed)
    if dtype in _LARGEST:
        values = random.integers(-_LARGEST[dtype], _LARGEST[dtype] + 1, shape).astype(np.int8)
        return ir.Tensor(values.astype(dtype.numpy()), dtype=dtype)
    if dtype.is_floating_point():
        values = random.uniform(0.25, 1.0, shape).astype(np.float32)
        return ir.Tensor(values.astype(dtype.numpy()), dtype=dtype)
    return ir.Tensor(np.zeros(shape, np.int8).astype(dtype.numpy()), dtype=dtype)
