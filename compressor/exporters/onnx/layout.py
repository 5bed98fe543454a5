"""The bytes of an ONNX model: what lies in ``model.onnx`` and what beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir as ir
from onnx import TensorProto

from compressor.errors import ArtifactError
from compressor.graph.blocks import all_initializers
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


@dataclass(frozen=True)
class Layout:
    """Where every tensor goes.

    Attributes:
        proto: the model; inline tensors lack their data, external ones say where it is.
        tensors: the values by name.
        offsets: the place of each external tensor in the data file.
    """

    proto: onnx.ModelProto
    tensors: dict[str, ir.TensorProtocol]
    offsets: dict[str, int]

    @property
    def model_bytes(self) -> int:
        """Size of ``model.onnx``."""
        graph = self.proto.graph
        return self.proto.ByteSize() + _wrapped(graph.ByteSize(), self._grown(graph))

    def _grown(self, graph: onnx.GraphProto) -> int:
        """Bytes that a graph grows by with the data of its inline tensors."""
        grown = sum(
            _growth(tensor.ByteSize(), self.tensors[tensor.name].nbytes)
            for tensor in graph.initializer
            if tensor.name not in self.offsets
        )
        for node in graph.node:
            inside = 0
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    inner = _wrapped(attribute.g.ByteSize(), self._grown(attribute.g))
                    inside += _wrapped(attribute.ByteSize(), inner)
            grown += _wrapped(node.ByteSize(), inside)
        return grown

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
        size = parts.tensors[tensor.name].nbytes
        if not external or size < _EXTERNAL_FROM or tensor.data_type == TensorProto.STRING:
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
        ArtifactError: a tensor has not the bytes that its type and shape want.
    """
    main = directory / MODEL
    written: tuple[Path, ...] = (main,)
    if layout.offsets:
        written += (directory / DATA,)
        with (directory / DATA).open("wb") as stream:
            for name, offset in layout.offsets.items():
                _pad(stream, offset)
                stream.write(_bytes(name, layout.tensors[name]))
    for tensor in all_initializers(layout.proto.graph):
        if tensor.name in layout.offsets:
            continue
        value = layout.tensors[tensor.name]
        if value.dtype == ir.DataType.STRING:
            tensor.string_data.extend(ir.serde.serialize_tensor(value).string_data)
        else:
            tensor.raw_data = _bytes(tensor.name, value)
    main.write_bytes(layout.proto.SerializeToString(deterministic=True))
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


def _pad(stream: BinaryIO, offset: int) -> None:
    stream.write(bytes(offset - stream.tell()))


def _wrapped(size: int, grown: int) -> int:
    """Bytes that a message of ``size`` bytes, and its length, grow by where its content does."""
    return grown + _varint(size + grown) - _varint(size)


def _growth(empty: int, data: int) -> int:
    """Bytes that a message of ``empty`` bytes, and its length, grow by with ``data`` bytes."""
    return _wrapped(empty, 1 + _varint(data) + data)


def _varint(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))
