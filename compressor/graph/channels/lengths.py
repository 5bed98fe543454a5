"""Lengths of every axis of a graph: symbolic, static, and for given inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
from onnx.defs import SchemaError, get_schema
from onnx.reference import ReferenceEvaluator
from onnx.shape_inference import InferenceError, infer_node_outputs

from compressor.graph.editing import infer_shapes
from compressor.graph.values import is_op
from compressor.types.tensors import Array

Shape: TypeAlias = tuple[int, ...]

_SMALL = 4096  # elements of the integers that are computed
_FEW = 16  # elements of the floats that are: scales of Resize, factors of shapes
_IMAGE_RANK, _FIRST_SPATIAL, _SIDE = 4, 2, 64


class Lengths:
    """Shapes of a graph's values, and the constants that shapes are made of.

    Args:
        model: the graph; subgraphs are not entered; of opset 18 or newer.
        offset: added to the lengths that stand for dynamic ones; two that differ tell which axes
            are dynamic.

    Attributes:
        shapes: by value name; values of which nothing is known are missing.
        constants: by value name: small tensors that do not depend on an input's content.
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
        """Return a value's shape, if it is known."""
        return None if value is None else self.shapes.get(value.name or "")

    def constant(self, value: ir.Value | None) -> Array | None:
        """Return a small constant, if the value is one."""
        return None if value is None else self.constants.get(value.name or "")

    def integers(self, value: ir.Value | None) -> list[int | None] | None:
        """Return integers as a list; ``None`` for those that follow from a dynamic length."""
        array = self.constant(value)
        if array is None or value is None:
            return None
        numbers: list[int | None] = [int(x) for x in array.reshape(-1)]
        if value.is_initializer() or is_op(value.producer(), "Constant"):
            return numbers
        other = self.other.constant(value)
        if other is None or other.shape != array.shape:
            return None
        pairs = zip(numbers, other.reshape(-1), strict=True)
        return [own if own == int(second) else None for own, second in pairs]

    @cached_property
    def other(self) -> Lengths:
        """The same with other numbers in place of dynamic lengths, which tells where those are."""
        return Lengths(self._model, offset=1)

    def moving(self, value: ir.Value) -> tuple[bool, ...]:
        """Return for each axis of a value whether it changes with a dynamic length."""
        own, other = self.shape(value) or (), self.other.shape(value) or ()
        if len(own) != len(other):
            return (True,) * len(own)
        return tuple(a != b for a, b in zip(own, other, strict=True))

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
        if prod(shape) <= (_SMALL if whole else _FEW):
            self.constants[name] = np.asarray(tensor.numpy())

    def _enter(self, node: ir.Node) -> None:
        if is_op(node, "Constant"):
            known = written(node)
            if known is not None:
                self._constant(node.outputs[0].name or "", known)
            return
        given = self.shape(node.inputs[0]) if node.inputs else None
        if node.op_type == "Shape" and given is not None:
            start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
            own = np.asarray(given[slice(start, end)], dtype=np.int64)
            self._computed(node.outputs[0], own)
            return
        if any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values()):
            self._inherit(node)
            return
        self._infer(node)
        self._evaluate(node)

    def _infer(self, node: ir.Node) -> None:
        version = self._opsets.get(node.domain, 1)
        try:
            schema = get_schema(node.op_type, version, node.domain)
        except SchemaError:
            self._inherit(node)
            return
        if any(v is not None and self._type(v) is None for v in node.inputs):
            self._inherit(node)
            return
        types = {v.name or "": t for v in node.inputs if v is not None and (t := self._type(v))}
        data = {
            v.name or "": onnx.numpy_helper.from_array(array, v.name)
            for v in node.inputs
            if v is not None and (array := self.constant(v)) is not None
        }
        try:
            found = infer_node_outputs(
                schema,
                ir.serde.serialize_node(node),
                types,
                data,
                opset_imports=[onnx.helper.make_opsetid(d, v) for d, v in self._opsets.items()],
                ir_version=10,
            )
        except (InferenceError, RuntimeError, ValueError, TypeError):
            found = {}
        for output in node.outputs:
            own = found.get(output.name or "")
            shape = None if own is None else _concrete(own)
            if own is not None and shape is not None and output.name:
                self.shapes[output.name] = shape
                self._types[output.name] = own
        self._inherit(node)

    def _type(self, value: ir.Value) -> onnx.TypeProto | None:
        return self._types.get(value.name or "")

    def _inherit(self, node: ir.Node) -> None:
        """Take what is known otherwise where nothing was found."""
        if is_op(node, "GroupNormalization") and self.shape(node.outputs[0]) is None:
            given = self.shape(node.inputs[0])
            if given is not None and node.outputs[0].name and node.inputs[0] is not None:
                self.shapes[node.outputs[0].name] = given
                self._types[node.outputs[0].name] = self._types[node.inputs[0].name or ""]
        for output in node.outputs:
            if output.name in self.shapes or output.shape is None:
                continue
            noted = [
                d if isinstance(d, int) else self._symbols.get(str(d.value)) for d in output.shape
            ]
            shape = tuple(length for length in noted if length is not None)
            self._note(output, shape if len(shape) == len(noted) else None)

    def _evaluate(self, node: ir.Node) -> None:
        """Compute a node all of whose inputs are small constants."""
        inputs = [v for v in node.inputs if v is not None]
        if not inputs or any(self.constant(v) is None for v in inputs) or node.domain:
            return
        sizes = [prod(s) for o in node.outputs if (s := self.shape(o)) is not None]
        if len(sizes) != len(node.outputs) or max(sizes, default=0) > _SMALL:
            return
        feeds = {v.name or "": self.constants[v.name or ""] for v in inputs}
        proto = onnx.helper.make_graph(
            [ir.serde.serialize_node(node)],
            "one",
            [onnx.helper.make_value_info(n, self._types[n]) for n in feeds],
            [onnx.helper.make_empty_tensor_value_info(o.name or "") for o in node.outputs],
        )
        opset = [onnx.helper.make_opsetid("", self._opsets.get("", 1))]
        model = onnx.helper.make_model(proto, opset_imports=opset)
        try:
            with np.errstate(all="ignore"):
                results: Any = ReferenceEvaluator(model).run(None, feeds)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            return  # the values stay unknown, and what depends on them is frozen
        for output, result in zip(node.outputs, results, strict=True):
            self._computed(output, np.asarray(result))

    def _computed(self, output: ir.Value, array: Array) -> None:
        name = output.name or ""
        self.constants[name] = array
        self.shapes[name] = array.shape
        dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        self._types[name] = onnx.helper.make_tensor_type_proto(dtype, array.shape)


def written(node: ir.Node) -> ir.TensorProtocol | None:
    """Return what a ``Constant`` holds, if that is numbers."""
    (attribute,) = node.attributes.values()
    match attribute.type:
        case ir.AttributeType.TENSOR:
            return attribute.as_tensor()
        case ir.AttributeType.INT | ir.AttributeType.INTS:
            return ir.tensor(np.asarray(attribute.value, dtype=np.int64))
        case ir.AttributeType.FLOAT | ir.AttributeType.FLOATS:
            return ir.tensor(np.asarray(attribute.value, dtype=np.float32))
    return None


def _bound(value: ir.Value, symbols: dict[str, int], offset: int) -> Shape | None:
    """Return an input's shape, each dynamic length a number of its own."""
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
"""Offsets of the lengths that are tried: about twice the usual ones, and hundreds more."""


def note_static_lengths(model: ir.Model) -> None:
    """Note which axes of values have a fixed length and which have not, in place.

    Inference on symbols gives up where a length is a quotient of others, such as the heads of an
    attention behind ``Reshape`` to ``[batch, length, -1, 8]``, and at operators that it does not
    know. Here numbers take the place of the dynamic lengths, several in turn: an axis that has
    the same length each time is fixed, and one that has not is dynamic, whatever was noted: an
    exporter may leave the length of its example there. Very long inputs may be more than the
    graph takes, and do not count then. That a length is 1 each time proves nothing: a rounded
    quotient of short ones is that, too.

    Args:
        model: of opset 18 or newer; subgraphs are not entered.
    """
    if not any(_open(value) for node in model.graph for value in node.outputs):
        return
    usual, near, far = (Lengths(model, offset) for offset in (0, _NEAR, _FAR))
    for node in model.graph:
        for value in node.outputs:
            first, second, third = (tried.shape(value) for tried in (usual, near, far))
            if first is None or second is None or len(first) != len(second):
                continue
            if third is None or len(third) != len(first):
                third = first
            tries = list(zip(first, second, third, strict=True))
            value.shape = _noted(value.shape, tries)


def _open(value: ir.Value) -> bool:
    return value.shape is None or not value.shape.is_static()


def _noted(known: ir.Shape | None, tries: Sequence[tuple[int, ...]]) -> ir.Shape:
    dims: list[int | ir.SymbolicDim] = []
    old = list(known) if known is not None and len(known) == len(tries) else [None] * len(tries)
    for before, lengths in zip(old, tries, strict=True):
        fixed = len(set(lengths)) == 1
        if fixed:
            found = lengths[0] if lengths[0] > 1 else before
        else:
            found = None if isinstance(before, int) else before
        dims.append(ir.SymbolicDim(None) if found is None else found)
    return ir.Shape(dims)


def with_shapes(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> ir.Model:
    """Return a copy in which no axis is dynamic, as far as ONNX can infer that.

    Args:
        model: not changed; weights are shared. Subgraphs are not entered.
        shapes: of its inputs, by name.
    """
    copy = model.clone()
    for value in copy.graph.inputs:
        if value.name and value.name in shapes:
            value.shape = ir.Shape(shapes[value.name])
    infer_shapes(copy)  # and types
    found = Lengths(copy).shapes
    for node in copy.graph:
        for value in node.outputs:
            if value.name and value.name in found:
                value.shape = ir.Shape(found[value.name])
    return copy
