"""The graph that is being fused, and a record of what was done to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from compressor.errors import ModelError
from compressor.graph.values import constant_array, input_of, is_of_code, is_op, sole_reader
from compressor.types.tensors import Array


class _Promise(ir.LazyTensor):
    """A new weight that has not been computed."""


Rule = Callable[[ir.Node, "Draft"], bool]
"""Changes the graph around a node if it fits, and returns whether it did."""


@dataclass
class Draft:
    """A private copy of a model that rules change in place.

    Attributes:
        model: the copy.
        lowered: the graph was made from a torch module. Then even a single number among the
            initializers may be a parameter whose value no rule may look at, unless it is marked
            as one of the code. In an ONNX file such numbers are mostly of the code, like 0.5.
        parameters: initializers whose values no structural rule may see.
        counts: how often each rule changed the graph, by its name.
        actions: what was done to each layer.
        reasons: why something was not done to a layer.
        failure: why not all constants could be computed.
    """

    model: ir.Model
    lowered: bool = True
    parameters: set[ir.Value] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    actions: dict[str, list[str]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    failure: str | None = None
    _results: dict[object, list[Array]] | None = field(default=None, init=False)

    @property
    def opset(self) -> int:
        """Version of the default domain."""
        imports = self.model.opset_imports
        return imports.get("", imports.get("ai.onnx", 1))

    def did(self, layer: str, action: str) -> None:
        """Record what was done to a layer."""
        self.actions.setdefault(layer, []).append(action)
        self.reasons.pop(layer, None)

    def kept(self, layer: str, reason: str) -> None:
        """Record why nothing was done to a layer."""
        if layer not in self.actions:
            self.reasons.setdefault(layer, reason)

    def promise(
        self, compute: Callable[[], Array], dtype: ir.DataType, shape: tuple[int, ...], name: str
    ) -> ir.TensorProtocol:
        """Return a tensor that ``compute`` makes when it is read, or once for all in a copy."""

        def made() -> ir.TensorProtocol:
            values = np.ascontiguousarray(compute()).astype(dtype.numpy(), copy=False)
            return ir.Tensor(values.reshape(shape), name=name, dtype=dtype)

        return _Promise(made, dtype, ir.Shape(shape), name=name)

    def results(self, compute: Callable[[], list[Array]]) -> Callable[[], list[Array]]:
        """Return ``compute``, which runs once while promises are kept, however many ask."""

        def once() -> list[Array]:
            known = {} if self._results is None else self._results
            if compute not in known:
                known[compute] = compute()
            return known[compute]

        return once

    def computed(self) -> ir.Model:
        """Return a copy of the model whose promises are kept: all new weights are computed.

        Raises:
            ModelError: a batch-norm's variance is not positive, or a constant cannot be computed.
        """
        model = self.model.clone()
        self._results = {}
        try:
            with np.errstate(all="ignore"):
                for graph in (model.graph, *model.graph.subgraphs()):
                    for value in graph.initializers.values():
                        if isinstance(value.const_value, _Promise):
                            tensor = value.const_value.raw()
                            tensor.name = value.name
                            value.const_value = tensor
        except RuntimeError as error:
            raise unsimplified(error) from error
        finally:
            self._results = None
        return model

    def initializer(self, tensor: ir.TensorProtocol, name: str) -> ir.Value:
        """Add an initializer to the main graph; a taken name gets a number."""
        unique, number = name, 0
        while unique in self.model.graph.initializers:
            number += 1
            unique = f"{name}_{number}"
        tensor.name = unique
        value = ir.Value(
            name=unique,
            shape=ir.Shape(tensor.shape.numpy()),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.model.graph.register_initializer(value)
        return value

    def constant(self, values: Any, dtype: ir.DataType, name: str) -> ir.Value:
        """Add a constant of the code (as opposed to a parameter), such as a new shape."""
        return self.initializer(ir.Tensor(np.asarray(values, dtype=dtype.numpy())), name)

    @contextmanager
    def hidden_parameters(self) -> Iterator[None]:
        """Take the parameters' values away, so that nothing can depend on them or copy them."""
        stored = {}
        for graph in (self.model.graph, *self.model.graph.subgraphs()):
            for value in graph.initializers.values():
                if _is_parameter(value, self.lowered) and not _is_factor(value):
                    self.parameters.add(value)
                    stored[value] = value.const_value
                    value.const_value = None
        try:
            yield
        finally:
            for value, tensor in stored.items():
                value.const_value = tensor

    @contextmanager
    def doubted_outputs(self) -> Iterator[None]:
        """Take the names of the outputs' dynamic axes away, unless they come from torch.

        Exporters let users name them, and users give the axes of an input and of a smaller
        output the same name. Nothing may be concluded from that.
        """
        stored = {}
        for index, value in enumerate(() if self.lowered else self.model.graph.outputs):
            if value.shape is not None and not value.is_graph_input():
                stored[index] = value.shape
                value.shape = ir.Shape([d if isinstance(d, int) else None for d in value.shape])
        try:
            yield
        finally:
            for index, shape in stored.items():
                self.model.graph.outputs[index].shape = shape


def unsimplified(error: Exception) -> ModelError:
    """Return the error that says that a library cannot simplify the graph."""
    problem = f"the graph cannot be simplified ({error})"
    return ModelError("pass fuse", problem, "try constants: false")


def _is_parameter(value: ir.Value, lowered: bool) -> bool:
    tensor = value.const_value
    if tensor is None or tensor.dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL):
        return False
    if tensor.size > 1 or not tensor.dtype.is_floating_point():
        return True
    return lowered and not is_of_code(value)


def _is_factor(value: ir.Value) -> bool:
    """Whether images are resized by a constant, which is as much code as a shape is."""
    uses = list(value.uses())
    return bool(uses) and all(is_op(u.node, "Resize", "Upsample") and u.idx for u in uses)


Dim = int | ir.SymbolicDim
AttributeValue = int | float | str | Sequence[int]


def maker(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Return the node that writes a value; with operators, only if it is one of them."""
    node = None if value is None else value.producer()
    return node if not op_types or is_op(node, *op_types) else None


def private_maker(value: ir.Value | None, reader: ir.Node, *op_types: str) -> ir.Node | None:
    """Like :func:`maker`, if besides nothing but ``reader``, in the same graph, reads the value."""
    node = maker(value, *op_types)
    if node is None or value is None or sole_reader(value) is not reader:
        return None
    return node if node.graph is reader.graph else None


def scalar(value: ir.Value | None) -> float | None:
    """Return the number in a constant of one element."""
    array = constant_array(value)
    if array is None or array.size != 1 or array.dtype.kind in "OSU":
        return None
    return float(array.reshape(()))


def integers(value: ir.Value | None) -> list[int] | None:
    """Return the numbers in an integer constant."""
    array = constant_array(value)
    if array is None or array.dtype.kind not in "iu":
        return None
    return [int(i) for i in array.reshape(-1)]


def rank(value: ir.Value | None) -> int | None:
    """Return the number of axes, if known."""
    return None if value is None or value.shape is None else len(value.shape)


def has_kernels(value: ir.Value | None) -> bool:
    """Whether runtimes have kernels of all operators for a value's type: floats but float64."""
    dtype = None if value is None else value.dtype
    return dtype is not None and dtype.is_floating_point() and dtype != ir.DataType.DOUBLE


def axes_of(node: ir.Node, count: int | None) -> list[int] | None:
    """Return a node's axes, an input or (before opset 13 or 18) an attribute, as axes >= 0."""
    attribute = node.attributes.get_ints("axes", None)
    axes = list(attribute) if attribute is not None else integers(input_of(node, 1))
    return axes if axes is None else positive(axes, count)


def positive(axes: Sequence[int], count: int | None) -> list[int] | None:
    """Count negative axes from the front; ``None`` where the number of axes is not known."""
    if count is None:
        return list(axes) if all(a >= 0 for a in axes) else None
    return [a + count if a < 0 else a for a in axes]


def same_dim(first: Dim, second: Dim) -> bool:
    """Whether two lengths are surely equal: the same number or the same symbol."""
    if isinstance(first, int) or isinstance(second, int):
        return isinstance(first, int) and isinstance(second, int) and first == second
    return first.value is not None and first.value == second.value


def put(
    node: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, AttributeValue] | None = None,
) -> ir.Node:
    """Insert a new node before ``node`` and return it; its output has the same type."""
    made = ir.node(op_type, inputs, attributes)
    made.outputs[0].type = node.outputs[0].type
    node_graph(node).insert_before(node, made)
    return made


def replace(
    node: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, AttributeValue] | None = None,
) -> ir.Node:
    """Put a new node in place of ``node``; its output keeps the name, shape and readers."""
    made = ir.node(op_type, inputs, attributes)
    ir.convenience.replace_nodes_and_values(
        node_graph(node), node, [node], [made], [node.outputs[0]], [made.outputs[0]]
    )
    return made


def bypass(node: ir.Node, source: ir.Value) -> None:
    """Remove a node; ``source``, which nothing else reads, takes its output's place and name."""
    output = node.outputs[0]
    name = output.name
    ir.convenience.replace_all_uses_with(output, source, replace_graph_outputs=True)
    if source.shape is None:
        source.shape = output.shape
    node_graph(node).remove(node, safe=True)
    source.name = name


def node_graph(node: ir.Node) -> ir.Graph:
    """Return the graph a node lies in."""
    graph = node.graph
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"node {node.name!r} is in no graph")
    return graph


def wide(tensor: ir.TensorProtocol) -> torch.Tensor:
    """Return a constant in float64, of the same shape."""
    return torch.from_numpy(np.array(tensor.numpy(), dtype=np.float64))
