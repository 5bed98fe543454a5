"""Edit an ONNX IR graph: add nodes and initializers under free names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from compressor.graph.values import all_nodes, value_by_name
from compressor.types.tensors import Array

Attributes: TypeAlias = Mapping[str, int | float | str | Sequence[int] | ir.DataType]


class Editor:
    """Adds nodes and initializers to one model.

    Args:
        model: changed in place.
    """

    def __init__(self, model: ir.Model):
        self.model = model
        self._names = set(model.graph.initializers)
        self._names.update(v.name for v in model.graph.inputs if v.name)
        for node in all_nodes(model.graph):
            self._names.update(v.name for v in node.outputs if v.name)
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    inner = attribute.as_graph()
                    self._names.update(inner.initializers)
                    self._names.update(v.name for v in inner.inputs if v.name)

    def free_name(self, base: str) -> str:
        """Return ``base``, with a number behind it if another value has that name."""
        name, number = base, 1
        while name in self._names:
            name, number = f"{base}_{number}", number + 1
        self._names.add(name)
        return name

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        output: str,
        dtype: ir.DataType | None,
        attributes: Attributes | None = None,
    ) -> ir.Node:
        """Return a new node with one output; it is not in the graph yet.

        Args:
            op_type: an operator of the default domain.
            inputs: the values that it reads.
            output: the name of its output; a number is added if it is taken.
            dtype: type of the output, if known.
            attributes: by name; element types are given as ``ir.DataType``.
        """
        fields = {
            name: value.value if isinstance(value, ir.DataType) else value
            for name, value in (attributes or {}).items()
        }
        name = self.free_name(output)
        value = ir.Value(name=name, type=None if dtype is None else ir.TensorType(dtype))
        return ir.node(op_type, inputs, fields, outputs=[value], name=name)

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """Add an initializer to the main graph; its value is not computed."""
        shape = ir.Shape(tensor.shape.numpy())
        value = ir.Value(
            name=self.free_name(name),
            type=ir.TensorType(tensor.dtype),
            shape=shape,
            const_value=tensor,
        )
        tensor.name = value.name
        self.model.graph.register_initializer(value)
        return value

    def constant(self, name: str, array: Array) -> ir.Value:
        """Add an initializer with these values."""
        return self.initializer(name, ir.tensor(np.asarray(array, order="C")))

    def shared_constant(self, name: str, array: Array) -> ir.Value:
        """Return the initializer of this name if it has these values; otherwise add one."""
        existing = self.model.graph.initializers.get(name)
        if existing is not None and existing.const_value is not None:
            held = existing.const_value.numpy()
            if held.dtype == array.dtype and np.array_equal(held, array):
                return existing
        return self.constant(name, array)

    def release(self, value: ir.Value) -> None:
        """Remove an initializer from the main graph and free its name."""
        name = value.name or ""
        del self.model.graph.initializers[name]
        self._names.discard(name)

    def first_reader(self, value: ir.Value) -> ir.Node | None:
        """Return the first node of the main graph that reads a value, itself or in a subgraph."""
        readers = {use.node for use in value.uses()}
        if len(readers) == 1 and (only := next(iter(readers))).graph is self.model.graph:
            return only
        for node in self.model.graph:
            if node in readers or any(inner in readers for inner in inner_nodes(node)):
                return node
        return None


class Chain:
    """Nodes that follow one another, until they are put into a graph together.

    Args:
        start: what the names of their outputs begin with.
    """

    def __init__(self, editor: Editor, start: str = ""):
        self.nodes: list[ir.Node] = []
        self._editor = editor
        self._start = start

    def add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        dtype: ir.DataType | None = ir.DataType.FLOAT,
        attributes: Attributes | None = None,
    ) -> ir.Value:
        """Add a node behind the others; return its output."""
        made = self._editor.node(op_type, inputs, self._start + name, dtype, attributes)
        self.nodes.append(made)
        return made.outputs[0]


def insert_behind(graph: ir.Graph, value: ir.Value, nodes: ir.Node | Sequence[ir.Node]) -> None:
    """Put nodes behind that which computes a value, or first if no node of the graph does."""
    producer = value.producer()
    if producer is None or producer.graph is not graph:
        graph.insert_before(graph[0], nodes)
    else:
        graph.insert_after(producer, nodes)


def inner_nodes(node: ir.Node) -> Sequence[ir.Node]:
    """Return the nodes in a node's subgraphs, nested ones included."""
    nodes: list[ir.Node] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            nodes.extend(all_nodes(attribute.as_graph()))
        elif attribute.type == ir.AttributeType.GRAPHS:
            for graph in attribute.as_graphs():
                nodes.extend(all_nodes(graph))
    return nodes


def detach_dropped(model: ir.Model) -> None:
    """Take back, in place, what nodes read that went with a branch which is never taken.

    Folding drops such a branch as it is. What its nodes read would be kept for them.
    """
    present = set(all_nodes(model.graph))
    for value in value_by_name(model).values():
        for node, index in tuple(value.uses()):
            if node not in present:
                node.replace_input_with(index, None)
