"""Compute what depends on parameters only, such as the transposed weight of a linear layer."""

from __future__ import annotations

from itertools import count, islice
from math import prod

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from compressor.graph.layers import layer_name, lookups_of
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes, constant_of, static_shape
from compressor.passes.fuse.draft import Draft, node_graph, sole_reader
from compressor.types.tensors import Array

_SMALL = 4096
"""Bytes that a result may be larger than what it makes superfluous."""


def fold_parameters(draft: Draft) -> None:
    """Replace expressions of parameters by their values.

    A parameter that is only viewed differently keeps its name. Nothing is folded that would make
    the model larger: the transposed weight of an embedding that is also read as it is stays a
    Transpose, which runtimes fold when they load it.
    """
    for node in list(all_nodes(draft.model.graph)):
        if _foldable(node, draft) and _affordable(node, draft):
            _fold(node, draft)
            draft.counts["fold_parameters"] += 1


def _foldable(node: ir.Node, draft: Draft) -> bool:
    """Tell whether a node only depends on constants, one of them a parameter."""
    if not (_is_view(node) or operator(node).folds) or node.graph is None:
        return False
    given = [value for value in node.inputs if value is not None]
    if any(constant_of(value) is None or value.is_graph_input() for value in given):
        return False
    if not any(value in draft.parameters for value in given):
        return False
    if operator(node).moves == "type" and any(
        lookups_of(given[0])
    ):  # codes are as small as it gets
        return False
    return all(
        value.dtype is not None and static_shape(value) is not None and not value.is_graph_output()
        for value in node.outputs
    )


def _is_view(node: ir.Node) -> bool:
    """Whether a node only gives a parameter another type, shape or order."""
    return operator(node).moves in ("same", "type", "shape", "order")


def _affordable(node: ir.Node, draft: Draft) -> bool:
    """Tell whether the results are not larger than the parameters that become superfluous."""
    size = sum(_bytes(value) for value in node.outputs)
    for value in dict.fromkeys(node.inputs):
        if value is None or value not in draft.parameters:
            continue
        readers = {use.node: None for use in value.uses()}
        made = sum(_bytes(output) for reader in readers for output in reader.outputs)
        alone = all(_foldable(reader, draft) for reader in readers)
        if alone and not value.is_graph_output() and made <= _bytes(value):
            return True
        if len(readers) == 1 and not value.is_graph_output():
            size -= _bytes(value)
    return size <= _SMALL


def _bytes(value: ir.Value) -> int:
    shape = static_shape(value)
    if shape is None or value.dtype is None:
        return 0
    return (prod(shape) * value.dtype.bitwidth + 7) // 8


def _fold(node: ir.Node, draft: Draft) -> None:
    arrays = [None if v is None else constant_of(v) for v in node.inputs]
    parameters = [v for v in node.inputs if v is not None and v in draft.parameters]
    names = _names(node, parameters, draft)
    for value in parameters:
        if sole_reader(value) is node and isinstance(value.graph, ir.Graph):
            value.graph.initializers.pop(value.name or "")
    evaluation = _Evaluation(node, arrays)
    for index, (output, name) in enumerate(zip(node.outputs, names, strict=True)):
        shape, dtype = static_shape(output), output.dtype
        if shape is None or dtype is None:
            continue
        tensor = draft.promise(
            lambda index=index: evaluation.output(index),  # type: ignore[misc]
            dtype,
            shape,
            name,
        )
        source = parameters[0]
        made = draft.initializer(tensor, name)
        if operator(node).moves == "order" and name == source.name and len(shape) == 2:
            draft.did(layer_name(name), "store the weight transposed")
        draft.parameters.add(made)
        output.replace_all_uses_with(made)
    node_graph(node).remove(node, safe=True)


def _names(node: ir.Node, parameters: list[ir.Value], draft: Draft) -> list[str]:
    """Name the results after the parameters they come from."""
    names = [value.name or "" for value in parameters]
    if len(names) == 1:
        if _is_view(node) and sole_reader(parameters[0]) is node:
            return names
        taken = draft.model.graph.initializers
        free = (f"{names[0]}.{i}" for i in count() if f"{names[0]}.{i}" not in taken)
        return list(islice(free, len(node.outputs)))
    prefix = _common([name.split(".")[:-1] for name in names])
    if not prefix:
        return [value.name or names[0] for value in node.outputs]
    # torch keeps the parts of a parametrized weight at layer.parametrizations.weight.original0
    if len(prefix) > 2 and prefix[-2] == "parametrizations":
        return [".".join([*prefix[:-2], prefix[-1]])]
    return [".".join([*prefix, "weight"])]


def _common(paths: list[list[str]]) -> list[str]:
    """Return the parts that all paths begin with."""
    parts: list[str] = []
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        parts.append(level[0])
    return parts


class _Evaluation:
    """One node's results, computed when they are first asked for."""

    def __init__(self, node: ir.Node, tensors: list[ir.TensorProtocol | None]) -> None:
        inputs = [
            None if tensor is None else ir.Value(name=f"i{index}", type=ir.TensorType(tensor.dtype))
            for index, tensor in enumerate(tensors)
        ]
        copy = ir.node(
            node.op_type,
            inputs,
            {name: attribute.value for name, attribute in node.attributes.items()},
            num_outputs=len(node.outputs),
        )
        for index, (made, output) in enumerate(zip(copy.outputs, node.outputs, strict=True)):
            made.name, made.type = f"o{index}", output.type
        version = node_graph(node).opset_imports.get("", 21)
        given = [value for value in inputs if value is not None]
        graph = ir.Graph(
            given, copy.outputs, nodes=[copy], opset_imports={"": version}, name="expression"
        )
        self._model = ir.serde.serialize_model(ir.Model(graph, ir_version=10))
        self._tensors = {f"i{i}": t for i, t in enumerate(tensors) if t is not None}
        self._results: list[Array] | None = None

    def output(self, index: int) -> Array:
        if self._results is None:
            feeds = {name: np.asarray(t.numpy()) for name, t in self._tensors.items()}
            results = ReferenceEvaluator(self._model).run(None, feeds)
            self._results = [np.asarray(r) for r in results]
        return self._results[index]
