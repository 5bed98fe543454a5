"""Inspect ExecuTorch programs, and what XNNPACK computes of them; its package is not needed.

The numbers of fields are those of ``exir/_serialize/program.fbs``, ``scalar_type.fbs`` and
``backends/xnnpack/serialization/schema.fbs`` in ExecuTorch's repository.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from compressor.exporters.flatbuffer import Flatbuffer, Table
from compressor.lab.inspect.contents import ModelContents
from compressor.lab.inspect.stored import Stored, described, elements, facts, mapped
from compressor.models.executorch import ELEMENT_TYPES, INTERFACE
from compressor.types.tensors import TensorSpec

_KIND = "ExecuTorch program"
_MARK = b"ET12"
_HEADER = struct.Struct("<4sIQQ")  # after the mark: a mark, its length, and where segments begin
_HEADER_MARK = b"eh00"
_TENSOR, _STRING, _KERNEL, _DELEGATE = 5, 6, 1, 2  # kinds of values and of instructions
_SEGMENT = 1  # where a part lies
_XNNPACK = b"XH00"
_XNNPACK_HEADER = struct.Struct("<4x4sHIIIQ")  # a mark, its length, the graph's and data's places
_XNNPACK_TYPES = {
    1: ("float32", ""), 2: ("float16", ""), 3: ("int8", "tensor"), 4: ("uint8", "tensor"),
    5: ("int32", "tensor"), 6: ("int8", "channel"), 7: ("int32", "channel"),
    8: ("int4", "channel"), 10: ("int4", "group"), 12: ("int32", ""), 14: ("bfloat16", ""),
}  # fmt: skip
"""The type of values that may be constant, and what shares a scale, by kind."""

_WIDTHS = {
    "uint8": 1, "int8": 1, "bool": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip
_CODED = 2  # a kind of XNNPACK's values
_NODES = """
Add FullyConnected Softmax Sigmoid StaticTranspose Clamp Conv2d Div StaticResizeBilinear2D
StaticConstantPad AvgPooling2d Minimum DepthwiseConv2d MaxPooling2d Multiply Subtract Floor
Convert GlobalAvgPooling2d StaticReshape ArgMaxPooling2d SquareRoot Ceiling Hardswish
LeakyReLU Maximum Negate Square ELU Abs PReLU Concatenate2 Concatenate3 Concatenate4
StaticSlice ScaledDotProductAttention BatchMatrixMultiply Concatenate5 ConvTranspose2d
ReciprocalSquareRoot Log Gelu Tanh Exp Sin Copy Cos
"""
XNNPACK_NODES = tuple(_NODES.split())
"""Names of XNNPACK's operators by number, from 1."""


def inspect_executorch(path: Path) -> ModelContents:
    """Describe an ExecuTorch program: its weights, where it or XNNPACK's parts hold them.

    Raises:
        ModelError: it is not an ExecuTorch program, or is cut or damaged.
    """
    with mapped(path, f"an {_KIND}") as data:
        program = _Program(Flatbuffer(data).root(_MARK))
        plans = {plan.text(0): plan for plan in program.root.tables(1)}
        interface = plans.pop(INTERFACE, None)
        if not plans:
            raise ValueError("it has no method")
        for plan in plans.values():
            program.add(plan)
        first = next(iter(plans.values()))
        names = _names(interface)
        ends = (_ends(first, field, names[key]) for key, field in (("inputs", 3), ("outputs", 4)))
        notes = {"notes": str(names["notes"])} if names["notes"] else {}
        for backend, count in sorted(program.backends.items()):
            notes[f"parts of {backend}"] = str(count)
        graph = facts(program.operators, ends)
        return described(_KIND, path, {path.name: len(data)}, program.stored, graph, notes)


@dataclass
class _Program:
    """A program, and what its methods hold together."""

    root: Table
    operators: list[str] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    backends: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        base = 0
        mark, length, _, start = _HEADER.unpack(self.root.file.part(8, _HEADER.size))
        if mark == _HEADER_MARK and length >= _HEADER.size:
            base = start
        self._segments = [
            (base + each.number(0, "Q"), each.number(1, "Q")) for each in self.root.tables(4)
        ]
        self._named = {each.text(0): each.number(1, "I") for each in self.root.tables(7)}

    def segment(self, index: int) -> memoryview:
        """Return the bytes of a segment."""
        if index >= len(self._segments):
            raise ValueError(f"there is no segment {index}")
        return self.root.file.part(*self._segments[index])

    def add(self, plan: Table) -> None:
        """Add what a method computes and holds."""
        names = [".".join(filter(None, (x.text(0), x.text(1)))) for x in plan.tables(6)]
        parts = list(plan.tables(7))
        for chain in plan.tables(5):
            for instruction in chain.tables(2):
                call, kind = instruction.table(1), instruction.number(0, "B")
                index = 0 if call is None else call.number(0, "i")
                if kind == _KERNEL and 0 <= index < len(names):
                    self.operators.append(names[index])
                elif kind == _DELEGATE and 0 <= index < len(parts):
                    self._add_part(parts[index])
        self._add_constants(plan)

    def _add_part(self, part: Table) -> None:
        self.backends[part.text(0)] += 1
        place = part.table(1)
        if place is None or place.number(0, "b") != _SEGMENT:
            return
        data = self.segment(place.number(1, "I"))
        if len(data) < _XNNPACK_HEADER.size or data[4:8] != _XNNPACK:
            name = f"part {sum(self.backends.values())}"
            self.stored.append(Stored(name, (len(data),), part.text(0), len(data), None))
            return
        _, _, start, size, base, _ = _XNNPACK_HEADER.unpack(data[: _XNNPACK_HEADER.size])
        graph = Flatbuffer(data[start : start + size]).root()
        for node in graph.tables(1):
            kind = node.number(0, "B") - 1
            known = 0 <= kind < len(XNNPACK_NODES)
            self.operators.append(f"xnnpack.{XNNPACK_NODES[kind] if known else kind}")
        places = list(graph.tables(8))
        for value in graph.tables(2):
            self.stored += self._weight(value, places, data[base:])

    def _weight(self, value: Table, places: list[Table], data: memoryview) -> Iterator[Stored]:
        """Yield a value of XNNPACK's graph if it is a constant."""
        held = value.table(1)
        tensor = held.table(0) if held is not None and value.number(0, "B") == _CODED else held
        index = 0 if tensor is None else tensor.number(3, "I")
        if tensor is None or not 0 < index < len(places):
            return
        key = places[index].text(2)
        if key:
            if key not in self._named:
                raise ValueError(f"there is no weight {key!r}")
            found = self.segment(self._named[key])
        else:
            start, size = (places[index].number(n, "Q") for n in (0, 1))
            found = data[start : start + size]
        kind, shape = tensor.number(0, "h"), _lengths(tensor, 2, "u4")
        dtype, label = _XNNPACK_TYPES.get(kind, (f"type {kind}", ""))
        size = prod(shape) * _WIDTHS.get(dtype, 0)  # padding follows
        yield Stored(
            name=f"part {sum(self.backends.values())}, value {tensor.number(6, 'I')}",
            shape=shape,
            dtype=dtype,
            bytes=len(found),
            values=elements(found[:size], dtype, shape) if size else None,
            quantization=f"{dtype}/{label}" if label else "",
        )

    def _add_constants(self, plan: Table) -> None:
        """Add the constants that no backend has taken."""
        held = self.root.table(5)
        if held is None:
            return
        places = held.array(1, "u8")
        for value in plan.tables(2):
            tensor = value.table(1) if value.number(0, "B") == _TENSOR else None
            index = 0 if tensor is None else tensor.number(5, "I")
            if tensor is None or tensor.at(6) or not 0 < index < len(places):
                continue
            dtype, shape = _type(tensor), _lengths(tensor, 2, "i4")
            size, start = prod(shape) * _WIDTHS[dtype], int(places[index])
            data = self.segment(held.number(0, "I"))[start : start + size]
            more = tensor.table(9)
            name = more.text(1) if more is not None else ""
            values = elements(data, dtype, shape)
            self.stored.append(Stored(name or f"constant {index}", shape, dtype, size, values))


def _lengths(tensor: Table, field: int, dtype: str) -> tuple[int, ...]:
    return tuple(int(n) for n in tensor.array(field, dtype))


def _type(tensor: Table) -> str:
    number = tensor.number(0, "b")
    if number not in ELEMENT_TYPES:
        raise ValueError(f"a tensor is of the unknown type {number}")
    return ELEMENT_TYPES[number]


def _names(interface: Table | None) -> dict[str, Any]:
    """Return the names that one of our programs has for inputs and outputs, and its notes."""
    empty: dict[str, Any] = {"inputs": [], "outputs": [], "notes": ""}
    if interface is None:
        return empty
    values = list(interface.tables(2))
    for index in interface.array(4, "i4"):
        held = values[index].table(1) if 0 <= index < len(values) else None
        if held is not None and values[index].number(0, "B") == _STRING:
            try:
                return {**empty, **json.loads(held.text(0))}
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError("its list of inputs and outputs is damaged") from error
    return empty


def _ends(plan: Table, field: int, named: Any) -> list[TensorSpec]:
    """Return inputs or outputs of a method; where it takes samples, it takes one at a time."""
    values, specs = list(plan.tables(2)), []
    for place, index in enumerate(plan.array(field, "i4")):
        if not 0 <= index < len(values):
            raise ValueError(f"there is no value {index}")
        tensor = values[index].table(1)
        if tensor is None or values[index].number(0, "B") != _TENSOR:
            continue
        try:
            name = str(named[place]["name"])
        except (IndexError, KeyError, TypeError):
            name = str(place)
        specs.append(TensorSpec(name, _lengths(tensor, 2, "i4"), _type(tensor)))
    return specs
