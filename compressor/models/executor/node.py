"""One node while its operator is prepared, and operators as functions of tensors and attributes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import onnx_ir as ir
from torch import Tensor

from compressor.errors import ModelError
from compressor.models.element_types import TORCH_DTYPES, from_numpy
from compressor.models.executor.program import Body, Op

Builder: TypeAlias = "Callable[[NodeView], Op]"
Table: TypeAlias = Mapping[str, Builder]

Host: TypeAlias = Tensor
"""An input whose values are read in Python (a shape, an axis), so that it may stay on the CPU."""

Ints: TypeAlias = "tuple[int, ...] | None"
"""A list of integers that a node need not have."""

_Kind = ir.AttributeType
_LISTS = (_Kind.INTS, _Kind.FLOATS, _Kind.STRINGS)
_Parameter = inspect.Parameter


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


def describe(node: ir.Node, opset: int) -> str:
    """Return a node's name, its operator and the opset for a message."""
    name = f"node '{node.name}'" if node.name else "a node without a name"
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return f"{name} ({operator}, opset {opset})"


class NodeView:
    """A node's attributes by type, and the record of what of the node was understood.

    A builder asks for every attribute and optional output that it implements. What the node has
    and the builder did not ask for is an error, so that nothing is ever silently ignored.

    Args:
        node: the node.
        opset: the opset version of the node's domain.
        prepare: makes a `Body` of a subgraph.

    Attributes:
        host: positions of the inputs that are read in Python; ``None`` for an operator with
            subgraphs.
        takes: least and greatest number of inputs; ``None`` where the signature of the prepared
            function says it.
        train: set by a builder whose operator does something else in training.
    """

    def __init__(self, node: ir.Node, opset: int, prepare: Callable[[ir.Graph], Body]):
        self.opset = opset
        self.host: set[int] | None = set()
        self.takes: tuple[int, int] | None = None
        self.train: Op | None = None
        self._node = node
        self._prepare = prepare
        self._read: set[str] = set()
        self._outputs = {0}

    @property
    def input_count(self) -> int:
        """How many inputs the node has, absent ones counted."""
        return len(self._node.inputs)

    @property
    def output_count(self) -> int:
        """How many outputs the node has; asking for it takes all of them as understood."""
        self._outputs.update(range(len(self._node.outputs)))
        return len(self._node.outputs)

    def attribute(self, name: str, kind: ir.AttributeType) -> Any:
        """Return the value of an attribute, or ``None`` where the node does not have it.

        Raises:
            ModelError: it is of another kind.
        """
        self._read.add(name)
        attribute = self._node.attributes.get(name)
        if attribute is None:
            return None
        if attribute.is_ref():
            raise self.refuse(f"attribute '{name}' refers to a function's attribute")
        if attribute.type != kind:
            raise self.refuse(f"attribute '{name}' is {attribute.type.name}, not {kind.name}")
        return tuple(attribute.value) if kind in _LISTS else attribute.value

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer attribute; without a default it is required."""
        return int(self._or(name, self.attribute(name, _Kind.INT), default))

    def flag(self, name: str, default: bool = False) -> bool:
        """Return an integer attribute that stands for true or false."""
        return bool(self.integer(name, int(default)))

    def number(self, name: str, default: float | None = None) -> float:
        """Return a float attribute; without a default it is required."""
        return float(self._or(name, self.attribute(name, _Kind.FLOAT), default))

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string attribute; without a default it is required."""
        return str(self._or(name, self.attribute(name, _Kind.STRING), default))

    def integers(self, name: str) -> Ints:
        """Return a list of integers, or ``None`` where the node has no such attribute."""
        values: Ints = self.attribute(name, _Kind.INTS)
        return values

    def element_type(self, name: str, default: ir.DataType | None = None) -> ir.DataType | None:
        """Return an element type that is given by number; 0 and absence mean the default."""
        dtype = ir.DataType(self.attribute(name, _Kind.INT) or 0)
        if dtype == ir.DataType.UNDEFINED:
            return default
        if dtype not in TORCH_DTYPES:
            raise self.refuse(f"attribute '{name}' asks for elements of type {dtype.name}")
        return dtype

    def body(self, name: str) -> Body:
        """Prepare a subgraph; what it captures is passed to the operator after its inputs."""
        graph = self._or(name, self.attribute(name, _Kind.GRAPH), None)
        self.host = None
        return self._prepare(graph)

    def ignore(self, *names: str) -> None:
        """Take attributes as understood that change nothing at inference."""
        self._read.update(names)

    def wants(self, output: int) -> bool:
        """Return whether an optional output is read, and take it as understood."""
        self._outputs.add(output)
        return output < len(self._node.outputs) and _is_read(self._node.outputs[output])

    def on_host(self, *positions: int) -> None:
        """Note which inputs are read in Python, so that they may stay on the CPU."""
        if self.host is not None:
            self.host.update(positions)

    def input(self, position: int) -> ir.Value | None:
        """Return an input, or ``None`` where it is not given."""
        return self._node.inputs[position] if position < len(self._node.inputs) else None

    def input_type(self, position: int) -> ir.DataType | None:
        """Return the ONNX element type of an input, or ``None`` where the graph does not say."""
        value = self.input(position)
        if value is None or value.const_value is None:
            return None if value is None else value.dtype
        return value.const_value.dtype

    def fixed_input(self, position: int) -> Tensor | None:
        """Return the value of an input that an initializer or a ``Constant`` node gives."""
        value = self.input(position)
        if value is None:
            return None
        tensor = value.const_value
        producer = value.producer()
        if tensor is None and producer is not None and producer.op_type == "Constant":
            attribute = producer.attributes.get("value")
            tensor = None if attribute is None else attribute.as_tensor()
        return None if tensor is None else from_numpy(tensor)

    def refuse(self, problem: str) -> ModelError:
        """Return the error that says what of this node is not supported."""
        remedy = "run the model in ONNX Runtime, or export it without this"
        return ModelError(describe(self._node, self.opset), problem, remedy)

    def check_understood(self) -> None:
        """Check that every attribute and output of the node was asked for.

        Raises:
            ModelError: naming what was not.
        """
        unread = sorted(set(self._node.attributes) - self._read)
        if unread:
            raise self.refuse(f"attribute '{unread[0]}' is not supported")
        for position, value in enumerate(self._node.outputs):
            if position not in self._outputs and _is_read(value):
                raise self.refuse(f"output {position} ('{value.name}') is not supported")

    def _or(self, name: str, value: Any, default: Any) -> Any:
        if value is None and default is None:
            raise self.refuse(f"attribute '{name}' is missing")
        return default if value is None else value


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def operator(
    function: Op, *, inputs: int | None = None, outputs: int = 1, ignored: tuple[str, ...] = ()
) -> Builder:
    """Return what prepares a node whose operator is a function of tensors and attributes.

    Positional parameters are the inputs; those annotated ``Host`` are read in Python. Parameters
    that are keywords only are the attributes of these names: of the type annotated, or of the
    type of the default value; a default of `Read` says itself how it is read.

    Args:
        function: takes tensors by position and attributes by name; for instance
            ``lambda x, *, alpha=0.01: leaky_relu(x, alpha)``.
        inputs: how many tensors it takes, and nothing else; its parameters are not looked at.
        outputs: how many outputs it returns.
        ignored: attributes that change nothing at inference.
    """

    def build(node: NodeView) -> Op:
        for output in range(1, outputs):
            node.wants(output)
        node.ignore(*ignored)
        if inputs is not None:
            node.takes = inputs, inputs
            return function
        parameters = signature(function)
        node.on_host(*parameters.host)
        attributes = {name: read(node, name) for name, read in parameters.attributes.items()}
        return partial(function, **attributes) if attributes else function

    return build


@dataclass(frozen=True)
class Read:
    """The default of an attribute that is read in a way of its own.

    Attributes:
        how: takes the node and the parameter's name, and returns what the function gets.
    """

    how: Callable[[NodeView, str], Any]


def one_of(*choices: str, required: bool = False) -> Any:
    """Return the default of a string attribute that is one of some words, the first if absent."""

    def read(node: NodeView, name: str) -> str:
        value = node.text(name, None if required else choices[0])
        for word in choices:
            if word.lower() == value.lower():
                return word
        raise node.refuse(f"attribute '{name}' is '{value}', not one of {', '.join(choices)}")

    return Read(read)


def wanted(*outputs: int) -> Any:
    """Return the default of a parameter that is true where one of these outputs is read."""
    return Read(lambda node, _: sum(map(node.wants, outputs)) > 0)


@dataclass(frozen=True)
class Signature:
    """What a function says of its operator.

    Attributes:
        inputs: least and greatest number of inputs.
        host: positions of inputs that are read in Python.
        attributes: how attributes are read, by name.
    """

    inputs: tuple[int, float]
    host: tuple[int, ...]
    attributes: Mapping[str, Callable[[NodeView, str], Any]]


_SIGNATURES: dict[Any, Signature] = {}
"""By code: prepared operators of one kind are closures of the same code."""


def signature(run: Op) -> Signature:
    """Return what the parameters of a function, bound or not, say of its operator."""
    function = run.func if isinstance(run, partial) else run
    code = getattr(function, "__code__", function)
    if code not in _SIGNATURES:
        parameters = list(inspect.signature(function).parameters.values())
        positional = (_Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD)
        inputs = [parameter for parameter in parameters if parameter.kind in positional]
        endless = any(parameter.kind is _Parameter.VAR_POSITIONAL for parameter in parameters)
        least = sum(parameter.default is parameter.empty for parameter in inputs)
        attributes = [p for p in parameters if p.kind is _Parameter.KEYWORD_ONLY]
        _SIGNATURES[code] = Signature(
            (least, float("inf") if endless else len(inputs)),
            tuple(i for i, x in enumerate(inputs) if str(x.annotation).startswith("Host")),
            {parameter.name: _reader(parameter) for parameter in attributes},
        )
    return _SIGNATURES[code]


def _reader(parameter: inspect.Parameter) -> Callable[[NodeView, str], Any]:
    default = None if parameter.default is parameter.empty else parameter.default
    if isinstance(default, Read):
        return default.how
    unnamed = parameter.annotation is parameter.empty
    kind = type(default).__name__ if unnamed else str(parameter.annotation)
    match kind:
        case "bool":
            return lambda node, name: node.flag(name, bool(default))
        case "int":
            return lambda node, name: node.integer(name, default)
        case "int | None":
            return lambda node, name: node.attribute(name, _Kind.INT)
        case "float":
            return lambda node, name: node.number(name, default)
        case "str":
            return lambda node, name: node.text(name, default)
        case "Ints":
            return NodeView.integers
        case "ir.DataType" | "ir.DataType | None":
            return lambda node, name: node.element_type(name, default)
        case "Tensor | None":
            return _tensor
    raise TypeError(f"parameter {parameter} is of no kind that attributes have")


def _tensor(node: NodeView, name: str) -> Tensor | None:
    value = node.attribute(name, _Kind.TENSOR)
    return None if value is None else from_numpy(value)
