"""Flatbuffers are read as their library writes them, and not beyond the file."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from flatbuffers import Builder

from compressor.exporters.flatbuffer import Flatbuffer, Table


def written() -> bytes:
    """A table with a number, a text, a vector of numbers, one of texts, and a table in it."""
    builder = Builder(0)
    text = builder.CreateString("name")
    numbers = builder.CreateNumpyVector(np.array([3, -4], np.int64))
    builder.StartVector(4, 1, 4)
    builder.PrependUOffsetTRelative(text)
    texts = builder.EndVector()
    builder.StartObject(1)
    builder.PrependFloat32Slot(0, 0.5, 0.0)
    inner = builder.EndObject()
    builder.StartObject(7)
    builder.PrependInt8Slot(0, -7, 0)
    builder.PrependUOffsetTRelativeSlot(1, text, 0)
    builder.PrependUOffsetTRelativeSlot(2, numbers, 0)
    builder.PrependUOffsetTRelativeSlot(3, texts, 0)
    builder.PrependUOffsetTRelativeSlot(5, inner, 0)
    builder.Finish(builder.EndObject(), b"TEST")
    return bytes(builder.Output())


def read(data: bytes) -> list[object]:
    """Return all that the table holds."""
    root = Flatbuffer(memoryview(data)).root()
    inner = root.table(5)
    return [
        root.number(0, "b"),
        root.text(1),
        root.array(2, "i8").tolist(),
        root.texts(3),
        root.number(4, "I", 9),  # left out
        None if inner is None else inner.number(0, "f", 0.0),
        root.table(6),  # left out
        root.text(40),  # newer than the file
    ]


WHOLE = [-7, "name", [3, -4], ["name"], 9, 0.5, None, ""]


def test_fields_of_all_kinds():
    assert read(written()) == WHOLE
    file = Flatbuffer(memoryview(written()))
    assert file.root(b"TEST") == file.root()
    with pytest.raises(ValueError, match="begins with b'TEST' and not with b'TFL3'"):
        file.root(b"TFL3")


def test_damage_ends_in_one_kind_of_error():
    data = written()
    cut = [data[:length] for length in range(len(data))]
    changed = [
        data[:place] + bytes([value]) + data[place + 1 :]
        for place in range(len(data))
        for value in (0, 0x7F, 0xFF)
    ]
    refused: list[type] = []
    for each in (*cut, *changed):
        try:
            read(each)
        except ValueError as error:
            refused.append(type(error))
    assert set(refused) == {ValueError}  # and no kind of it that a library raised
    assert len(refused) > len(data)
    with pytest.raises(ValueError, match="beyond its end"):
        Table(Flatbuffer(memoryview(data)), 0).file.part(4, 1 << 40)


def test_parts_that_overlap_without_end_are_refused():
    """A vector of 100,000 texts that are all the same one of a megabyte."""
    count, size = 100_000, 1 << 20
    head = struct.pack("<I4sHHHxxiI", 16, b"TEST", 6, 8, 4, 8, 4)
    vector = struct.pack("<I", count)
    texts = len(head) + 4 + 4 * count
    offsets = b"".join(
        struct.pack("<I", texts - (len(head) + 4 + 4 * index)) for index in range(count)
    )
    data = head + vector + offsets + struct.pack("<I", size) + bytes(size)
    root = Flatbuffer(memoryview(data)).root()
    with pytest.raises(ValueError, match="its parts overlap many times"):
        root.texts(0)
