"""Initializers inside branches, where ONNX Runtime's optimizers look for them.

Passes keep all initializers in the main graph, where they are found by name. The runtime fuses and
packs a convolution's weight only if it lies in the graph that reads it; from elsewhere the same
convolution takes up to twice as long (ONNX Runtime 1.31, one thread).
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx


def inner_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield the branches and bodies of a graph's nodes, not those inside them."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield attribute.g
            yield from attribute.graphs


def all_initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers of a graph and of all graphs inside it."""
    yield from graph.initializer
    for inner in inner_graphs(graph):
        yield from all_initializers(inner)


def sink_initializers(graph: onnx.GraphProto) -> None:
    """Move each initializer that one branch alone reads into that branch, in place."""
    branches = list(inner_graphs(graph))
    if not branches:
        return
    elsewhere = {name for node in graph.node for name in node.input}
    elsewhere.update(value.name for value in (*graph.output, *graph.input))
    readers: dict[str, list[int]] = {}
    for index, branch in enumerate(branches):
        for name in set(_names_read(branch)):
            readers.setdefault(name, []).append(index)
    for index in reversed(range(len(graph.initializer))):
        tensor = graph.initializer[index]
        places = readers.get(tensor.name, [])
        if len(places) == 1 and tensor.name not in elsewhere:
            branches[places[0]].initializer.insert(0, tensor)
            del graph.initializer[index]
    for branch in branches:
        sink_initializers(branch)


def _names_read(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names that a graph reads, its own values among them."""
    for node in graph.node:
        yield from node.input
    for output in graph.output:
        yield output.name
    for inner in inner_graphs(graph):
        yield from _names_read(inner)
