"""Read an ONNX file and refuse broken ones.

Only structure is checked: names, types, lengths and the places of external data. Weights in other
files are mapped, not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx import TensorProto

from compressor.errors import ModelError, SpecError, first_line
from compressor.graph.messages import (
    broken_node,
    cyclic_function,
    expansion,
    members_of_cycle,
    subgraphs,
    tensors_in,
)
from compressor.models.onnx.tensor_data import check_data, data_folder

PRODUCER = "compressor"
"""The producer of a file that was exported here."""

TARGET = "compressor.target"
"""Key of such a file's metadata: the runtime that it was written for."""

_CUT = "the file is truncated or of another format"
_AGAIN = "export the model again"
_REMEDY = "the file was edited or its exporter is broken; export the model again"
_SHOWN = 4  # nodes of a cycle


def read_onnx(path: Path) -> ir.Model:
    """Read an ONNX file; its external data is mapped, not read.

    Example:
        >>> [node.op_type for node in read_onnx(Path("model.onnx")).graph]
        ['Conv', 'Relu', 'Gemm']

    Raises:
        SpecError: the path is missing or a folder.
        ModelError: it is cut, not ONNX, or breaks ONNX's rules.
    """
    subject = f"model {str(path)!r}"
    return checked_model(_parsed(path, subject), path, subject)


def checked_model(proto: onnx.ModelProto, path: Path, subject: str) -> ir.Model:
    """Return the message that a file holds as a graph, in the order of execution.

    Raises:
        ModelError: it breaks ONNX's rules.
    """
    _check_header(proto, subject)
    _check_names(proto, subject)
    wrong = broken_node(proto)
    if wrong:
        raise ModelError(subject, f"breaks ONNX's rules: {wrong}", _REMEDY)
    _free_lengths(proto.graph)
    folder = data_folder(proto, path)
    check_data(proto, folder, subject)
    try:
        model = ir.from_proto(proto)
    except (ir.serde.SerdeError, ValueError, TypeError, KeyError, NotImplementedError) as error:
        problem = f"is not a graph that can be read ({first_line(error.__cause__ or error)})"
        raise ModelError(subject, problem, _AGAIN) from error
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        ir.external_data.set_base_dir(graph, folder)
    _decode_origin(model)
    if "ai.onnx" in model.opset_imports:  # another name of the default domain
        model.opset_imports.setdefault("", model.opset_imports.pop("ai.onnx"))
    model.graph.sort()
    return model


def _decode_origin(model: ir.Model) -> None:
    """Make text of the notes on a file's origin: what is not UTF-8 comes as bytes."""
    for field in ("producer_name", "producer_version", "domain", "doc_string"):
        given: object = getattr(model, field)
        if isinstance(given, bytes):
            setattr(model, field, given.decode(errors="replace"))


def external_files(path: Path) -> tuple[Path, ...]:
    """Return the external data files of an ONNX file, sorted; its structure is not checked."""
    proto = _parsed(path, f"model {str(path)!r}")
    places = {
        str(entry.value)
        for tensor in tensors_in(proto)
        if tensor.data_location == TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return tuple(path.parent / name for name in sorted(places))


def target_of(path: Path) -> str | None:
    """Return the runtime that a file was written for; ``None`` if it was not exported here."""
    proto = _parsed(path, f"model {str(path)!r}")
    notes = {entry.key: entry.value for entry in proto.metadata_props}
    return notes.get(TARGET) if proto.producer_name == PRODUCER else None


def _parsed(path: Path, subject: str) -> onnx.ModelProto:
    """Read the message.

    Raises:
        SpecError: the path is missing or a folder.
        ModelError: it is cut, or not ONNX.
    """
    if path.is_dir():
        raise SpecError(subject, "is a folder", "give the .onnx file in it")
    if not path.is_file():
        raise SpecError(subject, "does not exist", "check model.onnx")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(subject, f"cannot be read ({error.strerror})", "check it") from error
    if not content:
        raise ModelError(subject, "is empty", _CUT)
    try:
        return onnx.ModelProto.FromString(content)
    except DecodeError as error:
        raise ModelError(subject, "is not an ONNX file", _CUT) from error


def _check_header(proto: onnx.ModelProto, subject: str) -> None:
    """Check what a file says of itself, and that its inputs and outputs are tensors."""
    if not proto.graph.node or not proto.opset_import:
        raise ModelError(subject, "holds no graph", _CUT)
    if not proto.graph.output:
        raise ModelError(subject, "has no outputs", "export the model again with its outputs")
    if proto.ir_version > onnx.IR_VERSION:
        raise ModelError(
            subject,
            f"has IR version {proto.ir_version}, newer than the installed onnx knows "
            f"({onnx.IR_VERSION})",
            "install a newer onnx, or export the model again for an older one",
        )
    versions = {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import}
    default = next((o for d, o in _operators(proto.graph.node) if d in ("", "ai.onnx")), None)
    if default is not None and "ai.onnx" not in versions:
        raise ModelError(subject, f"does not say which opset its {default} belongs to", _AGAIN)
    have, newest = versions.get("ai.onnx", 1), onnx.defs.onnx_opset_version()
    if not 1 <= have <= newest:
        raise ModelError(
            subject,
            f"has opset {have}, the installed onnx knows 1 to {newest}",
            f"export the model again with opset {min(newest, 21)}",
        )
    if proto.graph.sparse_initializer:
        raise ModelError(subject, "holds sparse initializers", "store its weights as dense tensors")
    stored = {tensor.name for tensor in proto.graph.initializer}
    for value in proto.graph.input:
        if value.name not in stored:
            _check_tensor("input", value, subject)
    for value in proto.graph.output:
        _check_tensor("output", value, subject)


def _free_lengths(graph: onnx.GraphProto) -> None:
    """Make axes of a negative length dynamic, as ONNX Runtime takes them."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_value < 0:
                axis.ClearField("dim_value")
    for node in graph.node:
        for inner in subgraphs(node):
            _free_lengths(inner)


def _check_tensor(role: str, value: onnx.ValueInfoProto, subject: str) -> None:
    kind = value.type.WhichOneof("value")
    typed = kind == "tensor_type" and value.type.tensor_type.elem_type != TensorProto.UNDEFINED
    if typed or (kind is None and role == "output"):  # inference finds the types of outputs
        return
    untyped = kind in (None, "tensor_type")
    problem = "has no element type" if untyped else f"is a {kind.removesuffix('_type')}"
    raise ModelError(
        subject,
        f"{role} {value.name!r} {problem}",
        "inputs and outputs have to be tensors; export the model again with the tensors in it "
        "(skl2onnx: options={'zipmap': False})"
        if kind in ("sequence_type", "map_type")
        else "inputs and outputs have to be tensors; change the model and export it again",
    )


def _check_names(proto: onnx.ModelProto, subject: str) -> None:
    """Check the names in all graphs and functions of a file.

    Nodes need not be sorted: runtimes sort them too.

    Raises:
        ModelError: a name is written twice, read but never written, or depends on itself.
    """
    _check_graph(proto.graph, set(), subject)
    for function in proto.functions:
        where = f"{subject}, function {function.name!r}"
        _check_nodes(function.node, set(function.input), set(), function.output, where)
    cyclic = cyclic_function(proto)
    if cyclic:
        raise ModelError(subject, f"has a function {cyclic!r} that calls itself", _REMEDY)
    problem = expansion(proto)
    if problem:
        raise ModelError(subject, f"is too large: {problem}", "export it without functions")


def _operators(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, str]]:
    """Yield domain and operator type of all nodes, those of subgraphs included."""
    for node in nodes:
        yield node.domain, node.op_type
        for graph in subgraphs(node):
            yield from _operators(graph.node)


def _described(node: onnx.NodeProto) -> str:
    """Return a node's operator and its name, or that of its first output."""
    name = node.name or next((output for output in node.output if output), "")
    return f"{node.op_type} {name!r}" if name else node.op_type


def _check_graph(graph: onnx.GraphProto, outer: Set[str], subject: str) -> None:
    inputs = [value.name for value in graph.input]
    stored = [tensor.name for tensor in graph.initializer]
    stored += [tensor.values.name for tensor in graph.sparse_initializer]
    outputs = [value.name for value in graph.output]
    for kind, names in (("input", inputs), ("initializer", stored), ("output", outputs)):
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None and not (outer and kind == "output"):
            raise ModelError(subject, f"has two {kind}s named {twice!r}", _REMEDY)
    _check_nodes(graph.node, {*inputs, *stored}, outer, outputs, subject)


def _check_nodes(
    nodes: Sequence[onnx.NodeProto],
    fed: Set[str],
    outer: Set[str],
    outputs: Sequence[str],
    subject: str,
) -> None:
    """Check the nodes of one graph or function, and their subgraphs.

    Args:
        fed: names of inputs and initializers.
        outer: names that the surrounding graphs provide.
    """
    writer: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in writer or name in fed:
                where = _described(node)
                raise ModelError(
                    subject, f"writes {name!r} twice, the second time in {where}", _REMEDY
                )
            writer[name] = index
    names = {*outer, *fed, *writer}
    before: dict[int, set[int]] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.input):
            if name not in names:
                raise ModelError(
                    subject, f"{_described(node)} reads {name!r}, which nothing writes", _REMEDY
                )
        before[index] = {writer[name] for name in _names_read(node) if name in writer}
    given = {*fed, *writer}  # a subgraph may read outer names, and gives its own
    for name in outputs:
        if name not in given:
            raise ModelError(subject, f"gives {name!r}, which nothing writes", _REMEDY)
    cycle = members_of_cycle(before)
    if cycle:
        shown = " -> ".join(_described(nodes[index]) for index in cycle[:_SHOWN])
        raise ModelError(subject, f"holds a cycle of {len(cycle)} nodes ({shown})", _REMEDY)
    for node in nodes:
        for inner in subgraphs(node):
            _check_graph(inner, names, subject)


def _names_read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node reads, itself or in its subgraphs."""
    yield from node.input
    for graph in subgraphs(node):
        inside = {value.name for value in graph.input} | {t.name for t in graph.initializer}
        inside.update(name for inner in graph.node for name in inner.output)
        for inner in graph.node:
            yield from (name for name in _names_read(inner) if name not in inside)
        yield from (value.name for value in graph.output if value.name not in inside)
