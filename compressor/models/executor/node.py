"""Operators as functions of tensors and attributes, and the nodes that they are prepared for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir
from torch import Tensor

from compressor.errors import ModelError
from compressor.graph.values import as_function
from compressor.models.element_types import TORCH_DTYPES, from_numpy
from compressor.models.executor.program import Body, Op

Host: TypeAlias = Tensor
"""An input whose values are read in Python (a shape, an axis), so that it may stay on the CPU."""

Ints: TypeAlias = "tuple[int, ...] | None"
"""A list of integers that a node need not have."""

_Parameter = inspect.Parameter
_Kind = ir.AttributeType
_KINDS: dict[str, tuple[ir.AttributeType, Callable[[Any], Any]]] = {
    "bool": (_Kind.INT, bool),
    "int": (_Kind.INT, int),
    "float": (_Kind.FLOAT, float),
    "str": (_Kind.STRING, str),
    "ir.DataType": (_Kind.INT, ir.DataType),
    "torch.dtype": (_Kind.INT, ir.DataType),
    "Ints": (_Kind.INTS, tuple),
    "Floats": (_Kind.FLOATS, tuple),
    "Strings": (_Kind.STRINGS, tuple),
    "Tensor": (_Kind.TENSOR, from_numpy),
    "Body": (_Kind.GRAPH, lambda graph: graph),
}
"""How attributes are stored and converted, by the annotation of a parameter."""


def integers(x: Tensor) -> list[int]:
    """Return the elements of a tensor as integers, in a flat list."""
    return [int(value) for value in x.reshape(-1).tolist()]


def positive(axes: Iterable[int], rank: int) -> list[int]:
    """Return axes counted from the front.

    Raises:
        IndexError: there is no such axis.
    """
    counted = [axis + rank if axis < 0 else axis for axis in axes]
    for axis in counted:
        if not 0 <= axis < rank:
            raise IndexError(f"axis {axis} is outside a tensor of {rank} axes")
    return counted


def along(vector: Tensor, axis: int, rank: int) -> Tensor:
    """Shape a vector so that it broadcasts along one axis of a tensor of so many."""
    shape = [1] * rank
    shape[axis] = -1
    return vector.reshape(shape)


def describe(node: ir.Node, opset: int) -> str:
    """Return a node's name, its operator and the opset for a message."""
    name = f"node '{node.name}'" if node.name else "a node without a name"
    domain = f"{node.domain}." if node.domain else ""
    return f"{name} ({domain}{node.op_type}, opset {opset})"


class Node:
    """A node's attributes by type, and the record of what of the node was understood.

    What the node has and its operator does not read is an error, so that nothing is ever silently
    ignored.

    Args:
        node: the node.
        opset: the opset version of its domain.
        prepare: makes a `Body` of a subgraph; what it captures is passed to the operator after
            the node's inputs.

    Attributes:
        opset: the opset version of its domain.
        label: its name, its operator and the opset, for messages.
        inputs: its inputs, ``None`` for one that is absent before another.
        output_count: how many outputs it has.
    """

    def __init__(self, node: ir.Node, opset: int, prepare: Callable[[ir.Graph], Body]):
        self.opset, self.label = opset, describe(node, opset)
        self.inputs = tuple(node.inputs)
        while self.inputs and self.inputs[-1] is None:
            self.inputs = self.inputs[:-1]
        self.output_count = len(node.outputs)
        self._node = node
        self._prepare = prepare
        self._attributes = dict(node.attributes)
        self._understood: set[str] = set()
        self._outputs = {0}

    def read(self, name: str, kind: str, default: Any = MISSING) -> Any:
        """Return an attribute, or the default where the node does not have it.

        Args:
            name: the attribute's name.
            kind: a key of `_KINDS`. An element type is given by number; 0 means the default.
            default: ``MISSING`` where the node has to have it.

        Raises:
            ModelError: it is missing, of another kind, or of an element type without counterpart.
        """
        self._understood.add(name)
        stored, convert = _KINDS[kind]
        attribute = self._attributes.get(name)
        if attribute is not None and attribute.is_ref():
            raise self.refuse(f"attribute '{name}' refers to a function's attribute")
        if attribute is not None and attribute.type != stored:
            raise self.refuse(f"attribute '{name}' is {attribute.type.name}, not {stored.name}")
        try:
            value = None if attribute is None else convert(attribute.value)
        except ValueError as error:  # no element type has that number
            raise self.refuse(f"attribute '{name}' is malformed ({error})") from error
        if value is None or value is ir.DataType.UNDEFINED:
            if default is MISSING:
                raise self.refuse(f"attribute '{name}' is missing")
            return default
        if isinstance(value, ir.DataType) and value not in TORCH_DTYPES:
            raise self.refuse(f"attribute '{name}' asks for elements of type {value.name}")
        if kind == "torch.dtype":
            return TORCH_DTYPES[value]
        return self._prepare(value) if kind == "Body" else value

    def ignore(self, *names: str) -> None:
        """Take attributes as understood, whatever they say."""
        self._understood.update(names)

    def wants(self, *outputs: int) -> bool:
        """Return whether any of some optional outputs is read, and take them as understood."""
        self._outputs.update(outputs)
        return any(_is_read(v) for i, v in enumerate(self._node.outputs) if i in outputs)

    def input(self, position: int) -> ir.Value | None:
        """Return an input, or ``None`` where it is not given."""
        return self.inputs[position] if position < len(self.inputs) else None

    def input_type(self, position: int) -> ir.DataType | None:
        """Return the ONNX element type of an input, or ``None`` where the graph does not say."""
        value = self.input(position)
        if value is None or value.const_value is None:
            return None if value is None else value.dtype
        return value.const_value.dtype

    def alone(self) -> onnx.FunctionProto:
        """Return the node as a function, and take what ONNX says of its operator as understood.

        See :func:`compressor.graph.values.as_function`.
        """
        node = self._node
        self.ignore(*onnx.defs.get_schema(node.op_type, self.opset, node.domain).attributes)
        self.wants(*range(self.output_count))
        return as_function(node, self.opset)

    def refuse(self, problem: str) -> ModelError:
        """Return the error for something about this node that is not supported."""
        remedy = "run the model in ONNX Runtime, or export it without this"
        return ModelError(self.label, problem, remedy)

    def check_understood(self) -> None:
        """Check that every attribute and output of the node was asked for.

        Raises:
            ModelError: naming what was not.
        """
        for name in sorted(self._attributes.keys() - self._understood):
            if not self._is_default(name):
                raise self.refuse(f"attribute '{name}' is not supported")
        for position, value in enumerate(self._node.outputs):
            if position not in self._outputs and _is_read(value):
                raise self.refuse(f"output {position} ('{value.name}') is not supported")

    def _is_default(self, name: str) -> bool:
        """Return whether an attribute has its default value."""
        node = self._node
        if not onnx.defs.has(node.op_type, domain=node.domain):
            return False
        schema = onnx.defs.get_schema(node.op_type, self.opset, node.domain)
        default = schema.attributes[name].default_value if name in schema.attributes else None
        return bool(default and default.type and ir.from_proto(default) == self._attributes[name])


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


Reader: TypeAlias = Callable[[Node], Any]


class Operator:
    """The implementation of an operator: a function of tensors and attributes.

    Positional parameters are the inputs; those annotated ``Host`` are read in Python. Parameters
    that are keywords only are the attributes of these names: of the type annotated, or of the
    type of the default value; a default of `Read` says itself how it is read. Where one is a
    `Body`, the inputs are followed by what subgraphs capture.

    Args:
        function: takes tensors by position and attributes by name; for instance
            ``lambda x, *, alpha=0.01: leaky_relu(x, alpha)``.
        inputs: least and greatest number of inputs, where parameters do not say it.
        outputs: how many outputs it returns; ``None`` for as many as the node has.
        ignored: attributes that change nothing at inference.
        check: raises what speaks against a node.
        train: a function like ``function`` that takes its place in training.
        otherwise: runs the nodes that the function does not, instead of refusing them.

    Attributes:
        function: the function.
        host: positions of inputs that are read in Python; ``None`` if it has subgraphs.
        otherwise: runs the nodes that the function does not.
    """

    def __init__(
        self,
        function: Op,
        *,
        inputs: tuple[int, float] | None = None,
        outputs: int | None = 1,
        ignored: tuple[str, ...] = (),
        check: Callable[[Node], None] | None = None,
        train: Op | None = None,
        otherwise: Operator | None = None,
    ):
        self.function, self._outputs, self._ignored = function, outputs, ignored
        self._check, self.otherwise = check, otherwise
        builtin = inspect.isbuiltin(function)
        parameters = [] if builtin else list(inspect.signature(function).parameters.values())
        by_position = (_Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD)
        positional = [x for x in parameters if x.kind in by_position]
        named = [x for x in parameters if x.kind is x.KEYWORD_ONLY]
        endless = any(x.kind is x.VAR_POSITIONAL for x in parameters)
        least = sum(x.default is x.empty for x in positional)
        on_host = (i for i, x in enumerate(positional) if str(x.annotation).startswith("Host"))
        self._attributes = {x.name: _reader(x.name, x.annotation, x.default) for x in named}
        self._inputs = inputs or (least, float("inf") if endless else len(positional))
        self.host = None if any(x.annotation == "Body" for x in named) else frozenset(on_host)
        self._train = None if train is None else Operator(train)

    def prepared(self, node: Node) -> tuple[Op, Op | None]:
        """Return the function that runs a node, and the one for training if it differs.

        Raises:
            ModelError: the node has what the operator does not take.
        """
        run = self.bound(node)
        train = None if self._train is None else self._train.bound(node)
        node.check_understood()
        least, most = self._inputs
        if not least <= len(node.inputs) <= most:
            problem = f"it has {len(node.inputs)} inputs, which the operator does not take"
            raise node.refuse(problem)
        return run, train

    def bound(self, node: Node) -> Op:
        """Return the function with a node's attributes, all that it implements understood.

        Raises:
            ModelError: see `Node.read`, and what speaks against the node.
        """
        node.ignore(*self._ignored)
        if self._outputs != 1:
            node.wants(*range(self._outputs or node.output_count))
        if self._check is not None:
            self._check(node)
        attributes = {name: read(node) for name, read in self._attributes.items()}
        return partial(self.function, **attributes) if attributes else self.function


Table: TypeAlias = dict[str, Operator]
Operators: TypeAlias = Mapping[tuple[str, str], Operator]
"""What runs nodes, by the operator's domain and name."""


@dataclass(frozen=True)
class Read:
    """The default of an attribute that is read in a way of its own.

    Attributes:
        how: takes the node and the parameter's name, and returns what the function gets.
    """

    how: Callable[[Node, str], Any]


def one_of(*choices: str) -> Any:
    """Return the default of a string attribute that is one of some words, the first if absent."""

    def read(node: Node, name: str) -> str:
        value: str = node.read(name, "str", choices[0])
        for word in choices:
            if word.lower() == value.lower():
                return word
        raise node.refuse(f"attribute '{name}' is '{value}', not one of {', '.join(choices)}")

    return Read(read)


def wanted(*outputs: int) -> Any:
    """Return the default of a parameter that is true where one of these outputs is read."""
    return Read(lambda node, _: node.wants(*outputs))


def settings(group: type[Any]) -> Any:
    """Return the default of a parameter that is a dataclass whose fields are attributes."""
    readers = {x.name: _reader(x.name, x.type, x.default) for x in fields(group)}
    return Read(lambda node, _: group(**{name: read(node) for name, read in readers.items()}))


def _reader(name: str, annotation: Any, default: Any) -> Reader:
    if isinstance(default, Read):
        how = default.how
        return lambda node: how(node, name)
    missing = default in (MISSING, _Parameter.empty)
    unnamed = annotation is _Parameter.empty
    kind = type(default).__name__ if unnamed else str(annotation).removesuffix(" | None")
    if kind not in _KINDS:
        raise TypeError(f"parameter {name} is of no kind that attributes have")
    return lambda node: node.read(name, kind, MISSING if missing else default)
