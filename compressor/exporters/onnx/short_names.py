"""Graphs in few bytes: names of a few letters, and no attributes at their default values.

In a file of some hundred kB, names alone are a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, product
from string import ascii_lowercase

from onnx import GraphProto, defs

from compressor.graph.blocks import inner_graphs
from compressor.graph.skeleton import Skeleton

_MATRIX = 2  # axes: of these, a weight is told by its name


def with_short_names(parts: Skeleton) -> Skeleton:
    """Give a graph short names, in the order in which they appear; nodes lose theirs.

    They also lose attributes that are an operator's defaults.

    Inputs, outputs, names of axes, and weights of two axes and more keep their names, so that a
    file is called as before, and its layers are found.

    Args:
        parts: its message is changed in place.

    Returns:
        The same message with its tensors under their new names.
    """
    graph = parts.proto.graph
    kept = {value.name for value in (*graph.input, *graph.output)}
    kept |= {t.name for t in graph.initializer if len(t.dims) >= _MATRIX}
    free = (name for name in _letters() if name not in kept)
    names = {"": "", **{name: name for name in kept}}
    _rename(graph, names, free)
    opsets = {entry.domain: entry.version for entry in parts.proto.opset_import}
    _leave_out_defaults(graph, opsets)
    tensors = {names[name]: tensor for name, tensor in parts.tensors.items()}
    widths = {names[name]: bits for name, bits in parts.widths.items()}
    return Skeleton(parts.proto, tensors, widths)


def _letters() -> Iterator[str]:
    """Yield a, b, …, z, aa, ab, …"""
    for length in count(1):
        yield from map("".join, product(ascii_lowercase, repeat=length))


def _rename(graph: GraphProto, names: dict[str, str], free: Iterator[str]) -> None:
    def new(name: str) -> str:
        if name not in names:
            names[name] = next(free)
        return names[name]

    def renamed(values: Sequence[str]) -> list[str]:
        return [new(name) for name in values]

    for tensor in graph.initializer:
        tensor.name = new(tensor.name)
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = new(value.name)
    for node in graph.node:
        node.ClearField("name")
        node.input[:], node.output[:] = renamed(node.input), renamed(node.output)
    for inner in inner_graphs(graph):
        _rename(inner, names, free)


def _leave_out_defaults(graph: GraphProto, opsets: Mapping[str, int]) -> None:
    for node in graph.node:
        if not defs.has(node.op_type, opsets[node.domain], node.domain):
            continue  # of a runtime's own
        schema = defs.get_schema(node.op_type, opsets[node.domain], node.domain)
        for index in reversed(range(len(node.attribute))):
            given = node.attribute[index]
            known = schema.attributes.get(given.name)
            if known is not None and known.default_value == given:
                del node.attribute[index]
    for inner in inner_graphs(graph):
        _leave_out_defaults(inner, opsets)
