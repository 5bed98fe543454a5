"""Check an ONNX graph: names, opset, and whether ONNX Runtime takes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import TypeVar

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.errors import ModelError
from compressor.graph.opset_conversion import converted
from compressor.graph.values import all_nodes
from compressor.models.onnx.ort_runner import OrtRunner, graph_runner
from compressor.progress import quiet_libraries

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


_OLDEST_OF_ONNXSCRIPT = 18  # its converter works in memory; older opsets need the onnx package's


def upgraded(model: ir.Model, opset: int, subject: str) -> ir.Model:
    """Return a graph of at least an opset; names of inputs, outputs and axes stay.

    Args:
        model: the graph; may be changed.
        opset: graphs of a newer one stay as they are.
        subject: what the model is, for messages.

    Raises:
        ModelError: an operator has no form in the newer opset.
    """
    have = model.opset_imports.get("")
    if have is None:  # all operators are of other domains
        model.opset_imports[""] = opset
        return model
    if have >= opset:
        return model
    try:
        with quiet_libraries():
            result = _raised(model, have, opset)
    except (RuntimeError, ValueError, NotImplementedError, ir.serde.SerdeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _refused(subject, have, opset, lines[0].strip()[:200]) from error
    if result.opset_imports.get("") != opset:
        raise _refused(subject, have, opset, "the converter left it as it was")
    return result


def _raised(model: ir.Model, have: int, opset: int) -> ir.Model:
    if have >= _OLDEST_OF_ONNXSCRIPT:
        from onnxscript import version_converter

        version_converter.convert_version(model, opset, fallback=False)
        return model
    result = converted(model, opset)
    result.producer_name, result.producer_version = model.producer_name, model.producer_version
    return result


def _refused(subject: str, have: int, opset: int, reason: str) -> ModelError:
    return ModelError(
        subject,
        f"opset {have} cannot be brought to {opset} ({reason})",
        "export the model again with a newer opset",
    )


_DEFAULT_DOMAINS = ("", "ai.onnx")
_KEPT = 1 << 14  # bytes: shapes, axes, zero points: constants that a runtime reads as it starts
OLDEST_RUN = 7  # opset from which on ONNX Runtime has kernels


def check_operators(model: ir.Model, subject: str) -> None:
    """Check that the standard operators of a graph exist.

    Raises:
        ModelError: naming the first that neither onnx nor ONNX Runtime knows.
    """
    from onnx import defs

    opset = model.opset_imports.get("", 1)
    for node in all_nodes(model.graph):
        if node.domain not in _DEFAULT_DOMAINS or defs.has(node.op_type, opset, ""):
            continue
        later = defs.has(node.op_type, defs.onnx_opset_version(), "")
        if not later and ("", node.op_type) in _known():  # a private one, as its optimizer writes
            continue
        raise ModelError(
            subject,
            f"node {_label(node)} has the operator {node.op_type!r}, which opset {opset} does not "
            "have",
            "give the file the opset it was made with"
            if later
            else "it is misspelt, of another domain, or newer than the installed onnx",
        )


def foreign_operators(model: ir.Model) -> tuple[str, ...]:
    """Return the operators of other domains that ONNX Runtime does not know, sorted.

    Args:
        model: a graph whose functions have been written out.
    """
    named = {
        (node.domain, node.op_type)
        for node in all_nodes(model.graph)
        if node.domain not in _DEFAULT_DOMAINS
    }
    if not named:
        return ()
    return tuple(sorted(f"{domain}.{name}" for domain, name in named - _known()))


def check_loads(model: ir.Model, subject: str) -> None:
    """Let ONNX Runtime look at a graph: types, shapes, and a kernel for every operator.

    Weights are given as inputs without a value. Only where that is refused, the model is loaded
    as it is: a few kernels want constants.

    Raises:
        ModelError: the runtime refuses the model.
    """
    try:
        OrtRunner(_without_weights(model), subject, optimize=False)
    except ModelError:
        graph_runner(model, subject=subject)


def _without_weights(model: ir.Model) -> bytes:
    plain = model.clone()
    common.RemoveInitializersFromInputsPass()(plain)
    common.LiftSubgraphInitializersToMainGraphPass()(plain)
    graph = plain.graph
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes <= _KEPT:
            continue
        del graph.initializers[name]
        value.const_value = None
        value.shape, value.type = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
        if not value.is_graph_input():
            graph.inputs.append(value)
    return ir.to_proto(plain).SerializeToString()


@cache
def _known() -> frozenset[tuple[str, str]]:
    """Domain and name of every operator that ONNX Runtime knows."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return frozenset((schema.domain, schema.name) for schema in state.get_all_operator_schema())


def _label(node: ir.Node) -> str:
    return repr(node.name or next((v.name for v in node.outputs if v.name), ""))
