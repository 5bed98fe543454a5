"""Edit an ONNX IR graph: new nodes under free names, and the plain form that passes expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.graph.operators import operator_named
from compressor.graph.values import INTEGER_CODES, all_nodes, constant_array, is_op
from compressor.types.tensors import Array

if TYPE_CHECKING:
    from onnx_ir.passes import InPlacePass


Attributes: TypeAlias = Mapping[str, int | float | str | Sequence[int] | ir.DataType]


class Editor:
    """Makes nodes and initializers of one model.

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

    def free_name(self, wanted: str) -> str:
        """Return ``wanted``, with a number behind it if another value has that name."""
        name, number = wanted, 1
        while name in self._names:
            name, number = f"{wanted}_{number}", number + 1
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
        """Make a node with one output; it is not in the graph yet.

        Args:
            op_type: an operator of the default domain.
            inputs: what it reads.
            output: the name of its output, if that is free.
            dtype: type of the output, if it is known.
            attributes: by name; element types are given as ``ir.DataType``.
        """
        given = {
            name: value.value if isinstance(value, ir.DataType) else value
            for name, value in (attributes or {}).items()
        }
        name = self.free_name(output)
        value = ir.Value(name=name, type=None if dtype is None else ir.TensorType(dtype))
        return ir.node(op_type, inputs, given, outputs=[value], name=name)

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
        """Add an initializer that is known already."""
        return self.initializer(name, ir.tensor(np.ascontiguousarray(array)))

    def shared_constant(self, name: str, array: Array) -> ir.Value:
        """Return the initializer of this name if it holds just that, or add one."""
        known = self.model.graph.initializers.get(name)
        if known is not None and known.const_value is not None:
            held = known.const_value.numpy()
            if held.dtype == array.dtype and np.array_equal(held, array):
                return known
        return self.constant(name, array)

    def release(self, value: ir.Value) -> None:
        """Take an initializer out of the main graph; its name is free for another."""
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


def inner_nodes(node: ir.Node) -> Sequence[ir.Node]:
    """Return the nodes of a node's subgraphs, of theirs as well."""
    found: list[ir.Node] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found.extend(all_nodes(attribute.as_graph()))
        elif attribute.type == ir.AttributeType.GRAPHS:
            for graph in attribute.as_graphs():
                found.extend(all_nodes(graph))
    return found


_SMALL = 1024  # elements: shapes, axes and scalars; never a table that someone computed


def clean(model: ir.Model) -> None:
    """Fold shape arithmetic, drop what nothing reads, and strip exporter notes, in place.

    Weights keep their names: a node that reads a parameter is never folded, except one that only
    asks for its shape.
    """
    from onnxscript.optimizer import fold_constants

    lifted: list[InPlacePass] = [
        common.InlinePass(),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.RemoveInitializersFromInputsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    ]
    parameters = _parameters(model)
    for step in lifted:
        step(model)
    fold_constants(
        model,
        onnx_shape_inference=False,
        input_size_limit=_SMALL,
        output_size_limit=_SMALL,
        should_fold=lambda node: None if _folds(node, parameters) else False,
    )
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    # Constants of branches and loops are initializers there now, and belong to the main graph too.
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    _drop_zero_biases(model, parameters)
    _drop_identities(model)
    dropped: list[InPlacePass] = [
        common.RemoveUnusedNodesPass(),
        common.ClearMetadataAndDocStringPass(),
        common.NameFixPass(),
    ]
    for step in dropped:
        step(model)


def infer_shapes(model: ir.Model) -> None:
    """Note the shapes of all values that ONNX can infer, in place; weights are not read."""
    common.ShapeInferencePass(check_type=False, strict_mode=False)(model)


def _parameters(model: ir.Model) -> frozenset[str]:
    """Return the names of floats, and of integers narrow enough to be codes of some."""
    return frozenset(
        name
        for name, value in model.graph.initializers.items()
        if value.dtype is not None
        and (value.dtype.is_floating_point() or value.dtype in INTEGER_CODES)
    )


def _folds(node: ir.Node, parameters: frozenset[str]) -> bool:
    family = operator_named(node.op_type).family
    if family == "shape":
        return True
    if family == "cast-like":
        return node.inputs[0] is not None and node.inputs[0].name not in parameters
    return not any(v is not None and v.name in parameters for v in node.inputs)


def _drop_zero_biases(model: ir.Model, parameters: frozenset[str]) -> None:
    """Remove the zero bias that lowering gives to a convolution without one."""
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
    """Remove ``Identity`` nodes, except those that let a graph give one value as two outputs.

    The library's pass removes these as well. Two outputs are then of one name, which is no valid
    graph, and ONNX Runtime computes something else for it.
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
