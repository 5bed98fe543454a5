"""Cut graphs so that layers read given values, and add given values to what they write."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.graph.editing import Editor
from compressor.graph.layers import layer_of
from compressor.graph.values import is_op
from compressor.types.layers import Layer

_MOST_STEPS = 16  # nodes between a layer and the value that another graph knows


@dataclass(frozen=True)
class Cut:
    """A part of a graph that reads given values.

    Attributes:
        model: the part.
        inputs: the graph input that takes the place of each value, by the value's name; those
            that are inputs of the whole model keep their names.
    """

    model: ir.Model
    inputs: Mapping[str, str]


@dataclass(frozen=True)
class Isolated:
    """A graph of layers that stand alone.

    Attributes:
        cut: its outputs are those of the layers.
        layers: the layers that could be cut out, in the order of execution.
        shared: by the name of a value, its dequantized form where several nodes read that; it is
            an output as well.
    """

    cut: Cut
    layers: tuple[Layer, ...]
    shared: Mapping[str, str]


def isolated(model: ir.Model, layers: Sequence[Layer], known: Collection[str]) -> Isolated:
    """Return a copy in which layers read new inputs of the graph in place of computed values.

    What lies between such a value and its layer, such as the quantization of the activation,
    stays. A layer is left out where the value that it reads is not ``known``, or its output is
    not.

    Args:
        model: not changed; weights are shared.
        layers: those that are wanted.
        known: names of the values that can be given, as another graph of the same model computes
            them.
    """
    values = main_values(model)
    sources: dict[str, None] = {}
    shared: dict[str, str] = {}
    chosen: list[Layer] = []
    for layer in layers:
        read = values.get(layer.inputs[0]) if layer.inputs else None
        source = _source(read, known)
        if (
            read is None
            or source is None
            or layer.output not in known
            or layer.output not in values
        ):
            continue
        chosen.append(layer)
        name = source.name or ""
        sources.setdefault(name)
        if read is not source and _readers(read) > 1:
            shared[name] = read.name or ""
    outputs = [*(layer.output for layer in chosen), *shared.values()]
    return Isolated(cut_at(model, list(sources), outputs), tuple(chosen), shared)


def cut_at(model: ir.Model, names: Sequence[str], outputs: Sequence[str]) -> Cut:
    """Return a copy whose nodes read new inputs in place of some values.

    Args:
        model: not changed; weights are shared.
        names: values of the main graph.
        outputs: names of the values that it is to yield, as its nodes compute them.
    """
    copy = model.clone()
    values, editor = main_values(copy), Editor(copy)
    inputs: dict[str, str] = {}
    for name in names:
        value = values[name]
        inputs[name] = name
        if value.is_graph_input():
            continue
        entry = ir.Value(name=editor.free_name(f"{name}_given"), shape=value.shape, type=value.type)
        inputs[name] = entry.name or ""
        copy.graph.inputs.append(entry)
        for use in tuple(value.uses()):
            use.node.replace_input_with(use.idx, entry)
    copy.graph.outputs[:] = [values[name] for name in dict.fromkeys(outputs)]
    common.RemoveUnusedNodesPass()(copy)
    return Cut(copy, inputs)


def with_offsets(model: ir.Model, names: Collection[str]) -> tuple[ir.Model, dict[str, str]]:
    """Return a copy that adds a new input to each of some values.

    An offset may be a single zero, or have the shape of its value.

    Args:
        model: not changed; weights are shared.
        names: values that nodes of the main graph compute; one of unknown type gets no offset.

    Returns:
        The copy, and the name of each value's offset.
    """
    copy = model.clone()
    values, editor = main_values(copy), Editor(copy)
    offsets: dict[str, str] = {}
    for name in names:
        value = values[name]
        made = value.producer()
        if made is None or value.dtype is None:
            continue
        offset = ir.Value(name=editor.free_name(f"{name}_offset"), type=value.type)
        node = editor.node("Add", [value, offset], f"{name}_moved", value.dtype)
        moved = node.outputs[0]
        moved.shape = value.shape
        for use in tuple(value.uses()):
            if use.node is not node:
                use.node.replace_input_with(use.idx, moved)
        copy.graph.outputs[:] = [moved if o is value else o for o in copy.graph.outputs]
        copy.graph.insert_after(made, node)
        copy.graph.inputs.append(offset)
        offsets[name] = offset.name or ""
    return copy, offsets


def main_values(model: ir.Model) -> dict[str, ir.Value]:
    """Return by name what the main graph is given and computes; no branch's values."""
    values = [*model.graph.inputs, *(v for node in model.graph for v in node.outputs)]
    return {v.name: v for v in values if v.name and not v.is_initializer()}


def _readers(value: ir.Value) -> int:
    """Count what reads a dequantized value, or the same codes dequantized again."""
    node = value.producer()
    if node is None or not is_op(node, "DequantizeLinear") or node.inputs[0] is None:
        return 1
    again = [u.node for u in node.inputs[0].uses() if is_op(u.node, "DequantizeLinear")]
    return sum(len(tuple(other.outputs[0].uses())) for other in again)


def _source(value: ir.Value | None, known: Collection[str]) -> ir.Value | None:
    """Follow what a layer reads back to a value that is known; through no other layer."""
    for _ in range(_MOST_STEPS):
        if value is None or value.is_initializer():
            return None
        if value.name in known:
            return value
        node = value.producer()
        if node is None or not node.inputs or layer_of(node) is not None:
            return None
        value = node.inputs[0]
    return None
