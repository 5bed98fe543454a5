"""The plain form of a graph that passes expect: folded, and with every shape that can be known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx.checker import ValidationError
from onnx.defs import SchemaError, get_schema
from onnx.reference import ReferenceEvaluator
from onnx.shape_inference import InferenceError, infer_node_outputs

from compressor.graph.editing import detach_dropped
from compressor.graph.folding import fold_constants
from compressor.graph.inference import infer_shapes, keeps_shape
from compressor.graph.operators import operator, operator_named
from compressor.graph.pools import count_no_padding
from compressor.graph.values import (
    INTEGER_CODES,
    all_nodes,
    as_function,
    constant_array,
    constant_attribute,
    is_op,
    is_stored,
)
from compressor.progress import quiet_libraries
from compressor.types.tensors import Array

if TYPE_CHECKING:
    from onnx_ir.passes import InPlacePass

Shape: TypeAlias = tuple[int, ...]

_SMALL = 1024  # elements: shapes, axes and scalars; never a table that someone computed
_SMALL_INTEGERS = 4096  # elements of the integers that are computed
_FEW = 16  # elements of the floats that are: scales of Resize, factors of shapes
_IMAGE_RANK, _FIRST_SPATIAL, _SIDE = 4, 2, 64


def make_plain(model: ir.Model) -> None:
    """Clean a graph, and note every shape that can be known, in place."""
    clean(model)
    infer_shapes(model)
    note_static_lengths(model)


def clean(model: ir.Model) -> None:
    """Fold shape arithmetic, drop unused nodes, and strip exporter metadata, in place.

    Weights keep their names: a node that reads a parameter is folded only if it merely asks for
    the parameter's shape.
    """
    lifted: list[InPlacePass] = [
        common.InlinePass(),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.RemoveInitializersFromInputsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    ]
    parameters = frozenset(
        name
        for name, value in model.graph.initializers.items()
        if value.dtype is not None
        and (value.dtype.is_floating_point() or value.dtype in INTEGER_CODES)
    )
    for step in lifted:
        step(model)
    with quiet_libraries():  # onnx cannot compute all that it defines, and the library logs that
        fold_constants(model, _SMALL, lambda node: not _folds(node, parameters))
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    # Constants of branches and loops are initializers there now, and belong to the main graph too.
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    detach_dropped(model)
    _drop_zero_biases(model, parameters)
    _drop_identities(model)
    count_no_padding(model)
    common.RemoveUnusedNodesPass()(model)
    detach_dropped(model)  # an unused branch goes as it is, too
    common.RemoveUnusedNodesPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    common.NameFixPass()(model)


def _folds(node: ir.Node, parameters: frozenset[str]) -> bool:
    family = operator_named(node.op_type).family
    if family == "shape":
        return True
    if family == "cast-like":
        return node.inputs[0] is not None and node.inputs[0].name not in parameters
    return not any(v is not None and v.name in parameters for v in node.inputs)


def _drop_zero_biases(model: ir.Model, parameters: frozenset[str]) -> None:
    for node in all_nodes(model.graph):
        if not operator_named(node.op_type).is_convolution or len(node.inputs) < 3:
            continue
        bias = node.inputs[2]
        if bias is None or bias.name in parameters:
            continue
        values = constant_array(bias)
        if values is not None and not np.any(values):
            node.resize_inputs(2)


def _drop_identities(model: ir.Model) -> None:
    """Remove ``Identity`` nodes, except where one value is two outputs of a graph.

    The library's pass removes those too. Two outputs then share a name, which makes the graph
    invalid, and ONNX Runtime computes something else for it.
    """
    for node in list(all_nodes(model.graph)):
        if not is_op(node, "Identity") or node.graph is None:
            continue
        source, result = node.inputs[0], node.outputs[0]
        if source is None:
            continue
        if result.is_graph_output():
            maker = source.producer()
            if maker is None or maker.graph is not node.graph or source.is_graph_output():
                continue
            source.name = result.name
        if source.shape is None or (result.shape is not None and result.is_graph_output()):
            source.shape = result.shape
        source.type = source.type or result.type
        ir.convenience.replace_all_uses_with(result, source, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)


class Lengths:
    """Shapes of a graph's values for example lengths of the dynamic axes.

    Args:
        model: the graph, of opset 18 or newer; subgraphs are not entered.
        offset: added to the example lengths; comparing two offsets shows which axes are dynamic.

    Attributes:
        shapes: shapes by value name; values of unknown shape are missing.
        constants: small tensors that do not depend on the content of an input, by value name.
    """

    def __init__(self, model: ir.Model, offset: int = 0):
        self.shapes: dict[str, Shape] = {}
        self.constants: dict[str, Array] = {}
        self._types: dict[str, onnx.TypeProto] = {}
        self._opsets = dict(model.opset_imports)
        self._model = model
        self._symbols: dict[str, int] = {}
        for value in model.graph.inputs:
            self._note(value, _bound(value, self._symbols, offset))
        for value in model.graph.initializers.values():
            if value.const_value is not None:
                self._constant(value.name or "", value.const_value)
        for node in model.graph:
            self._enter(node)

    def shape(self, value: ir.Value | None) -> Shape | None:
        """Return a value's shape, or ``None`` if it is unknown."""
        return None if value is None else self.shapes.get(value.name or "")

    def constant(self, value: ir.Value | None) -> Array | None:
        """Return the value if it is a small constant, else ``None``."""
        return None if value is None else self.constants.get(value.name or "")

    def integers(self, value: ir.Value | None) -> list[int | None] | None:
        """Return constant integers as a list, ``None`` for each that depends on a dynamic axis."""
        array = self.constant(value)
        if array is None or value is None:
            return None
        numbers: list[int | None] = [int(x) for x in array.reshape(-1)]
        if is_stored(value):
            return numbers
        other = self.other.constant(value)
        if other is None or other.shape != array.shape:
            return None
        pairs = zip(numbers, other.reshape(-1), strict=True)
        return [first if first == int(second) else None for first, second in pairs]

    @cached_property
    def other(self) -> Lengths:
        """The same graph with other example lengths: what differs is dynamic."""
        return Lengths(self._model, offset=1)

    def moving(self, value: ir.Value) -> tuple[bool, ...]:
        """Return for each axis of a value whether it changes with a dynamic length."""
        shape, other = self.shape(value) or (), self.other.shape(value) or ()
        if len(shape) != len(other):
            return (True,) * len(shape)
        return tuple(a != b for a, b in zip(shape, other, strict=True))

    def _note(self, value: ir.Value, shape: Shape | None) -> None:
        if shape is None or value.dtype is None or not value.name:
            return
        self.shapes[value.name] = shape
        self._types[value.name] = onnx.helper.make_tensor_type_proto(value.dtype.value, shape)

    def _constant(self, name: str, tensor: ir.TensorProtocol) -> None:
        shape = tuple(int(d) for d in tensor.shape.numpy())
        self.shapes[name] = shape
        self._types[name] = onnx.helper.make_tensor_type_proto(tensor.dtype.value, shape)
        whole = tensor.dtype.is_integer() or tensor.dtype == ir.DataType.BOOL
        if prod(shape) <= (_SMALL_INTEGERS if whole else _FEW):
            self.constants[name] = np.asarray(tensor.numpy())

    def _enter(self, node: ir.Node) -> None:
        if operator(node).family == "constant":
            tensor = constant_attribute(node)
            if tensor is not None:
                self._constant(node.outputs[0].name or "", tensor)
            return
        shape = self.shape(node.inputs[0]) if node.inputs else None
        if node.op_type == "Shape" and shape is not None:
            start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
            self._computed(node.outputs[0], np.asarray(shape[slice(start, end)], dtype=np.int64))
            return
        subgraph = any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values())
        if not subgraph:
            self._infer(node)
        self._inherit(node)
        if not subgraph:
            self._evaluate(node)

    def _infer(self, node: ir.Node) -> None:
        inputs = [v for v in node.inputs if v is not None]
        if any(v.name not in self._types for v in inputs):
            return
        try:
            schema = get_schema(node.op_type, self._opsets.get(node.domain, 1), node.domain)
        except SchemaError:
            return
        types = {v.name or "": self._types[v.name or ""] for v in inputs}
        data = {
            v.name or "": onnx.numpy_helper.from_array(array, v.name)
            for v in inputs
            if (array := self.constant(v)) is not None
        }
        try:
            inferred = infer_node_outputs(
                schema,
                ir.serde.serialize_node(node),
                types,
                data,
                opset_imports=[onnx.helper.make_opsetid(d, v) for d, v in self._opsets.items()],
                ir_version=10,
            )
        except (InferenceError, ValidationError, RuntimeError, ValueError, TypeError):
            return
        for output in node.outputs:
            dtype = inferred.get(output.name or "")
            shape = None if dtype is None else _concrete(dtype)
            if dtype is not None and shape is not None and output.name:
                self.shapes[output.name] = shape
                self._types[output.name] = dtype

    def _inherit(self, node: ir.Node) -> None:
        """Use the shapes noted in the graph for outputs that inference knows nothing of."""
        if is_op(node, "GroupNormalization") and self.shape(node.outputs[0]) is None:
            shape = self.shape(node.inputs[0])
            if shape is not None and node.outputs[0].name and node.inputs[0] is not None:
                self.shapes[node.outputs[0].name] = shape
                self._types[node.outputs[0].name] = self._types[node.inputs[0].name or ""]
        if keeps_shape(node):
            self._note(node.outputs[0], self.shape(node.inputs[0]))
        for output in node.outputs:
            if output.name in self.shapes or output.shape is None:
                continue
            noted = [
                d if isinstance(d, int) else self._symbols.get(str(d.value)) for d in output.shape
            ]
            shape = tuple(length for length in noted if length is not None)
            self._note(output, shape if len(shape) == len(noted) else None)

    def _evaluate(self, node: ir.Node) -> None:
        inputs = [v for v in node.inputs if v is not None]
        if not inputs or any(self.constant(v) is None for v in inputs) or node.domain:
            return
        sizes = [prod(s) for o in node.outputs if (s := self.shape(o)) is not None]
        if len(sizes) != len(node.outputs) or max(sizes, default=0) > _SMALL_INTEGERS:
            return
        feeds = {
            f"x{i}": self.constants[v.name or ""]
            for i, v in enumerate(node.inputs)
            if v is not None
        }
        function = as_function(node, self._opsets.get("", 1))
        try:
            with np.errstate(all="ignore"):
                results: Any = ReferenceEvaluator(function).run(None, feeds, attributes={})
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            return  # the values stay unknown, and channels that depend on them are frozen
        for output, result in zip(node.outputs, results, strict=True):
            self._computed(output, np.asarray(result))

    def _computed(self, output: ir.Value, array: Array) -> None:
        name = output.name or ""
        self.constants[name] = array
        self.shapes[name] = array.shape
        dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        self._types[name] = onnx.helper.make_tensor_type_proto(dtype, array.shape)


def _bound(value: ir.Value, symbols: dict[str, int], offset: int) -> Shape | None:
    """Return an input's shape with a different example length for each dynamic axis."""
    if value.shape is None:
        return None
    shape = []
    for axis, length in enumerate(value.shape):
        if isinstance(length, int):
            shape.append(length)
            continue
        image = len(value.shape) >= _IMAGE_RANK and axis >= _FIRST_SPATIAL
        usual = _SIDE * (1 + offset) if image else 3 + 2 * len(symbols) + 6 * offset
        symbol = str(length.value) if length.value is not None else f"{value.name}:{axis}"
        shape.append(symbols.setdefault(symbol, usual))
    return tuple(shape)


def _concrete(proto: onnx.TypeProto) -> Shape | None:
    kind = proto.tensor_type
    if not kind.HasField("shape") or not all(d.HasField("dim_value") for d in kind.shape.dim):
        return None
    return tuple(d.dim_value for d in kind.shape.dim)


_NEAR, _FAR = 1, 50
"""Offsets of the example lengths: about twice the usual ones, and hundreds more."""


def note_static_lengths(model: ir.Model) -> None:
    """Note which axes of values have a fixed length and which are dynamic, in place.

    Symbolic inference gives up on quotients of lengths, such as the heads of an attention after
    ``Reshape`` to ``[batch, length, -1, 8]``, and at operators that it does not know. So numbers
    are put in place of the dynamic lengths, three times: an axis with the same length each time
    is fixed, and any other is dynamic, whatever was noted before (an exporter may leave the length
    of its example there). Very long inputs may exceed what the graph takes; they are then ignored.
    A length of 1 each time proves nothing, since it may be a rounded quotient of short lengths.

    Args:
        model: of opset 18 or newer; subgraphs are not entered.
    """
    outputs = [value for node in model.graph for value in node.outputs]
    if all(value.shape is not None and value.shape.is_static() for value in outputs):
        return
    usual, near, far = (Lengths(model, offset) for offset in (0, _NEAR, _FAR))
    for value in outputs:
        first, second, third = (lengths.shape(value) for lengths in (usual, near, far))
        if first is None or second is None or len(first) != len(second):
            continue
        if third is None or len(third) != len(first):
            third = first
        value.shape = _merged_shape(value.shape, list(zip(first, second, third, strict=True)))


def _merged_shape(noted: ir.Shape | None, tries: Sequence[tuple[int, ...]]) -> ir.Shape:
    """Combine a noted shape with the lengths that each axis had in several tries."""
    dims: list[int | ir.SymbolicDim] = []
    old = list(noted) if noted is not None and len(noted) == len(tries) else [None] * len(tries)
    for before, lengths in zip(old, tries, strict=True):
        if len(set(lengths)) == 1:
            length = lengths[0] if lengths[0] > 1 else before
        else:
            length = None if isinstance(before, int) else before
        dims.append(ir.SymbolicDim(None) if length is None else length)
    return ir.Shape(dims)


def with_shapes(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> ir.Model:
    """Return a copy with given input shapes, and the shapes of all values that follow from them.

    Args:
        model: not changed; weights are shared. Subgraphs are not entered.
        shapes: shapes of its inputs, by name.
    """
    copy = model.clone()
    for value in copy.graph.inputs:
        if value.name and value.name in shapes:
            value.shape = ir.Shape(shapes[value.name])
    infer_shapes(copy)  # and types
    inferred = Lengths(copy).shapes
    for node in copy.graph:
        for value in node.outputs:
            if value.name and value.name in inferred:
                value.shape = ir.Shape(inferred[value.name])
    return copy
