"""ONNX messages in protobuf's wire format, tensor by tensor: a file of 2 GB takes no such memory.

Protobuf's own writer needs all data in the message, again in a buffer, and again in the result; its
reader needs them twice. The format: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Mapping
from io import SEEK_CUR, BufferedReader
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, Message

Part = bytes | str
"""Some bytes of a file, or the name of the tensor whose data stand there."""

_NUMBER, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # kinds of fields
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_DATA = ("TensorProto", 9)  # raw_data
_TO_TENSORS = {
    ("ModelProto", 7): "GraphProto",
    ("GraphProto", 1): "NodeProto",
    ("GraphProto", 5): "TensorProto",  # initializers
    ("NodeProto", 5): "AttributeProto",
    ("AttributeProto", 6): "GraphProto",
    ("AttributeProto", 11): "GraphProto",
}
"""The messages that may hold initializers, by the message that they are in and their field."""

_LONGEST = 10  # bytes of a number


def parts_of(message: Message, sizes: Mapping[str, int]) -> tuple[list[Part], int]:
    """Return a message as protobuf would write it, and its bytes, data included.

    Args:
        sizes: bytes of data of each initializer that lacks them in the message. These have no
            field after ``raw_data``.
    """
    if isinstance(message, onnx.TensorProto):
        content = message.SerializeToString(deterministic=True)
        if message.name not in sizes:
            return [content], len(content)
        size = sizes[message.name]
        head = content + _field(_DATA[1], size)
        return [head, message.name], len(head) + size
    parts: list[Part] = []
    end = 0
    for field, value in message.ListFields():  # in the order of their numbers, as in a file
        if (message.DESCRIPTOR.name, field.number) in _TO_TENSORS:
            for inner in [value] if isinstance(value, Message) else value:
                below, size = _parts_inside(inner, sizes)
                parts += [_field(field.number, size), *below]
                end += len(_field(field.number, size)) + size
        else:
            alone = type(message)(**{field.name: value}).SerializeToString(deterministic=True)
            parts.append(alone)
            end += len(alone)
    return parts, end


def _parts_inside(message: Message, sizes: Mapping[str, int]) -> tuple[list[Part], int]:
    """Return the parts of a message; a node without branches, as most are, is written at once."""
    attributes = message.attribute if isinstance(message, onnx.NodeProto) else None
    if attributes is None or any(a.HasField("g") or a.graphs for a in attributes):
        return parts_of(message, sizes)
    content = message.SerializeToString(deterministic=True)
    return [content], len(content)


def _field(number: int, size: int) -> bytes:
    """Return the bytes before the content of a field that states its length."""
    return _written(number << 3 | _LENGTH) + _written(size)


def _written(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*made, number))


def read_outline(path: Path, least: int) -> tuple[onnx.ModelProto, dict[str, int]]:
    """Read a model but for the data of large initializers.

    Args:
        least: bytes from which data are passed over.

    Returns:
        The model, and the bytes of the data that were passed over, by the initializer's name.

    Raises:
        DecodeError: it is cut, or no such message.
    """
    sizes: dict[str, int] = {}
    with path.open("rb") as stream:
        outline = _outline(stream, path.stat().st_size, "ModelProto", least, sizes)
    return onnx.ModelProto.FromString(outline), sizes


def _outline(
    stream: BufferedReader, end: int, kind: str, least: int, sizes: dict[str, int]
) -> bytes:
    """Return the bytes of a message without large data, those of messages inside it included."""
    made = bytearray()
    passed = None
    while (place := stream.tell()) < end:
        key = _number(stream)
        number, wire = key >> 3, key & 7
        if wire == _NUMBER:
            made += _written(key) + _written(_number(stream))
            continue
        if wire != _LENGTH and wire not in _FIXED:
            raise DecodeError(f"byte {place} begins no field")
        size = _number(stream) if wire == _LENGTH else _FIXED[wire]
        if stream.tell() + size > end:
            raise DecodeError(f"the field at byte {place} has no end")
        inner = _TO_TENSORS.get((kind, number)) if wire == _LENGTH and size >= least else None
        if wire == _LENGTH and size >= least and (kind, number) == _DATA:
            passed = size
            stream.seek(size, SEEK_CUR)
        elif inner is not None:
            content = _outline(stream, stream.tell() + size, inner, least, sizes)
            made += _field(number, len(content)) + content
        else:
            made += _field(number, size) if wire == _LENGTH else _written(key)
            made += stream.read(size)
    if passed is not None:
        sizes[onnx.TensorProto.FromString(bytes(made)).name] = passed
    return bytes(made)


def _number(stream: BufferedReader) -> int:
    number = 0
    for index in range(_LONGEST):
        byte = stream.read(1)
        if not byte:
            break
        number |= (byte[0] & 0x7F) << 7 * index
        if byte[0] < 0x80:
            return number
    raise DecodeError(f"the number before byte {stream.tell()} has no end")
