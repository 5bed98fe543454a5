"""Names for messages: which layer a node of the graph belongs to."""

from __future__ import annotations

import re
from functools import cache

import onnx_ir as ir
from onnx import TensorProto, defs, helper

from compressor.errors import SpecError
from compressor.graph.layers import layers_with_nodes
from compressor.graph.operators import operator_named
from compressor.graph.skeleton import converted
from compressor.graph.values import all_nodes


class Owners:
    """Tells which layer a node is of: the layer's own, or what brings it its inputs.

    Args:
        model: the graph.
    """

    def __init__(self, model: ir.Model):
        self._layers: dict[ir.Node, str] = {}
        for layer, node in layers_with_nodes(model):
            self._layers.setdefault(node, layer.name)
            for value in node.inputs:
                self._claim(value, layer.name)

    def subject(self, node: ir.Node) -> str:
        """Return ``layer 'fc'``; for a node of no layer its constant, or its name and operator."""
        layer = self._layers.get(node)
        if layer is not None:
            return f"layer {layer!r}"
        first = node.inputs[0] if node.inputs else None
        if _wraps(node) and first is not None and first.is_initializer():
            return f"tensor {first.name!r}"
        return f"node {node.name!r} ({node.op_type})" if node.name else f"a {node.op_type} node"

    def _claim(self, value: ir.Value | None, layer: str) -> None:
        """Give a layer what wraps an input of its, or computes its weight from constants."""
        node = None if value is None else value.producer()
        if node is None or node in self._layers:
            return
        if not _wraps(node) and not _is_constant(node):
            return
        self._layers[node] = layer
        for inner in node.inputs:
            self._claim(inner, layer)


def _wraps(node: ir.Node) -> bool:
    """Whether a node rounds, casts or turns what a layer reads."""
    row = operator_named(node.op_type)
    rounds = row.family == "quantization" or node.op_type == "DynamicQuantizeLinear"
    return rounds or row.moves in ("type", "order")


def _is_constant(node: ir.Node) -> bool:
    """Tell whether a node computes something of initializers alone."""
    for value in node.inputs:
        if value is None or value.is_initializer():
            continue
        maker = value.producer()
        if maker is None or not _is_constant(maker):
            return False
    return True


OLDEST = 17


@cache
def newest_opset() -> int:
    """Return the newest opset that both the installed onnx and ONNX Runtime know."""
    known = defs.onnx_opset_version()
    return next(opset for opset in range(known, 0, -1) if _runtime_knows(opset))


def ir_version(opset: int) -> int:
    """Return the file format version that came with an opset; newer ones some readers refuse."""
    return helper.find_min_ir_version_for([helper.make_opsetid("", opset)])


def check_opset(model: ir.Model, opset: int) -> None:
    """Check that an opset has the operators and element types of a graph.

    Raises:
        SpecError: naming the first layer or node that it cannot express, and the opset that can.
    """
    for node in all_nodes(model.graph):
        lack = _lack(node, opset) if node.domain in ("", "ai.onnx") else None
        if lack is None:
            continue
        higher = range(opset + 1, newest_opset() + 1)
        first = next((n for n in higher if _lack(node, n) is None), None)
        raise SpecError(
            Owners(model).subject(node),
            lack,
            "no opset has it; change the pass that made it"
            if first is None
            else f"set opset: {first} in the onnx export",
        )


def convert(model: ir.Model, opset: int) -> ir.Model:
    """Bring a graph to an opset; the given one is not changed and no weight is evaluated.

    Raises:
        SpecError: an operator cannot be converted.
    """
    have = model.opset_imports.get("", opset)
    if have == opset:
        return model
    if opset > have:
        from onnxscript import version_converter

        raised = model.clone()
        try:
            version_converter.convert_version(raised, opset, fallback=False)
        except ValueError:  # beyond the opsets that it knows
            return _convert_by_onnx(model, opset)
        return raised
    return _convert_by_onnx(model, opset)


def _runtime_knows(opset: int) -> bool:
    import onnxruntime as ort
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    value = (TensorProto.FLOAT, [1])
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "probe",
        [helper.make_tensor_value_info("x", *value)],
        [helper.make_tensor_value_info("y", *value)],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version(opset)
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except (state.Fail, state.InvalidGraph, state.NotImplemented, state.InvalidProtobuf):
        return False
    return True


def _lack(node: ir.Node, opset: int) -> str | None:
    """Say what of a node an opset does not have, or ``None``."""
    try:
        schema = defs.get_schema(node.op_type, opset, "")
    except defs.SchemaError:
        return f"operator {node.op_type} does not exist in opset {opset}"
    if schema.deprecated:
        return f"operator {node.op_type} is withdrawn in opset {opset}"
    for value, formal in zip(node.inputs, schema.inputs, strict=False):
        tensor = None if value is None else value.const_value
        dtype = tensor.dtype if tensor is not None else None if value is None else value.dtype
        if dtype is not None and f"tensor({_onnx_name(dtype)})" not in formal.types:
            return f"{node.op_type} of opset {opset} does not take {_onnx_name(dtype)}"
    return None


def _onnx_name(dtype: ir.DataType) -> str:
    """Return the name of an element type in operator schemas."""
    special = {ir.DataType.FLOAT: "float", ir.DataType.DOUBLE: "double"}
    return special.get(dtype, dtype.name.lower())


def _convert_by_onnx(model: ir.Model, opset: int) -> ir.Model:
    """Convert with the onnx package, whose converter also goes down."""
    try:
        return converted(model, opset)
    except (RuntimeError, ir.serde.SerdeError) as error:
        raise _refused(error, model, opset) from error


def _refused(error: Exception, model: ir.Model, opset: int) -> SpecError:
    text = str(error)
    named = re.search(r"Previous Version of (\w+)|Version \$\d+ for (\w+)", text)
    have = model.opset_imports.get("", opset)
    subject, problem = "the graph", f"cannot be brought from opset {have} to {opset}"
    if named is not None:
        operator = named[1] or named[2]
        node = next((n for n in all_nodes(model.graph) if n.op_type == operator), None)
        subject = f"operator {operator}" if node is None else Owners(model).subject(node)
        problem = f"{operator} cannot be brought from opset {have} to {opset}"
    else:
        reason = text.rpartition("failed: ")[2].strip().partition("\n")[0][:200]
        problem += f" ({reason})"
    nearest = next((n for n in range(opset + 1, have) if _converts(model, n)), have)
    return SpecError(subject, problem, f"set opset: {nearest} in the onnx export")


def _converts(model: ir.Model, opset: int) -> bool:
    try:
        converted(model, opset)
    except (RuntimeError, ir.serde.SerdeError):
        return False
    return True
