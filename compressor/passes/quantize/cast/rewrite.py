"""Write a graph's new float types: to 16 bits but for islands, or back to float32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.graph.editing import Editor
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes, input_of
from compressor.passes.quantize.cast.islands import FloatIslands, is_transparent
from compressor.types.carrier import Carrier

_FLOAT = ir.DataType.FLOAT
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_TYPE_NAMES = ("to", "dtype", "output_dtype")  # attributes that hold an element type
_SUFFIX = {ir.DataType.FLOAT16: "_float16", ir.DataType.BFLOAT16: "_bfloat16", _FLOAT: "_float32"}


def store_narrow(editor: Editor, value: ir.Value, dtype: ir.DataType) -> None:
    """Store a float32 initializer of the main graph as ``dtype``; its readers read it cast back."""
    before = editor.first_reader(value)
    narrow = editor.node("Cast", [value], f"{value.name}{_SUFFIX[_FLOAT]}", _FLOAT, {"to": _FLOAT})
    narrow.outputs[0].shape = value.shape
    for use in tuple(value.uses()):
        if use.node is not narrow:
            use.node.replace_input_with(use.idx, narrow.outputs[0])
    _convert(value, dtype)
    if before is None:
        editor.model.graph.insert_before(editor.model.graph[0], narrow)
    else:
        before.prepend(narrow)


def to_half(model: ir.Model, islands: FloatIslands) -> None:
    """Compute in the islands' narrow type everywhere but on them, in place.

    One ``Cast`` stands at each border that a value crosses; none in the middle.
    """
    _Rewrite(model, islands).run()


class _Rewrite:
    def __init__(self, model: ir.Model, islands: FloatIslands):
        self._model = model
        self._islands = islands
        self._half = islands.narrow
        self._editor = Editor(model)
        self._nodes = tuple(all_nodes(model.graph))
        self._half_nodes = {node for node in self._nodes if islands.is_half(node)}

    def run(self) -> None:
        islands, graphs = self._islands, tuple(self._model.graphs())
        inputs = [v for v in self._model.graph.inputs if islands.is_float(v)]
        constants = [v for g in graphs for v in g.initializers.values() if islands.is_float(v)]
        computed = [(n, v) for n in self._nodes for v in n.outputs if islands.is_float(v)]
        half = {v for n in self._half_nodes for v in islands.half_outputs(n)}
        if not islands.keep_io:
            half.update(inputs)
        half.update(v for v in constants if self._wanted(v) == {self._half})
        firsts = {graph: graph[0] for graph in graphs if len(graph)}
        entering = [v for g in graphs[1:] for v in g.inputs if islands.is_float(v)]
        for value in (*inputs, *entering, *constants):
            if value.graph in firsts:
                insert = firsts[value.graph].prepend
                self._cross(value, self._half if value in half else _FLOAT, insert)
        for node, value in computed:
            self._cross(value, self._half if value in half else _FLOAT, node.append)
        for value in half:
            if value.is_initializer():
                _convert(value, self._half)
            else:
                value.type = ir.TensorType(self._half)
        for node in self._half_nodes:
            if operator(node).moves == "type":
                node.attributes["to"] = ir.AttrInt64("to", self._half.value)
        _drop_idle_casts(self._model, self._nodes)

    def _wanted(self, value: ir.Value) -> set[ir.DataType]:
        """Return the types in which a value is read."""
        kinds = {kind for use in value.uses() if (kind := self._kind(use.node)) is not None}
        if value.is_graph_output():
            kinds.add(_FLOAT if self._islands.leaves_as_float(value) else self._half)
        return kinds

    def _kind(self, reader: ir.Node) -> ir.DataType | None:
        if is_transparent(reader):
            return None
        return self._half if reader in self._half_nodes else _FLOAT

    def _cross(self, value: ir.Value, have: ir.DataType, insert: Callable[[ir.Node], None]) -> None:
        other = _FLOAT if have == self._half else self._half
        uses = [use for use in value.uses() if self._kind(use.node) == other]
        outer = _FLOAT if self._islands.leaves_as_float(value) else self._half
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
            _leave(self._editor, value, result, _SUFFIX[have])


def _origin(value: ir.Value, target: ir.DataType) -> ir.Value:
    """Return the value before a cast, if it can be cast to a narrow type as well."""
    before = value.producer()
    if target == _FLOAT or before is None or operator(before).moves != "type":
        return value
    source = before.inputs[0]
    return value if source is None or source.dtype is None else source


def in_single(carrier: Carrier, halves: Collection[ir.DataType] = HALVES) -> Carrier:
    """Return a model that computes in float32 where it computes or stores weights in these types.

    Its inputs and outputs keep their type. A model that does neither is returned as it is.
    """
    model = carrier.graph()
    stored = (v for g in (model.graph, *model.graph.subgraphs()) for v in g.initializers.values())
    computed = (value for node in all_nodes(model.graph) for value in node.outputs)
    if not any(value.dtype in halves for value in (*stored, *computed)):
        return carrier
    model = model.clone()
    to_single(model, keep_io=True)
    return carrier.with_graph(model)


def to_single(model: ir.Model, *, keep_io: bool, types: Collection[ir.DataType] = HALVES) -> None:
    """Compute in float32 instead of other types of floats, subgraphs included, in place.

    Values keep their names. Every half is a float32 number, so weights lose nothing; results
    differ from before by what half precision rounded away. Of float64, numbers beyond float32
    become its largest, so that a mask of -1e300 stays one of finite numbers.

    With ``keep_io`` inputs and outputs keep their type, behind a ``Cast`` each.
    """
    editor = Editor(model)
    inputs = [value for value in model.graph.inputs if value.dtype in types]
    outputs = [value for value in model.graph.outputs if value.dtype in types]
    kept = {value: value.dtype for value in (*inputs, *outputs) if value.dtype is not None}
    for graph in (model.graph, *model.graph.subgraphs()):
        written = (value for node in graph for value in node.outputs)
        for value in (*graph.inputs, *graph.initializers.values(), *written):
            if value.dtype in types:
                _convert(value, _FLOAT)
    for node in all_nodes(model.graph):
        _change_attributes(node, types)
    if keep_io:
        for value in inputs:
            _keep_input(editor, value, kept[value])
        for value in dict.fromkeys(outputs):
            _keep_output(editor, value, kept[value])
    nodes = [node for node in all_nodes(model.graph) if node.outputs[0].dtype == _FLOAT]
    _drop_idle_casts(model, nodes)


def _change_attributes(node: ir.Node, types: Collection[ir.DataType]) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR:
            tensor = attribute.as_tensor()
            if tensor.dtype in types:
                node.attributes[name] = ir.AttrTensor(name, _converted(tensor, _FLOAT, tensor.name))
        elif attribute.type == ir.AttributeType.INT and name in _TYPE_NAMES:
            other = attribute.as_int() in [kind.value for kind in types]
            node.attributes[name] = ir.AttrInt64(name, _FLOAT.value) if other else attribute


def _keep_input(editor: Editor, value: ir.Value, dtype: ir.DataType) -> None:
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
    """Keep an output's type and name, by a cast from float32."""
    node = value.producer()
    if node is None:
        return
    cast = editor.node("Cast", [value], f"{value.name or ''}_narrow", dtype, {"to": dtype})
    result = cast.outputs[0]
    result.shape = value.shape
    node.append(cast)
    _leave(editor, value, result, _SUFFIX[_FLOAT])


def _leave(editor: Editor, value: ir.Value, result: ir.Value, suffix: str) -> None:
    """Make ``result`` the graph output in place of ``value``, under the same name."""
    maker = result.producer()
    assert maker is not None
    assert isinstance(maker.graph, ir.Graph)
    name, outputs = value.name or "", maker.graph.outputs
    value.name, result.name = editor.free_name(name + suffix), name
    for index, output in enumerate(outputs):
        if output is value:
            outputs[index] = result


def _convert(value: ir.Value, dtype: ir.DataType) -> None:
    """Change a value's type; an initializer is converted whenever somebody reads it."""
    tensor = value.const_value
    if tensor is not None:
        convert = partial(_converted, tensor, dtype, value.name)
        shape = ir.Shape(tensor.shape.numpy())
        value.const_value = ir.LazyTensor(convert, dtype, shape, name=value.name)
    value.type = ir.TensorType(dtype)  # a new one: clones of a graph share their types


def _converted(
    tensor: ir.TensorProtocol, dtype: ir.DataType, name: str | None
) -> ir.TensorProtocol:
    array = tensor.numpy()
    if tensor.dtype == ir.DataType.DOUBLE:
        most = np.finfo(np.float32).max
        array = np.where(np.isfinite(array), np.clip(array, -most, most), array)
    return ir.Tensor(array.astype(dtype.numpy()), dtype=dtype, name=name)


def _drop_idle_casts(model: ir.Model, nodes: Iterable[ir.Node]) -> None:
    """Drop casts to the type that a value has already."""
    for node in list(nodes):
        source, result = input_of(node, 0), node.outputs[0]
        if source is None or operator(node).moves != "type" or result.is_graph_output():
            continue
        if source.dtype is not None and source.dtype == result.dtype:
            result.replace_all_uses_with(source)
    common.RemoveUnusedNodesPass()(model)
