"""Opsets: which ones are known, what they can express, and converting between them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

import onnx_ir as ir
from onnx import ModelProto, defs, helper

from compressor.errors import SpecError
from compressor.exporters.onnx.targets import Owners
from compressor.graph.skeleton import converted
from compressor.graph.values import all_nodes
from compressor.models.onnx.ort_session import probe

OLDEST = 17
_USUAL = 21  # the first with 4-bit integers


@cache
def newest_opset() -> int:
    """Return the newest opset that both the installed onnx and ONNX Runtime know."""
    newest = defs.onnx_opset_version()
    return next(opset for opset in range(newest, 0, -1) if _runtime_knows(opset))


def ir_version(opset: int) -> int:
    """Return the file format version that came with an opset; newer ones some readers refuse."""
    return helper.find_min_ir_version_for([helper.make_opsetid("", opset)])


def stated(proto: ModelProto) -> int:
    """Return the opset of ONNX's own operators that a message states."""
    return next(e.version for e in proto.opset_import if e.domain in ("", "ai.onnx"))


def usual_opset(model: ir.Model) -> int:
    """Return opset 21, or the first later one that can express a graph.

    Where none can, it is 21, for which :func:`check_opset` says what is missing.
    """
    have = model.opset_imports.get("", _USUAL)
    nodes = [node for node in all_nodes(model.graph) if node.domain in ("", "ai.onnx")]
    for opset in range(_USUAL, max(have, newest_opset()) + 1):
        known = all(_lack(node, opset) is None for node in nodes)
        if known and (opset >= have or _converts(model, opset)):
            return opset
    return _USUAL


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
            "no opset has it; change the pass that made it, or the type of the model's inputs"
            if first is None
            else f"set opset: {first} in the onnx export",
        )


def convert(model: ir.Model, opset: int) -> ir.Model:
    """Convert a graph to an opset; the given one is not changed and no weight is evaluated.

    Raises:
        SpecError: an operator cannot be converted.
    """
    have = model.opset_imports.get("", opset)
    if have == opset:
        return model
    if opset > have:
        from onnxscript import version_converter

        raised = model.clone()
        with suppress(ValueError):  # beyond the opsets that it knows
            version_converter.convert_version(raised, opset, fallback=False)
            return raised
    try:  # the onnx package's converter also goes down
        return converted(model, opset)
    except (RuntimeError, ir.serde.SerdeError) as error:
        raise _refused(error, model, opset) from error


def _runtime_knows(opset: int) -> bool:
    import onnxruntime as ort
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(probe(opset), options, providers=["CPUExecutionProvider"])
    except (state.Fail, state.InvalidGraph, state.NotImplemented, state.InvalidProtobuf):
        return False
    return True


def _lack(node: ir.Node, opset: int) -> str | None:
    try:
        schema = defs.get_schema(node.op_type, opset, "")
    except defs.SchemaError:
        return f"operator {node.op_type} does not exist in opset {opset}"
    if schema.deprecated:
        return f"operator {node.op_type} is withdrawn in opset {opset}"
    for value, formal in zip(node.inputs, schema.inputs, strict=False):
        tensor = None if value is None else value.const_value
        dtype = tensor.dtype if tensor is not None else None if value is None else value.dtype
        if dtype is not None and _onnx_name(dtype) not in _elements(formal.types):
            return f"{node.op_type} of opset {opset} does not take {_onnx_name(dtype)}"
    return None


def _elements(types: Iterable[str]) -> set[str]:
    """Return the element types of schema types such as ``seq(tensor(float))``."""
    return {name for kind in types for name in re.findall(r"tensor\((\w+)\)", kind)}


def _onnx_name(dtype: ir.DataType) -> str:
    """Return the name of an element type in operator schemas."""
    special = {ir.DataType.FLOAT: "float", ir.DataType.DOUBLE: "double"}
    return special.get(dtype, dtype.name.lower())


def _refused(error: Exception, model: ir.Model, opset: int) -> SpecError:
    text = str(error)
    named = re.search(r"Previous Version of (\w+)|Version \$\d+ for (\w+)", text)
    have = model.opset_imports.get("", opset)
    subject, problem = "the graph", f"cannot be converted from opset {have} to {opset}"
    if named is not None:
        operator = named[1] or named[2]
        node = next((n for n in all_nodes(model.graph) if n.op_type == operator), None)
        subject = f"operator {operator}" if node is None else Owners(model).subject(node)
        problem = f"{operator} cannot be converted from opset {have} to {opset}"
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
