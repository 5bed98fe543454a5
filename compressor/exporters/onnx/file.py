"""``model.onnx`` as a file: laid out, written, and checked against what it has to hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NoReturn

import onnx
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx import TensorProto

from compressor.errors import ArtifactError, message_lines
from compressor.exporters.onnx.wire import parts_of, read_outline
from compressor.graph.blocks import all_initializers, inner_graphs, names_read
from compressor.graph.operators import operator_named
from compressor.graph.skeleton import Skeleton

MODEL = "model.onnx"
DATA = "model.onnx.data"
INLINE_LIMIT = 1_500_000_000
"""Bytes of weights from which ``auto`` puts them in a file of their own."""

PROTOBUF_LIMIT = 2_000_000_000
"""A protobuf message of 2 GB is refused by its readers."""

_EXTERNAL_FROM = 1024  # bytes: shapes and scales stay where shape inference and people read them
_PAGE = 4096
_PAGE_FROM = 1 << 20  # bytes: tensors that are worth being mapped by page
_CACHE_LINE = 64
_REMEDY = "report it with the spec, and do not use the file"

Described = tuple[int, tuple[int, ...]]
"""An element type and a shape."""


@dataclass(frozen=True)
class Layout:
    """Where every tensor goes.

    Attributes:
        proto: the model; inline tensors lack their data, unless they are text, and external ones
            say where it is.
        offsets: the place of each external tensor in the data file.
    """

    proto: onnx.ModelProto
    tensors: dict[str, ir.TensorProtocol]
    offsets: dict[str, int]

    @property
    def model_bytes(self) -> int:
        """Size of ``model.onnx``."""
        return parts_of(self.proto, self.inline)[1]

    @property
    def inline(self) -> dict[str, int]:
        """Bytes of the tensors whose data are to stand in ``model.onnx``, by name."""
        return {
            tensor.name: self.tensors[tensor.name].nbytes
            for tensor in all_initializers(self.proto.graph)
            if tensor.name not in self.offsets and tensor.data_type != TensorProto.STRING
        }

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return self.model_bytes + self.data_bytes

    @property
    def data_bytes(self) -> int:
        """Size of ``model.onnx.data``; 0 where there is none."""
        ends = (offset + self.tensors[name].nbytes for name, offset in self.offsets.items())
        return max(ends, default=0)


def lay_out(parts: Skeleton, external: bool) -> Layout:
    """Decide where each tensor goes; the message of ``parts`` is filled in."""
    offsets: dict[str, int] = {}
    end = 0
    for tensor in parts.proto.graph.initializer:
        content = parts.tensors[tensor.name]
        if tensor.data_type == TensorProto.STRING:
            tensor.string_data.extend(ir.serde.serialize_tensor(content).string_data)
            continue
        size = content.nbytes
        if not external or size < _EXTERNAL_FROM:
            continue
        step = _PAGE if size >= _PAGE_FROM else _CACHE_LINE
        offsets[tensor.name] = end = -(-end // step) * step
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", DATA), ("offset", end), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        end += size
    return Layout(parts.proto, parts.tensors, offsets)


def write_layout(layout: Layout, directory: Path) -> tuple[Path, ...]:
    """Write the files, evaluating one tensor after another.

    Raises:
        ArtifactError: a tensor has not the bytes that its type and shape take.
    """
    main = directory / MODEL
    written: tuple[Path, ...] = (main,)
    if layout.offsets:
        written += (directory / DATA,)
        with (directory / DATA).open("wb") as stream:
            for name, offset in layout.offsets.items():
                stream.write(bytes(offset - stream.tell()))
                stream.write(_bytes(name, layout.tensors[name]))
    with main.open("wb") as stream:
        for part in parts_of(layout.proto, layout.inline)[0]:
            stream.write(_bytes(part, layout.tensors[part]) if isinstance(part, str) else part)
    return written


def _bytes(name: str, tensor: ir.TensorProtocol) -> bytes:
    data = tensor.tobytes()
    if len(data) != tensor.nbytes:
        raise ArtifactError(
            f"tensor {name!r}",
            f"has {len(data)} bytes, {tensor.dtype.name.lower()}{list(tensor.shape.numpy())} "
            f"takes {tensor.nbytes}",
            "the pass that made it is at fault; report it",
        )
    return data


def described(proto: onnx.ModelProto) -> dict[str, Described]:
    """Return the type and shape of every initializer, those in branches too."""
    return {t.name: (t.data_type, tuple(t.dims)) for t in all_initializers(proto.graph)}


def check_message(layout: Layout) -> str | None:
    """Return what onnx's checker, with strict shape inference, refuses, or ``None``.

    No weight is needed: initializers become inputs, but for short ones of int64. These are axes and
    lengths; where a slice of a shape has none, onnx infers that nothing is left of it.
    """
    probe = onnx.ModelProto()
    probe.CopyFrom(layout.proto)
    weights = {name for name in described(probe) if not _is_lengths(layout.tensors[name])}
    for tensor in all_initializers(probe.graph):
        if tensor.name not in weights:
            tensor.raw_data = layout.tensors[tensor.name].tobytes()
    _make_inputs(probe, weights)
    return _checked(probe)


def _is_lengths(tensor: ir.TensorProtocol) -> bool:
    known = not isinstance(tensor, ir.LazyTensor)
    return known and tensor.dtype == ir.DataType.INT64 and tensor.nbytes < _EXTERNAL_FROM


def _make_inputs(model: onnx.ModelProto, names: Collection[str]) -> None:
    """Make inputs of the model of some initializers, those in branches too, in place."""
    waiting = [model.graph]
    while waiting:
        graph = waiting.pop()
        for index in reversed(range(len(graph.initializer))):
            tensor = graph.initializer[index]
            if tensor.name in names:
                dims = list(tensor.dims)
                entry = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, dims)
                model.graph.input.append(entry)
                del graph.initializer[index]
        waiting.extend(inner_graphs(graph))


def check_file(path: Path, opset: int, expected: Mapping[str, Described]) -> None:
    """Check a written model.

    Raises:
        ArtifactError: the checker or shape inference refuses it, the opset is another, or an
            initializer is missing, unread, of another type, or not as long as it has to be.
    """
    subject = f"artifact {path.name!r}"
    try:
        model, passed = read_outline(path, _EXTERNAL_FROM)
    except DecodeError as error:
        _fail(subject, f"is refused by the onnx checker ({error})")
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    if opsets.get("", opset) != opset:
        _fail(subject, f"has opset {opsets['']}, not {opset}")
    stored = described(model)
    for name, meant in expected.items():
        if name not in stored:
            _fail(subject, f"lacks the initializer {name!r}")
        if stored[name] != meant:
            _fail(subject, f"holds {name!r} as {_text(stored[name])}, not {_text(meant)}")
    extra = sorted(stored.keys() - expected.keys())
    if extra:
        _fail(subject, f"holds an initializer {extra[0]!r} that the model does not have")
    _check_use(model, subject)
    _check_lengths(model, passed, path, subject)
    outside = any(t.data_location == TensorProto.EXTERNAL for t in all_initializers(model.graph))
    _make_inputs(model, passed)
    wrong = _checked(path if outside else model)
    if wrong is not None:
        _fail(subject, f"is refused by the onnx checker ({wrong})")


def check_tensors(path: Path, expected: Mapping[str, ir.TensorProtocol]) -> str:
    """Compare the initializers of a written model, read one at a time; return what was compared.

    Raises:
        ArtifactError: one is missing or holds other values.
    """
    graph = ir.load(path).graph
    values = dict(graph.initializers)
    for inner in graph.subgraphs():
        values.update(inner.initializers)
    for name, meant in expected.items():
        tensor = values[name].const_value if name in values else None
        if tensor is None or tensor.tobytes() != meant.tobytes():
            _fail(f"artifact {path.name!r}", f"holds other values of {name!r}")
    return f"{len(expected)} tensors read back"


def _checked(model: Path | onnx.ModelProto) -> str | None:
    try:
        onnx.checker.check_model(str(model) if isinstance(model, Path) else model, full_check=True)
    except (
        onnx.checker.ValidationError,
        onnx.shape_inference.InferenceError,
        RuntimeError,
        ValueError,
    ) as error:
        return " ".join(message_lines(error))[:400] or type(error).__name__
    return None


def _check_use(model: onnx.ModelProto, subject: str) -> None:
    """Check that every weight is read, and that none is quantized while the model runs.

    A float weight left beside its integer codes is read by nothing, and makes a quantized file no
    smaller than the float one.
    """
    read = set(names_read(model.graph))
    shapes = {t.name: len(t.dims) for t in all_initializers(model.graph)}
    for name in shapes:
        if name not in read:
            _fail(subject, f"holds {name!r}, which nothing reads")
    for node in model.graph.node:
        if operator_named(node.op_type).quantizes and shapes.get(node.input[0], 0) >= 2:
            _fail(subject, f"stores the weight {node.input[0]!r} as float and quantizes it later")


def _check_lengths(
    model: onnx.ModelProto, passed: Mapping[str, int], path: Path, subject: str
) -> None:
    for tensor in all_initializers(model.graph):
        if tensor.data_type == TensorProto.STRING:
            continue
        want = -(-prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth // 8)
        places = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.data_location != TensorProto.EXTERNAL:
            have = passed.get(tensor.name, len(tensor.raw_data))
        else:
            file = path.parent / places["location"]
            end = int(places["offset"]) + int(places["length"])
            have = int(places["length"]) if file.stat().st_size >= end else 0
        if have != want:
            _fail(subject, f"stores {have} bytes of {tensor.name!r}, which has {want}")


def _text(described: Described) -> str:
    return f"{TensorProto.DataType.Name(described[0]).lower()}{list(described[1])}"


def _fail(subject: str, problem: str) -> NoReturn:
    raise ArtifactError(subject, problem, _REMEDY)
