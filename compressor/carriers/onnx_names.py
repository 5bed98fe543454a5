"""Check that the names of an ONNX graph fit together: written once, read after, no cycles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from graphlib import CycleError, TopologicalSorter
from typing import TypeVar

import onnx

from compressor.errors import ModelError

_REMEDY = "the file was edited or its exporter is broken; export the model again"
_SHOWN = 4
K = TypeVar("K", bound=Hashable)


def check_names(proto: onnx.ModelProto, subject: str) -> None:
    """Check the names of all graphs and functions of a file.

    Nodes need not be in the order of execution, as runtimes sort them too.

    Raises:
        ModelError: a name is written twice, read but never written, or depends on itself.
    """
    _check_graph(proto.graph, set(), subject)
    for function in proto.functions:
        where = f"{subject}, function {function.name!r}"
        _check_nodes(function.node, set(function.input), set(), function.output, where)
    calls = {(f.domain, f.name): set(operators(f.node)) for f in proto.functions}
    cycle = _cycle(calls)
    if cycle:
        raise ModelError(subject, f"has a function {cycle[0][1]!r} that calls itself", _REMEDY)


def operators(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, str]]:
    """Yield domain and operator of all nodes, those of subgraphs included."""
    for node in nodes:
        yield node.domain, node.op_type
        for graph in _subgraphs(node):
            yield from operators(graph.node)


def described(node: onnx.NodeProto) -> str:
    """Return a node's operator and name, as far as it has one."""
    name = node.name or next((output for output in node.output if output), "")
    return f"{node.op_type} {name!r}" if name else node.op_type


def _check_graph(graph: onnx.GraphProto, outer: Set[str], subject: str) -> None:
    inputs = [value.name for value in graph.input]
    stored = [tensor.name for tensor in graph.initializer]
    stored += [tensor.values.name for tensor in graph.sparse_initializer]
    for kind, names in (("input", inputs), ("initializer", stored)):
        twice = _twice(names)
        if twice is not None:
            raise ModelError(subject, f"has two {kind}s named {twice!r}", _REMEDY)
    outputs = [value.name for value in graph.output]
    twice = _twice(outputs)
    if twice is not None and not outer:
        raise ModelError(subject, f"has two outputs named {twice!r}", _REMEDY)
    _check_nodes(graph.node, {*inputs, *stored}, outer, outputs, subject)


def _check_nodes(
    nodes: Sequence[onnx.NodeProto],
    given: Set[str],
    outer: Set[str],
    outputs: Sequence[str],
    subject: str,
) -> None:
    """Check one graph's or function's nodes, and the subgraphs of these.

    Args:
        nodes: the nodes.
        given: names of inputs and initializers.
        outer: names of the graphs around.
        outputs: names that the graph gives back.
        subject: for messages.
    """
    writer: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in writer or name in given:
                raise ModelError(
                    subject, f"writes {name!r} twice, the second time in {described(node)}", _REMEDY
                )
            writer[name] = index
    known = {*outer, *given, *writer}
    before: dict[int, set[int]] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.input):
            if name not in known:
                raise ModelError(
                    subject, f"{described(node)} reads {name!r}, which nothing writes", _REMEDY
                )
        before[index] = {writer[name] for name in _read(node) if name in writer}
    for name in outputs:
        if name not in known:
            raise ModelError(subject, f"gives {name!r}, which nothing writes", _REMEDY)
    cycle = _cycle(before)
    if cycle:
        shown = " -> ".join(described(nodes[index]) for index in cycle[:_SHOWN])
        raise ModelError(subject, f"holds a cycle of {len(cycle)} nodes ({shown})", _REMEDY)
    for node in nodes:
        for inner in _subgraphs(node):
            _check_graph(inner, known, subject)


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node reads, itself or in its subgraphs."""
    yield from node.input
    for graph in _subgraphs(node):
        own = {value.name for value in graph.input} | {t.name for t in graph.initializer}
        own.update(name for inner in graph.node for name in inner.output)
        for inner in graph.node:
            yield from (name for name in _read(inner) if name not in own)
        yield from (value.name for value in graph.output if value.name not in own)


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _cycle(before: Mapping[K, Iterable[K]]) -> list[K]:
    """Return the members of a cycle, each once; empty if there is none."""
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        members: list[K] = error.args[1]
        return members[:-1]
    return []


def _twice(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)
