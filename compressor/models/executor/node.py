"""One node while its operator is prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import onnx_ir as ir
import torch

from compressor.errors import ModelError
from compressor.models.executor.convert import from_numpy
from compressor.models.executor.dtypes import TORCH_DTYPES
from compressor.models.executor.program import Body, Op

Builder: TypeAlias = "Callable[[NodeView], Op]"
Table: TypeAlias = Mapping[str, Builder]

_T = TypeVar("_T")
_Kind = ir.AttributeType

_RUNTIME = "run the model in ONNX Runtime, or export it without this"


def describe(node: ir.Node, opset: int) -> str:
    """Name a node, its operator and the opset in a message."""
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
        train: set by a builder whose operator does something else in training.
    """

    def __init__(self, node: ir.Node, opset: int, prepare: Callable[[ir.Graph], Body]):
        self.opset = opset
        self.host: set[int] | None = set()
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

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer attribute; without a default it is required."""
        attribute = self._attribute(name, _Kind.INT)
        if attribute is not None:
            return attribute.as_int()
        return self._default(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return an integer attribute that stands for true or false."""
        return bool(self.integer(name, int(default)))

    def number(self, name: str, default: float | None = None) -> float:
        """Return a float attribute; without a default it is required."""
        attribute = self._attribute(name, _Kind.FLOAT)
        if attribute is not None:
            return attribute.as_float()
        return self._default(name, default)

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        """Return a string attribute that has to be one of some words, in any case."""
        attribute = self._attribute(name, _Kind.STRING)
        value = self._default(name, default) if attribute is None else attribute.as_string()
        for word in choices:
            if word.lower() == value.lower():
                return word
        raise self.refuse(f"attribute '{name}' is '{value}', not one of {', '.join(choices)}")

    def text(self, name: str) -> str:
        """Return a required string attribute."""
        attribute = self._attribute(name, _Kind.STRING)
        return self._default(name, None) if attribute is None else attribute.as_string()

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Return a list of integers, or ``None`` where the node has no such attribute."""
        attribute = self._attribute(name, _Kind.INTS)
        return None if attribute is None else tuple(attribute.as_ints())

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """Return a list of floats, or ``None`` where the node has no such attribute."""
        attribute = self._attribute(name, _Kind.FLOATS)
        return None if attribute is None else tuple(attribute.as_floats())

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Return a list of strings, or ``None`` where the node has no such attribute."""
        attribute = self._attribute(name, _Kind.STRINGS)
        return None if attribute is None else tuple(attribute.as_strings())

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return a tensor attribute, or ``None`` where the node has no such attribute."""
        attribute = self._attribute(name, _Kind.TENSOR)
        return None if attribute is None else from_numpy(attribute.as_tensor())

    def element_type(self, name: str, default: ir.DataType | None = None) -> ir.DataType | None:
        """Return an element type that is given by number; 0 and absence mean the default."""
        attribute = self._attribute(name, _Kind.INT)
        number = 0 if attribute is None else attribute.as_int()
        if number == 0:
            return default
        dtype = ir.DataType(number)
        if dtype not in TORCH_DTYPES:
            raise self.refuse(f"attribute '{name}' asks for elements of type {dtype.name}")
        return dtype

    def body(self, name: str) -> Body:
        """Prepare a subgraph; what it captures is passed to the operator after its inputs."""
        attribute = self._attribute(name, _Kind.GRAPH)
        if attribute is None:
            raise self.refuse(f"attribute '{name}' is missing")
        self.host = None
        return self._prepare(attribute.as_graph())

    def has(self, name: str) -> bool:
        """Say whether the node has an attribute, without reading it."""
        return name in self._node.attributes

    def ignore(self, *names: str) -> None:
        """Take attributes as understood that change nothing at inference."""
        self._read.update(names)

    def wants(self, output: int) -> bool:
        """Say whether an optional output is read, and take it as understood."""
        self._outputs.add(output)
        return output < len(self._node.outputs) and _is_read(self._node.outputs[output])

    def has_input(self, position: int) -> bool:
        """Say whether an optional input is given."""
        return position < len(self._node.inputs) and self._node.inputs[position] is not None

    def input_type(self, position: int) -> ir.DataType | None:
        """Return the ONNX element type of an input, or ``None`` where the graph does not say."""
        value = self._node.inputs[position] if self.has_input(position) else None
        if value is None:
            return None
        if value.const_value is not None:
            return value.const_value.dtype
        return value.dtype

    def fixed_input(self, position: int) -> torch.Tensor | None:
        """Return the value of an input that an initializer or a ``Constant`` node gives."""
        value = self._node.inputs[position] if self.has_input(position) else None
        if value is None:
            return None
        known = value.const_value
        producer = value.producer()
        if known is None and producer is not None and producer.op_type == "Constant":
            attribute = producer.attributes.get("value")
            known = None if attribute is None else attribute.as_tensor()
        return None if known is None else from_numpy(known)

    def on_host(self, *positions: int) -> None:
        """Say which inputs are read in Python (shapes, axes), so that they may stay on the CPU."""
        if self.host is not None:
            self.host.update(positions)

    def refuse(self, problem: str) -> ModelError:
        """Make the error that says what of this node is not supported."""
        return ModelError(describe(self._node, self.opset), problem, _RUNTIME)

    def check_understood(self) -> None:
        """Raise unless every attribute and output of the node was asked for.

        Raises:
            ModelError: naming what was not.
        """
        unread = sorted(set(self._node.attributes) - self._read)
        if unread:
            raise self.refuse(f"attribute '{unread[0]}' is not supported")
        for position, value in enumerate(self._node.outputs):
            if position not in self._outputs and _is_read(value):
                raise self.refuse(f"output {position} ('{value.name}') is not supported")

    def _attribute(self, name: str, kind: ir.AttributeType) -> ir.Attr | None:
        self._read.add(name)
        attribute = self._node.attributes.get(name)
        if attribute is None:
            return None
        if attribute.is_ref():
            raise self.refuse(f"attribute '{name}' refers to a function's attribute")
        if attribute.type != kind:
            raise self.refuse(f"attribute '{name}' is {attribute.type.name}, not {kind.name}")
        return attribute

    def _default(self, name: str, default: _T | None) -> _T:
        if default is None:
            raise self.refuse(f"attribute '{name}' is missing")
        return default


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()
