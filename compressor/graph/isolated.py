"""Cut single layers out of a graph, and add offsets to values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.graph.blocks import values_read
from compressor.graph.editing import Editor
from compressor.graph.layers import is_written_as_codes, layer_of
from compressor.graph.operators import operator
from compressor.graph.values import main_values
from compressor.types.layers import Layer

_MOST_STEPS = 16  # nodes between a layer and the value that another graph knows


@dataclass(frozen=True)
class Cut:
    """A part of a graph that reads given values.

    Attributes:
        inputs: the graph input that takes the place of each value, by the value's name; those
            that are inputs of the whole model keep their names.
    """

    model: ir.Model
    inputs: Mapping[str, str]


@dataclass(frozen=True)
class Isolated:
    """A graph of layers that are independent of each other.

    Attributes:
        cut: its outputs are those of the layers.
        layers: the layers that were cut out, in the order of execution.
        shared: the dequantized form of each value that is rounded even if one layer that reads
            it is left out, by the value's name; it is an output, too. Several nodes read that
            form, or an integer kernel writes it.
    """

    cut: Cut
    layers: tuple[Layer, ...]
    shared: Mapping[str, str]


def isolated(model: ir.Model, layers: Sequence[Layer], computed: Collection[str]) -> Isolated:
    """Return a copy in which layers read new inputs of the graph in place of computed values.

    Nodes between such a value and its layer stay, such as the quantization of the activation. A
    layer is left out if the value that it reads or its output is not among ``computed``.

    Args:
        model: not changed; weights are shared.
        computed: names of the values that another graph of the same model computes.
    """
    values = main_values(model)
    sources: dict[str, None] = {}
    shared: dict[str, str] = {}
    cut_out: list[Layer] = []
    for layer in layers:
        read = values.get(layer.inputs[0]) if layer.inputs else None
        source = _source(read, computed)
        if (
            read is None
            or source is None
            or layer.output not in computed
            or layer.output not in values
        ):
            continue
        cut_out.append(layer)
        name = source.name or ""
        sources.setdefault(name)
        if read is not source and (_readers(read) > 1 or is_written_as_codes(source)):
            shared[name] = read.name or ""
    model, shared = _with_forms(model, shared)
    outputs = [*(layer.output for layer in cut_out), *shared.values()]
    return Isolated(cut_at(model, list(sources), outputs), tuple(cut_out), shared)


def _with_forms(model: ir.Model, shared: Mapping[str, str]) -> tuple[ir.Model, dict[str, str]]:
    """Return a copy that dequantizes values in their own shape, and those forms by value.

    Args:
        shared: what layers read, perhaps in another shape, by the value behind it.
    """
    copy = model.clone()
    values, editor = main_values(copy), Editor(copy)
    forms: dict[str, str] = {}
    for name, read in shared.items():
        node = values[read].producer()
        for _ in range(_MOST_STEPS):
            if node is None or operator(node).quantizes or not node.inputs:
                break
            node = None if node.inputs[0] is None else node.inputs[0].producer()
        forms[name] = read
        if node is not None and operator(node).quantizes:
            inputs = [node.outputs[0], *node.inputs[1:]]
            form = editor.node("DequantizeLinear", inputs, f"{name}_form", values[name].dtype)
            copy.graph.insert_after(node, form)
            forms[name] = form.outputs[0].name or ""
    return copy, forms


def cut_at(model: ir.Model, names: Sequence[str], outputs: Sequence[str]) -> Cut:
    """Return a copy whose nodes read new inputs in place of some values.

    Args:
        model: not changed; weights are shared.
        names: values of the main graph.
        outputs: names of the values that it returns, as its nodes compute them.
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


def readers(
    model: ir.Model, outputs: Iterable[str], ends: Collection[str], names: Collection[str]
) -> list[str]:
    """Return which values are computed from some others, if the search for these ends at ``ends``.

    Args:
        outputs: names of values of the main graph.
        ends: names of values; all of ``names`` are among them.
    """
    values = main_values(model)

    def reads(value: ir.Value) -> bool:
        seen, waiting = {value}, [value]
        while waiting:
            node = waiting.pop().producer()
            for source in () if node is None else values_read(node):
                if source.name in names:
                    return True
                if source.name not in ends and source not in seen:
                    seen.add(source)
                    waiting.append(source)
        return False

    return [name for name in outputs if reads(values[name])]


def with_offsets(model: ir.Model, names: Collection[str]) -> tuple[ir.Model, dict[str, str]]:
    """Return a copy that adds a new input to each of some values.

    An offset may be a single zero, or have the shape of its value.

    Args:
        model: not changed; weights are shared.
        names: values that nodes of the main graph compute; values of unknown type get no offset.

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
        if value.is_graph_output():  # which keeps its name
            copy.graph.outputs[:] = [moved if o is value else o for o in copy.graph.outputs]
            value.name, moved.name = moved.name, value.name
        copy.graph.insert_after(made, node)
        copy.graph.inputs.append(offset)
        offsets[name] = offset.name or ""
    return copy, offsets


def _readers(value: ir.Value) -> int:
    """Count what reads a dequantized value, or the same codes dequantized again."""
    node = value.producer()
    if node is None or not operator(node).dequantizes or node.inputs[0] is None:
        return 1
    again = [u.node for u in node.inputs[0].uses() if operator(u.node).dequantizes]
    return sum(len(tuple(other.outputs[0].uses())) for other in again)


def _source(value: ir.Value | None, computed: Collection[str]) -> ir.Value | None:
    for _ in range(_MOST_STEPS):
        if value is None or value.is_initializer():
            return None
        if value.name in computed:
            return value
        node = value.producer()
        if node is None or not node.inputs or layer_of(node) is not None:
            return None
        value = node.inputs[0]
    return None
