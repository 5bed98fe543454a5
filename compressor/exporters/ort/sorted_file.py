"""The same bytes for the same model: ONNX Runtime writes a table of its format in random order.

The table names the types of each operator's kernels. It lies in front of all else in the file, so
it can be written anew, sorted, and the rest moved after it. The schema is that of
``onnxruntime/core/flatbuffers/schema/ort.fbs`` in ONNX Runtime's repository.
"""

from __future__ import annotations

import struct

from compressor.errors import ArtifactError
from compressor.exporters.flatbuffer import Flatbuffer, Table
from compressor.exporters.ort.reading import MARK, needed

_VERSION, _MODEL, _KERNELS = 0, 1, 3  # fields of the file's root table
_ALIGNED = 16  # bytes: weights must stay aligned

_Types = tuple[str, tuple[tuple[int, int], ...]]  # a type's name, and which arguments have it
_Kernel = tuple[str, tuple[_Types, ...]]  # an operator, and its types


def with_sorted_kernels(data: bytes) -> bytes:
    """Return a file of ONNX Runtime's format with its table of kernels sorted.

    Raises:
        ArtifactError: the file is of another layout than this library knows.
    """
    try:
        file = Flatbuffer(memoryview(data))
        root = file.root(MARK)
        model, kernels = needed(root, _MODEL, "model"), needed(root, _KERNELS, "list of kernels")
        body, text = model.place, file.indirect(root.at(_VERSION))
        start = min(body, body - int(file.number(body, "i")))  # its own layout may come first
        if not root.place < start < text:
            raise ValueError("its parts are in another order")
        table = _table(kernels)
    except ValueError as error:
        raise ArtifactError(
            "export ort",
            f"ONNX Runtime wrote a file of an unknown layout ({error})",
            "install another version of onnxruntime, or export onnx",
        ) from error
    return _written(table, data[start:], start, body - start, text - start)


def _table(resolver: Table) -> tuple[_Kernel, ...]:
    def types(entry: Table) -> _Types:
        arguments = ((item.number(0, "b"), item.number(1, "I")) for item in entry.tables(1))
        return entry.text(0), tuple(arguments)

    def kernel(entry: Table) -> _Kernel:
        return entry.text(0), tuple(sorted(types(item) for item in entry.tables(1)))

    return tuple(sorted(kernel(entry) for entry in resolver.tables(0)))


def _written(
    table: tuple[_Kernel, ...], rest: bytes, before: int, model: int, version: int
) -> bytes:
    """Return a file: its root, the table of kernels, and what followed them.

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

    def pair(name: str, members: list[int]) -> int:
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
        place + int.from_bytes(kernels[:4], "little") - (root + 12),
    )
    front = struct.pack("<I", root) + MARK + layout + body
    return front + kernels + bytes(start - end) + rest
