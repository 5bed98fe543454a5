"""Bring a graph to 16-bit floats, or store single weights in a narrow type."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.graph.editing import Editor
from compressor.graph.values import is_op
from compressor.passes.quantize.cast.islands import FloatIslands, is_transparent

_FLOAT = ir.DataType.FLOAT
_SUFFIX = {
    ir.DataType.FLOAT16: "_float16",
    ir.DataType.BFLOAT16: "_bfloat16",
    _FLOAT: "_float32",
}


def store_narrow(editor: Editor, value: ir.Value, dtype: ir.DataType) -> None:
    """Store an initializer in a narrow type; its readers read it cast back.

    Args:
        editor: of the model that is changed.
        value: a float32 initializer of the main graph.
        dtype: how it is stored.
    """
    before = editor.first_reader(value)
    narrow = editor.node("Cast", [value], f"{value.name}{_SUFFIX[_FLOAT]}", _FLOAT, {"to": _FLOAT})
    narrow.outputs[0].shape = value.shape
    for use in tuple(value.uses()):
        if use.node is not narrow:
            use.node.replace_input_with(use.idx, narrow.outputs[0])
    _narrow(value, dtype)
    if before is None:
        editor.model.graph.insert_before(editor.model.graph[0], narrow)
    else:
        before.prepend(narrow)


def to_half(model: ir.Model, islands: FloatIslands) -> None:
    """Compute in the islands' narrow type everywhere but on them, in place.

    One ``Cast`` stands at each border that a value crosses; none in the middle.

    Args:
        model: the graph that ``islands`` was made for.
        islands: what stays in float32.
    """
    _Rewrite(model, islands).run()


class _Rewrite:
    def __init__(self, model: ir.Model, islands: FloatIslands):
        self._graph = model.graph
        self._model = model
        self._islands = islands
        self._half = islands.narrow
        self._editor = Editor(model)
        self._half_nodes = {node for node in model.graph if islands.is_half(node)}

    def run(self) -> None:
        graph, islands = self._graph, self._islands
        inputs = [v for v in graph.inputs if islands.is_float(v)]
        constants = [v for v in graph.initializers.values() if islands.is_float(v)]
        computed = [(n, v) for n in graph for v in n.outputs if islands.is_float(v)]
        half = {v for n in self._half_nodes for v in islands.half_outputs(n)}
        if not islands.keep_io:
            half.update(inputs)
        half.update(v for v in constants if self._wanted(v) == {self._half})
        first = graph[0]
        for value in (*inputs, *constants):
            self._cross(value, self._half if value in half else _FLOAT, first.prepend)
        for node, value in computed:
            self._cross(value, self._half if value in half else _FLOAT, node.append)
        for value in half:
            if value.is_initializer():
                _narrow(value, self._half)
            else:
                value.type = ir.TensorType(self._half)
        for node in self._half_nodes:
            if is_op(node, "Cast"):
                node.attributes["to"] = ir.AttrInt64("to", self._half.value)
        _drop_idle_casts(self._model)

    def _wanted(self, value: ir.Value) -> set[ir.DataType]:
        """Return the types in which a value is read."""
        kinds = {kind for use in value.uses() if (kind := self._kind(use.node)) is not None}
        if value.is_graph_output():
            kinds.add(_FLOAT if self._islands.keep_io else self._half)
        return kinds

    def _kind(self, reader: ir.Node) -> ir.DataType | None:
        if reader.graph is self._graph and is_transparent(reader):
            return None
        return self._half if reader in self._half_nodes else _FLOAT

    def _cross(self, value: ir.Value, have: ir.DataType, insert: Callable[[ir.Node], None]) -> None:
        """Cast a value for the readers that want the other type."""
        other = _FLOAT if have == self._half else self._half
        uses = [use for use in value.uses() if self._kind(use.node) == other]
        outer = _FLOAT if self._islands.keep_io else self._half
        leaves = value.is_graph_output() and outer == other and value.producer() is not None
        if not uses and not leaves:
            return
        name = value.name or ""
        cast = self._editor.node(
            "Cast", [_origin(value, other)], name + _SUFFIX[other], other, {"to": other}
        )
        result = cast.outputs[0]
        result.shape = value.shape
        insert(cast)
        for use in uses:
            use.node.replace_input_with(use.idx, result)
        if leaves:
            value.name, result.name = self._editor.free_name(name + _SUFFIX[have]), name
            for index, output in enumerate(self._graph.outputs):
                if output is value:
                    self._graph.outputs[index] = result


def _origin(value: ir.Value, wanted: ir.DataType) -> ir.Value:
    """Return what a value was cast from, if that can be cast to a narrow type as well."""
    before = value.producer()
    if wanted == _FLOAT or before is None or not is_op(before, "Cast"):
        return value
    source = before.inputs[0]
    return value if source is None or source.dtype is None else source


def _narrow(value: ir.Value, dtype: ir.DataType) -> None:
    """Store an initializer in another type; it is converted whenever somebody reads it."""
    tensor = value.const_value
    assert tensor is not None
    convert = partial(_converted, tensor, dtype, value.name)
    value.const_value = ir.LazyTensor(
        convert, dtype, ir.Shape(tensor.shape.numpy()), name=value.name
    )
    value.type = ir.TensorType(dtype)  # a new one: clones of a graph share their types


def _converted(
    tensor: ir.TensorProtocol, dtype: ir.DataType, name: str | None
) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy().astype(dtype.numpy()), dtype=dtype, name=name)


def _drop_idle_casts(model: ir.Model) -> None:
    """Drop casts to the type that a value has already."""
    for node in model.graph:
        source, result = node.inputs[0] if node.inputs else None, node.outputs[0]
        if source is None or not is_op(node, "Cast") or source.dtype != result.dtype:
            continue
        if source.dtype is not None and not result.is_graph_output():
            result.replace_all_uses_with(source)
    common.RemoveUnusedNodesPass()(model)
