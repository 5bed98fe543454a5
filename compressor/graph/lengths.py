"""Shapes of a graph's values, followed with numbers for the dynamic lengths."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
from onnx.checker import ValidationError
from onnx.defs import SchemaError, get_schema
from onnx.reference import ReferenceEvaluator
from onnx.shape_inference import InferenceError, infer_node_outputs

from compressor.graph.inference import keeps_shape
from compressor.graph.operators import operator
from compressor.graph.values import (
    as_function,
    constant_attribute,
    is_op,
    is_stored,
)
from compressor.types.tensors import Array

Shape: TypeAlias = tuple[int, ...]

_SMALL_INTEGERS = 4096  # elements of the integers that are computed
_FEW = 16  # elements of the floats that are: scales of Resize, factors of shapes
_IMAGE_RANK, _FIRST_SPATIAL, _SIDE = 4, 2, 64
_FACTORS = (1, 64, 4096)  # of example lengths, until no window is longer: sounds have thousands


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
        self._opsets = dict(model.opset_imports)
        self._model = model
        for factor in (*_FACTORS, 1):
            self._follow(offset, factor)
            if not any(self._is_used_up(node) for node in model.graph):
                break

    def _follow(self, offset: int, factor: int) -> None:
        self.shapes: dict[str, Shape] = {}
        self.constants: dict[str, Array] = {}
        self._types: dict[str, onnx.TypeProto] = {}
        self._symbols: dict[str, int] = {}
        for value in self._model.graph.inputs:
            self._note(value, _bound(value, self._symbols, offset, factor))
        for value in self._model.graph.initializers.values():
            if value.const_value is not None:
                self._constant(value.name or "", value.const_value)
        for node in self._model.graph:
            self._enter(node)

    def _is_used_up(self, node: ir.Node) -> bool:
        """Whether a window is longer than what it moves over, so that nothing is left."""
        if not operator(node).is_convolution and operator(node).family != "spatial":
            return False
        taken, given = self.shape(node.inputs[0]), self.shape(node.outputs[0])
        return bool(taken and given and min(given) < 1 <= min(taken))

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


def _bound(value: ir.Value, symbols: dict[str, int], offset: int, factor: int) -> Shape | None:
    """Return an input's shape with a different example length for each dynamic axis.

    The first axis, usually that of samples, is not multiplied.
    """
    if value.shape is None:
        return None
    shape = []
    for axis, length in enumerate(value.shape):
        if isinstance(length, int):
            shape.append(length)
            continue
        image = len(value.shape) >= _IMAGE_RANK and axis >= _FIRST_SPATIAL
        usual = _SIDE * (1 + offset) if image else 3 + 2 * len(symbols) + 6 * offset
        usual *= factor if axis else 1
        symbol = str(length.value) if length.value is not None else f"{value.name}:{axis}"
        shape.append(symbols.setdefault(symbol, usual))
    return tuple(shape)


def _concrete(proto: onnx.TypeProto) -> Shape | None:
    kind = proto.tensor_type
    if not kind.HasField("shape") or not all(d.HasField("dim_value") for d in kind.shape.dim):
        return None
    return tuple(d.dim_value for d in kind.shape.dim)
