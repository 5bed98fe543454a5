"""The library's computation of constants, and what it cannot take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.graph.bodies import free_states
from compressor.graph.editing import Chain, Editor
from compressor.graph.inference import infer_shapes
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes, constant_array, given_shape, is_op

_FEW = 64
_GATES = 2**28  # elements of a recurrence's weight, at most


@dataclass(frozen=True)
class Folded:
    """What the library did.

    Attributes:
        changed: whether it changed anything that it counts.
        shapes: the shapes that values hold, where they are known.
        failure: the node at which it failed; the rest is left as it is then.
    """

    changed: bool = False
    shapes: Mapping[ir.Value, Any] = field(default_factory=dict)
    failure: str | None = None


def fold_constants(
    model: ir.Model,
    limit: int,
    kept: Callable[[ir.Node], bool],
    infer: bool = False,
) -> Folded:
    """Compute constants in place; before, pieces of a sequence are replaced by slices.

    Lengths of states that a loop changes are forgotten, also before.

    Args:
        limit: elements of the largest constant that is read or made.
        kept: whether a node must not be computed; the library decides about the others.
        infer: also infer shapes.
    """
    from onnxscript import optimizer

    _slice_pieces(model)
    free_states(model)
    try:
        result: Any = optimizer.fold_constants(
            model,
            onnx_shape_inference=infer,
            input_size_limit=limit,
            output_size_limit=limit,
            should_fold=lambda node: False if kept(node) else _fills_few(node) or None,
        )
        folded = Folded(bool(result), result.symbolic_value_map)
    except RuntimeError as error:  # it wraps all errors of its rules; each replacement is whole
        folded = Folded(failure=str(error))
    for value in model.graph.initializers.values():
        if value.const_value is not None:  # one that was computed has its node's shape, maybe open
            value.shape = ir.Shape(value.const_value.shape.numpy())
    return folded


def fold_sorted_gates(model: ir.Model) -> None:
    """Compute the weights of recurrences that are only put together of others, in place.

    PyTorch's newer exporter sorts the gates of a GRU or LSTM in the graph, and without this a
    recurrence had no weights.
    """
    made: set[ir.Node] = set()
    for node in all_nodes(model.graph):
        weights = node.inputs[1:4] if operator(node).recurrent else ()
        parts = [_makers(value) for value in weights if value is not None]
        made.update(maker for makers in parts if makers is not None for maker in makers)
    if made:
        fold_constants(model, _GATES, lambda node: node not in made)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def _makers(value: ir.Value) -> list[ir.Node] | None:
    """Return the nodes that make a value of constants alone; ``None`` if it is no such value."""
    node = value.producer()
    if node is None:
        return [] if value.is_initializer() and not value.is_graph_input() else None
    inputs = [v for v in node.inputs if v is not None]
    parts = [_makers(v) for v in inputs]
    if not (inputs or is_op(node, "Constant")) or operator(node).random or None in parts:
        return None
    return [node, *(maker for part in parts for maker in part or ())]


def _fills_few(node: ir.Node) -> bool:
    """Whether a node fills a short vector of lengths: zeros in front of the pads of ``F.pad``.

    The library leaves all that repeats one number, since tensors of it would enlarge the model.
    """
    lengths = given_shape(node)
    if lengths is None or lengths is not node.inputs[0]:
        return False
    array = constant_array(lengths)
    return array is not None and array.size == 1 and int(array.reshape(())) <= _FEW


def _slice_pieces(model: ir.Model) -> None:
    """Replace pieces by slices where all have one length and their number is open.

    ``torch.chunk`` of a dynamic axis becomes ``SplitToSequence`` with a number for all pieces. The
    library fails on one that is computed, and channels cannot be followed through a sequence.
    """
    pieces = [node for node in all_nodes(model.graph) if is_op(node, "SequenceAt")]
    if not pieces:
        return
    infer_shapes(model)
    editor = Editor(model)
    for node in pieces:
        sequence, position = node.inputs[0], constant_array(node.inputs[1])
        split = None if sequence is None else sequence.producer()
        if position is None or split is None or not _is_open(split) or int(position) < 0:
            continue
        _slice(node, split, int(position), editor)
        if not split.outputs[0].uses() and split.graph is not None:
            split.graph.remove(split, safe=True)


def _is_open(split: ir.Node) -> bool:
    """Whether a node makes pieces of one length, and an unknown number of them."""
    if not is_op(split, "SplitToSequence") or len(split.inputs) < 2:
        return False
    source, length = split.inputs
    if source is None or length is None or length.shape is None or length.shape.rank():
        return False
    if constant_array(length) is None:
        return True
    axis = split.attributes.get_int("axis", 0)
    return source.shape is not None and not isinstance(source.shape[axis], int)


def _slice(piece: ir.Node, split: ir.Node, position: int, editor: Editor) -> None:
    source, length = split.inputs
    whole, name, graph = ir.DataType.INT64, f"{piece.outputs[0].name}_slice", piece.graph
    assert source is not None
    assert graph is not None
    chain = Chain(editor, name)
    number = chain.add("Cast", [length], "_length", whole, {"to": whole})
    bounds = [
        chain.add("Mul", [number, editor.constant(f"{name}_{i}", np.array([i]))], f"_at_{i}", whole)
        for i in (position, position + 1)
    ]
    axis = editor.constant(f"{name}_axis", np.array([split.attributes.get_int("axis", 0)]))
    made = chain.add("Slice", [source, *bounds, axis], "", piece.outputs[0].dtype)
    made.shape = piece.outputs[0].shape
    graph.insert_before(piece, chain.nodes)
    piece.outputs[0].replace_all_uses_with(made, replace_graph_outputs=True)
    graph.remove(piece, safe=True)
