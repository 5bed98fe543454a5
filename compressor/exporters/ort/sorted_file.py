"""The same bytes for the same model: ONNX Runtime writes a table of its format in random order.

The table names the types of each operator's kernels. It lies in front of all else in the file, so
it can be written anew, sorted, and the rest moved behind it. The schema is that of
``onnxruntime/core/flatbuffers/schema/ort.fbs`` in ONNX Runtime's repository.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from compressor.errors import ArtifactError

_MARK = b"ORTM"
_VERSION, _MODEL, _KERNELS = 0, 1, 3  # fields of the file's root table
_ALIGNED = 16  # bytes: weights must stay aligned

_Types = tuple[bytes, tuple[tuple[int, int], ...]]  # a type's name, and which arguments have it
_Kernel = tuple[bytes, tuple[_Types, ...]]  # an operator, and its types


def with_sorted_kernels(data: bytes) -> bytes:
    """Return a file of ONNX Runtime's format with its table of kernels sorted.

    Raises:
        ArtifactError: the file is of another layout than this library knows.
    """
    try:
        root = _indirect(data, 0)
        if data[4:8] != _MARK:
            raise ValueError("it has no mark")
        version, model, kernels = (_field(data, root, f) for f in (_VERSION, _MODEL, _KERNELS))
        table = _table(data, _indirect(data, kernels))
        body, text = _indirect(data, model), _indirect(data, version)
        start = min(body, body - _number(data, body, "i"))  # a table may lie behind its own layout
        if not root < start < text:
            raise ValueError("its parts are in another order")
    except (struct.error, ValueError, IndexError) as error:
        raise ArtifactError(
            "export ort",
            f"ONNX Runtime wrote a file of an unknown layout ({error})",
            "install another version of onnxruntime, or export onnx",
        ) from error
    return _written(table, data[start:], start, body - start, text - start)


def _number(data: bytes, place: int, kind: str) -> int:
    return int(struct.unpack_from(f"<{kind}", data, place)[0])


def _indirect(data: bytes, place: int) -> int:
    return place + _number(data, place, "I")


def _field(data: bytes, table: int, number: int, *, needed: bool = True) -> int:
    """Return the place of a table's field; 0 if it has its default."""
    layout = table - _number(data, table, "i")
    slot = 4 + 2 * number
    offset = _number(data, layout + slot, "H") if slot < _number(data, layout, "H") else 0
    if needed and not offset:
        raise ValueError(f"field {number} of a table is missing")
    return table + offset if offset else 0


def _items(data: bytes, table: int, number: int) -> Iterator[int]:
    vector = _indirect(data, _field(data, table, number))
    for index in range(_number(data, vector, "I")):
        yield _indirect(data, vector + 4 + 4 * index)


def _text(data: bytes, table: int) -> bytes:
    place = _indirect(data, _field(data, table, 0))
    return data[place + 4 : place + 4 + _number(data, place, "I")]


def _table(data: bytes, table: int) -> tuple[_Kernel, ...]:
    def argument(place: int) -> tuple[int, int]:
        kind, index = (_field(data, place, n, needed=False) for n in (0, 1))
        return (
            _number(data, kind, "b") if kind else 0,
            _number(data, index, "I") if index else 0,
        )

    def types(place: int) -> _Types:
        return _text(data, place), tuple(argument(item) for item in _items(data, place, 1))

    def kernel(place: int) -> _Kernel:
        return _text(data, place), tuple(sorted(types(item) for item in _items(data, place, 1)))

    return tuple(sorted(kernel(item) for item in _items(data, table, 0)))


def _written(
    table: tuple[_Kernel, ...], rest: bytes, before: int, model: int, version: int
) -> bytes:
    """Return a file: its root, the table of kernels, and what was behind them.

    Args:
        rest: what holds the model and the version.
        before: where that was.
        model: where the model is in it.
        version: where the version is in it.
    """
    from flatbuffers import Builder

    builder = Builder(1024)

    def vector(offsets: list[int]) -> int:
        builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            builder.PrependUOffsetTRelative(offset)
        return int(builder.EndVector())

    def pair(name: bytes, members: list[int]) -> int:
        held, text = vector(members), builder.CreateString(name)
        builder.StartObject(2)
        builder.PrependUOffsetTRelativeSlot(0, text, 0)
        builder.PrependUOffsetTRelativeSlot(1, held, 0)
        return int(builder.EndObject())

    def argument(kind: int, index: int) -> int:
        builder.StartObject(2)
        builder.PrependUint32Slot(1, index, 0)
        builder.PrependInt8Slot(0, kind, 0)
        return int(builder.EndObject())

    entries = [
        pair(name, [pair(text, [argument(*each) for each in members]) for text, members in types])
        for name, types in table
    ]
    held = vector(entries)
    builder.StartObject(1)
    builder.PrependUOffsetTRelativeSlot(0, held, 0)
    builder.Finish(builder.EndObject())
    kernels = bytes(builder.Output())
    # The root: its layout of 4 fields at 8, itself at 20 with three offsets; the table at 36.
    layout = struct.pack("<6H", 12, 16, 4, 8, 0, 12)
    place, root = 36, 20
    end = place + len(kernels)
    start = end + (before - end) % _ALIGNED
    body = struct.pack(
        "<i3I",
        root - 8,
        start + version - (root + 4),
        start + model - (root + 8),
        place + _number(kernels, 0, "I") - (root + 12),
    )
    front = struct.pack("<I", root) + _MARK + layout + body
    return front + kernels + bytes(start - end) + rest
