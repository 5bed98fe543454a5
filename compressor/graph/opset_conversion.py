"""Bring a graph to another opset with the onnx package's converter, weights untouched."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir
from onnx import TensorProto, defs, helper

from compressor.graph.as_json import skeleton
from compressor.graph.values import value_by_name

_READ_BY_CONVERTER = 1024  # bytes: axes and shapes, whose values some conversions need


def converted(model: ir.Model, opset: int) -> ir.Model:
    """Return the graph in another opset, older or newer; the given one is not changed.

    The converter copies what it is given, and takes no message of 2 GB. So weights go in as
    inputs without a value and are attached again.

    Raises:
        RuntimeError: an operator cannot be converted.
        onnx_ir.serde.SerdeError: the converter wrote a graph that cannot be read.
        ModelError: an initializer has no value.
    """
    parts = skeleton(model)
    proto = parts.proto
    proto.ir_version = max(proto.ir_version, 4)  # initializers need not be inputs from there on
    _drop_defaults(proto.graph, model.opset_imports.get("", opset), opset)
    inputs = len(proto.graph.input)
    _give_as_inputs(proto.graph, parts.tensors)
    result = ir.from_proto(onnx.version_converter.convert_version(proto, opset))
    graph = result.graph
    # Deleting a slice would leave these values marked as inputs.
    weights = [graph.inputs.pop() for _ in range(len(graph.inputs) - inputs)][::-1]
    for value in weights:
        value.const_value = parts.tensors[value.name or ""]
        graph.register_initializer(value)
    _restore_types(model, result)
    return result


def _give_as_inputs(graph: onnx.GraphProto, tensors: dict[str, ir.TensorProtocol]) -> None:
    """Turn empty initializers into inputs, and fill in those whose values a conversion reads."""
    filled = []
    for empty in graph.initializer:
        tensor = tensors[empty.name]
        lazy = isinstance(tensor, ir.LazyTensor)
        if tensor.dtype == ir.DataType.INT64 and tensor.nbytes <= _READ_BY_CONVERTER and not lazy:
            empty.raw_data = tensor.tobytes()
            filled.append(empty)
            continue
        graph.input.append(
            helper.make_tensor_value_info(empty.name, empty.data_type, list(empty.dims))
        )
    kept = [TensorProto.FromString(tensor.SerializeToString()) for tensor in filled]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _drop_defaults(graph: onnx.GraphProto, have: int, opset: int) -> None:
    """Remove attributes that the target opset does not know and that say the default anyway."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _drop_defaults(attribute.g, have, opset)
        if not (_has(node, opset) and _has(node, have)):
            continue
        known = defs.get_schema(node.op_type, opset, "").attributes
        own = defs.get_schema(node.op_type, have, "").attributes
        useless = [
            a for a in node.attribute if a.name not in known and _is_default(a, own.get(a.name))
        ]
        for attribute in useless:
            node.attribute.remove(attribute)


def _has(node: onnx.NodeProto, opset: int) -> bool:
    return node.domain in ("", "ai.onnx") and defs.has(node.op_type, opset, "")


def _is_default(attribute: onnx.AttributeProto, formal: defs.OpSchema.Attribute | None) -> bool:
    if formal is None or not formal.default_value.name:
        return False
    default = helper.get_attribute_value(formal.default_value)
    return bool(np.array_equal(helper.get_attribute_value(attribute), default))


def _restore_types(model: ir.Model, converted: ir.Model) -> None:
    """Give inputs, outputs and intermediate values their types and shapes again.

    The converter renames dynamic axes and loses what its own inference does not find.
    """
    before = value_by_name(model)
    for name, value in value_by_name(converted).items():
        known = before.get(name)
        if known is not None and known.type is not None and value.const_value is None:
            value.type, value.shape = known.type, known.shape
