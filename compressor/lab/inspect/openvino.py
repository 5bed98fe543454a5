"""Inspect OpenVINO IR: the graph as XML, and the weights beside it; OpenVINO is not needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod
from pathlib import Path
from xml.etree import ElementTree

from compressor.lab.inspect.contents import ModelContents
from compressor.lab.inspect.stored import (
    SCALE,
    SMALL,
    ZERO_POINT,
    Stored,
    described,
    elements,
    facts,
    mapped,
    refused,
    scheme,
)
from compressor.types.tensors import TensorSpec

_KIND = "OpenVINO model"
_TYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "boolean": "bool",
    "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "u64": "uint64", "u32": "uint32",
    "u16": "uint16", "u8": "uint8", "i4": "int4", "u4": "uint4", "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}  # fmt: skip
_ARGUMENTS = ("int64", "int32")
_KEPT = ("Convert", "Reshape", "Unsqueeze")  # between a scale and the product
_ENDS = ("Parameter", "Result", "Const")


def inspect_openvino(path: Path) -> ModelContents:
    """Describe OpenVINO IR.

    Args:
        path: the ``.xml``; the weights lie beside it, in a ``.bin`` of the same name.

    Raises:
        ModelError: a file is missing, cut, damaged or of another kind.
    """
    weights = path.with_suffix(".bin")
    with refused(path, f"an {_KIND}"):
        content = path.read_bytes()
        if b"<!DOCTYPE" in content:
            raise ValueError("it declares a document type, which no such file has")
        try:
            root = ElementTree.fromstring(content)
        except ElementTree.ParseError as error:
            raise ValueError(f"it is not XML: {error}") from error
        if root.tag != "net" or root.find("layers") is None:
            raise ValueError(f"its root is {root.tag!r}, without layers")
        files = {path.name: len(content)}
        if not weights.exists() or not weights.stat().st_size:
            return _described(path, files, root, memoryview(b""))
    with mapped(weights, f"the weights of an {_KIND}") as data:
        return _described(path, {**files, weights.name: len(data)}, root, data)


def _described(
    path: Path, files: dict[str, int], root: ElementTree.Element, data: memoryview
) -> ModelContents:
    stored: list[Stored] = []
    operators: list[str] = []
    for layers in root.iter("layers"):  # of the network, and of bodies of loops and branches
        held = {layer.get("id", ""): layer for layer in layers.findall("layer")}
        roles = _roles(held, root, layers)
        operators += [kind for x in held.values() if (kind := x.get("type", "")) not in _ENDS]
        for place, layer in held.items():
            if layer.get("type") == "Const":
                stored += _constant(layer, data, roles.get(place, ""))
    ends = [
        [_end(layer) for layer in root.findall("layers/layer") if layer.get("type") == kind]
        for kind in ("Parameter", "Result")
    ]
    producer = root.find("rt_info/info[@name='OpenVINO Runtime']")
    notes = root.find("rt_info/framework")
    found = {note.tag: note.get("value", "") for note in ([] if notes is None else notes)}
    graph = facts(
        operators,
        ends,
        producer="" if producer is None else f"OpenVINO {producer.get('value', '')}",
    )
    return described(_KIND, path, files, stored, graph, found)


def _roles(
    held: dict[str, ElementTree.Element], root: ElementTree.Element, layers: ElementTree.Element
) -> dict[str, str]:
    """Return what constants stand for in ``(code - zero point) * scale``, by their numbers."""
    parents = {child: parent for parent in root.iter() for child in parent}
    edges = parents[layers].find("edges")
    readers = defaultdict[str, list[tuple[str, str]]](list)
    sources = defaultdict[str, dict[str, str]](dict)
    for edge in edges if edges is not None else ():
        start, end, port = (edge.get(k, "") for k in ("from-layer", "to-layer", "to-port"))
        readers[start].append((end, port))
        sources[end][port] = start

    def kind(place: str) -> str:
        return held[place].get("type", "") if place in held else ""

    roles: dict[str, str] = {}
    for place in held:
        if kind(place) != "Const":
            continue
        for after, _ in readers[place]:
            if kind(after) != "Convert":
                continue
            for end, port in readers[after]:
                if kind(end) == "Subtract" and port != "0":
                    roles[place] = ZERO_POINT
                    continue
                ends = readers[end] if kind(end) == "Subtract" else [(end, port)]
                for product, at in ends:
                    scale = sources[product].get("1" if at == "0" else "0", "")
                    while kind(scale) in _KEPT:
                        scale = sources[scale].get("0", "")
                    if kind(product) == "Multiply" and kind(scale) == "Const":
                        roles[scale] = SCALE
                        several = len(_lengths(held[scale])) and prod(_lengths(held[scale])) > 1
                        asymmetric = int(kind(end) == "Subtract")
                        dtype = _type(held[place])
                        roles[place] = scheme(dtype, 2 if several else 1, asymmetric)
    return roles


def _constant(layer: ElementTree.Element, data: memoryview, role: str) -> Iterator[Stored]:
    data_of = layer.find("data")
    if data_of is None:
        raise ValueError(f"constant {layer.get('name')!r} has no data")
    dtype, shape = _type(layer), _lengths(layer)
    # Single numbers are arguments, too.
    if not role and prod(shape) < (SMALL if dtype in _ARGUMENTS else 2):
        return
    start, size = int(data_of.get("offset", "")), int(data_of.get("size", ""))
    if not 0 <= start <= start + size <= len(data):
        raise ValueError(f"constant {layer.get('name')!r} lies at {start:,}, beyond its weights")
    part = data[start : start + size]
    values = None if role.endswith("asym") else elements(part, dtype, shape)
    yield Stored(layer.get("name", ""), shape, dtype, size, values, role)


def _type(layer: ElementTree.Element) -> str:
    data = layer.find("data")
    given = "" if data is None else data.get("element_type", "")
    return _TYPES.get(given, given)


def _lengths(layer: ElementTree.Element) -> tuple[int, ...]:
    data = layer.find("data")
    given = "" if data is None else data.get("shape", "")
    return tuple(int(n) for n in given.split(",")) if given.strip() else ()


def _end(layer: ElementTree.Element) -> TensorSpec:
    """Return an input or output of the network by the lengths of its port."""
    port = next(layer.iter("port"), None)
    dims = () if port is None else tuple(int(dim.text or "") for dim in port.findall("dim"))
    precision = "" if port is None else port.get("precision", "").lower().replace("fp", "f")
    named = "" if port is None else port.get("names", "")
    name = (named or layer.get("name", "")).partition(",")[0].removesuffix("/sink_port_0")
    lengths = tuple(None if n < 0 else n for n in dims)
    return TensorSpec(name, lengths, _TYPES.get(precision, precision))
