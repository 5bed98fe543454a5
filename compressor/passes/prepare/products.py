"""What can be scaled in front of products of matrices, as in encoders.

A layer that reads what one norm or one other layer writes passes its factors on to that; where
something else reads the value too, as the residual sum behind a layer norm does, the value is
divided by a ``Mul`` in front of the layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import onnx_ir as ir

from compressor.graph.editing import Editor, insert_behind
from compressor.graph.layers import layer_of
from compressor.graph.values import value_by_name
from compressor.passes.prepare.scales import (
    ChannelVector,
    Read,
    ScaleGroup,
    ScaleMap,
    Step,
    Written,
)
from compressor.passes.prepare.sources import InputGroup, input_groups
from compressor.types.tensors import Array


def with_product_groups(
    scales: ScaleMap, model: ir.Model, layers: Collection[str], parameters: Collection[str]
) -> ScaleMap:
    """Extend a scale map by the inputs of layers that it does not scale yet.

    Args:
        scales: what is known already.
        model: the graph, with inferred shapes; not changed.
        layers: names of the layers in question.
        parameters: names of those that may be changed.
    """
    values, lines = value_by_name(model), dict(scales.lines)
    done = {read.layer.name for group in scales.groups for read in group.reads}
    followed = {step.layer.name for step in scales.steps if step.layer is not None}
    groups, steps = list(scales.groups), list(scales.steps)
    for found in input_groups(model, {*layers} - done, parameters):
        group = _group(found, values[found.request.tensor])
        if group is None or not {r.layer.weight for r in group.reads} <= set(parameters):
            continue
        groups.append(group)
        for value, line in group.values.items():
            lines.setdefault(value, line)
        steps += [
            Step(r.layer.output, (r.value,), r.layer)
            for r in group.reads
            if r.layer.name not in followed
        ]
    return ScaleMap(tuple(groups), tuple(steps), lines, scales.reason, scales.reasons)


def _group(found: InputGroup, value: ir.Value) -> ScaleGroup | None:
    first, source, rank = found.layers[0], found.source, len(value.shape or ())
    plain = all(layer.is_linear and layer.groups == 1 for layer in found.layers)
    scalable = plain and not found.shared and rank > 1 and first.columns > 1
    if not scalable or value.dtype != ir.DataType.FLOAT:
        return None
    name, columns = value.name or "", np.arange(first.columns)
    if source is None:
        reads = tuple(Read(layer, name, columns[None]) for layer in found.layers)
        values = {name: (rank - 1, columns)}
        return ScaleGroup(first.name, len(columns), reads, (), (), values, inserted=True)
    channels = np.asarray(source.channels)
    used = np.unique(channels)
    if len(used) < 2:
        return None
    every = np.full(source.count, -1, dtype=np.int64)  # channels that others read have no factor
    every[used] = np.arange(len(used))
    layer, between = source.layer, source.between
    lines = {v: (line[0], every[line[1]]) for v, line in between.items() if line is not None}
    return ScaleGroup(
        name=first.name if layer is None else layer.name,
        count=len(used),
        reads=tuple(Read(read, name, every[channels][None]) for read in found.layers),
        writes=() if layer is None else (Written(layer, layer.output, every),),
        vectors=tuple(ChannelVector(vector, every) for vector in source.vectors),
        values={**lines, name: (rank - 1, every[channels])},
        through=source.through,
        others=tuple(v for v, line in between.items() if line is None),
    )


def with_products(model: ir.Model, scaled: Iterable[tuple[ScaleGroup, Array]]) -> ir.Model:
    """Return a copy of a graph in which inputs of layers are multiplied with factors.

    Args:
        model: the graph.
        scaled: groups whose values something else reads too, with a factor for each column.
    """
    copy = model.clone()
    editor, values = Editor(copy), value_by_name(copy)
    for group, factors in scaled:
        value = values[group.reads[0].value]
        weights = {read.layer.weight for read in group.reads}
        constant = editor.constant(f"{value.name}_factors", factors.astype(np.float32))
        (name,) = group.scaled_values
        node = editor.node("Mul", [value, constant], name, value.dtype)
        node.outputs[0].shape = value.shape
        readers = [
            (use.node, use.idx)
            for use in value.uses()
            if use.node is not node
            and (layer := layer_of(use.node)) is not None
            and layer.weight in weights
            and use.idx == 0
        ]
        for reader, index in readers:
            reader.replace_input_with(index, node.outputs[0])
        insert_behind(copy.graph, value, node)
    return copy
