"""Bring a graph of half precision to float32, so that passes for float32 can work on it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.graph.editing import Editor
from compressor.graph.values import all_nodes, is_op

_FLOAT = ir.DataType.FLOAT
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_TYPE_NAMES = ("to", "dtype", "output_dtype")  # attributes that hold an element type


def to_single(model: ir.Model, *, keep_io: bool) -> None:
    """Compute in float32 what is computed in float16 or bfloat16, subgraphs included, in place.

    Values keep their names. Every half is a float32 number, so weights lose nothing; results
    differ from before by what half precision rounded away.

    Args:
        model: the graph.
        keep_io: inputs and outputs keep their type, behind a ``Cast`` each.
    """
    editor = Editor(model)
    inputs = [value for value in model.graph.inputs if value.dtype in _HALVES]
    outputs = [value for value in model.graph.outputs if value.dtype in _HALVES]
    kept = {value: value.dtype for value in (*inputs, *outputs) if value.dtype is not None}
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in _values(graph):
            if value.dtype in _HALVES:
                if value.const_value is not None:
                    _widen(value)
                value.type = ir.TensorType(_FLOAT)  # a new one: clones of a graph share theirs
    for node in all_nodes(model.graph):
        _widen_attributes(node)
    if keep_io:
        for value in inputs:
            _keep_input(editor, value, kept[value])
        for value in dict.fromkeys(outputs):
            _keep_output(editor, value, kept[value])
    _drop_idle_casts(model)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _widen(value: ir.Value) -> None:
    """Let an initializer be read as float32, whenever somebody reads it."""
    tensor = value.const_value
    assert tensor is not None
    shape = ir.Shape(tensor.shape.numpy())
    convert = partial(_widened, tensor, value.name)
    value.const_value = ir.LazyTensor(convert, _FLOAT, shape, name=value.name)


def _widened(tensor: ir.TensorProtocol, name: str | None) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy().astype(_FLOAT.numpy()), dtype=_FLOAT, name=name)


def _widen_attributes(node: ir.Node) -> None:
    """Let a node make float32 where an attribute makes it write halves."""
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR:
            tensor = attribute.as_tensor()
            if tensor.dtype in _HALVES:
                node.attributes[name] = ir.AttrTensor(name, _widened(tensor, tensor.name))
        elif attribute.type == ir.AttributeType.INT and name in _TYPE_NAMES:
            half = attribute.as_int() in [kind.value for kind in _HALVES]
            node.attributes[name] = ir.AttrInt64(name, _FLOAT.value) if half else attribute


def _keep_input(editor: Editor, value: ir.Value, dtype: ir.DataType) -> None:
    """Take an input in its own type."""
    value.type = ir.TensorType(dtype)
    uses = tuple(value.uses())
    if not uses:
        return
    cast = editor.node("Cast", [value], f"{value.name}_float32", _FLOAT, {"to": _FLOAT})
    cast.outputs[0].shape = value.shape
    for use in uses:
        use.node.replace_input_with(use.idx, cast.outputs[0])
    editor.model.graph.insert_before(editor.model.graph[0], cast)


def _keep_output(editor: Editor, value: ir.Value, dtype: ir.DataType) -> None:
    """Give an output in its own type and under its own name."""
    node = value.producer()
    if node is None:
        return
    name = value.name or ""
    cast = editor.node("Cast", [value], f"{name}_narrow", dtype, {"to": dtype})
    result = cast.outputs[0]
    result.shape = value.shape
    node.append(cast)
    value.name, result.name = editor.free_name(f"{name}_float32"), name
    for index, output in enumerate(editor.model.graph.outputs):
        if output is value:
            editor.model.graph.outputs[index] = result


def _drop_idle_casts(model: ir.Model) -> None:
    """Drop casts from float32 to float32, which casts to and from half have become."""
    for node in list(all_nodes(model.graph)):
        source, result = node.inputs[0] if node.inputs else None, node.outputs[0]
        if source is None or not is_op(node, "Cast") or result.is_graph_output():
            continue
        if source.dtype == result.dtype == _FLOAT:
            result.replace_all_uses_with(source)
    common.RemoveUnusedNodesPass()(model)
