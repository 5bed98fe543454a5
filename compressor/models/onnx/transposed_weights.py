"""Transpose the weights of a graph before a runtime starts, which takes memory that is not needed.

A runtime that transposes a weight itself holds it three times while it starts: as it was, as it
becomes, and as its products read it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.graph.values import input_of
from compressor.models.resident_memory import forget_pages
from compressor.types.tensors import Array

_FROM = 1 << 24  # bytes of transposed weights, together, that are worth a file
_ALIGNED = 64  # bytes


def transpose_weights(model: ir.Model, detached: dict[str, Array]) -> None:
    """Replace weights that nodes transpose by transposed ones, mapped from a file without a name.

    Nothing is done where they are small, and where the disk has no room.

    Args:
        model: changed in place; its nodes have no branches.
        detached: values of its external initializers by name, changed in place.
    """
    turned = list(_transposes(model, detached))
    if sum(array.nbytes for _, array in turned) < _FROM:
        return
    with suppress(OSError), tempfile.TemporaryFile() as stream:
        starts = []
        for _, array in turned:
            stream.seek(-(-stream.tell() // _ALIGNED) * _ALIGNED)
            starts.append(stream.tell())
            stream.write(np.ascontiguousarray(array).data)
        stream.flush()
        mapped = np.memmap(stream, np.uint8, "r")
        for (node, array), start in zip(turned, starts, strict=True):
            content = mapped[start : start + array.nbytes].view(array.dtype)
            _replace(model, node, content.reshape(array.shape), detached)


def _transposes(model: ir.Model, detached: dict[str, Array]) -> Iterator[tuple[ir.Node, Array]]:
    """Yield the nodes that transpose a weight, and views of what they give."""
    for node in model.graph:
        source = input_of(node, 0)
        if source is None or source.name is None or source.name not in detached:
            continue
        if operator(node).moves == "order" and not node.outputs[0].is_graph_output():
            yield node, detached[source.name].transpose(node.attributes.get_ints("perm"))


def _replace(model: ir.Model, node: ir.Node, content: Array, detached: dict[str, Array]) -> None:
    """Replace a node by a detached weight of its output's name."""
    source, output = node.inputs[0], node.outputs[0]
    name, dtype = str(output.name), ir.DataType.from_numpy(content.dtype)
    shape = ir.Shape(content.shape)
    tensor = ir.ExternalTensor("none", 0, content.nbytes, dtype, shape=shape, name=name)
    weight = ir.val(name, dtype, shape, const_value=tensor)
    ir.convenience.replace_all_uses_with(output, weight)
    model.graph.remove(node, safe=True)
    model.graph.register_initializer(weight)
    detached[name] = content
    if source is not None and not source.uses() and not source.is_graph_output():
        del model.graph.initializers[str(source.name)]
        forget_pages([detached.pop(str(source.name))])
