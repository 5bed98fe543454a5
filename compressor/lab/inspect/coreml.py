"""Inspect Core ML packages: a program by Core ML Tools' schema, and the weights beside it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import SpecError
from compressor.files import read_json
from compressor.lab.inspect.contents import ModelContents
from compressor.lab.inspect.stored import (
    SCALE,
    SMALL,
    Stored,
    described,
    elements,
    facts,
    refused,
    scheme,
)
from compressor.progress import quiet_libraries
from compressor.types.tensors import TensorSpec

_KIND = "Core ML package"
_MANIFEST = "Manifest.json"
_DATA = "Data"
_HERE = "@model_path/"  # before names of files beside the program
_CODED = "constexpr_affine_dequantize"
_VERSION = "com.github.apple.coremltools.version"
_RECORD = struct.Struct("<IIQQ")  # of a weight: a mark, its type, how many bytes, and where
_MARK = 0xDEADBEEF


def inspect_coreml(folder: Path) -> ModelContents:
    """Describe a Core ML package.

    Raises:
        SpecError: Core ML Tools are not installed.
        ModelError: a file is missing, cut or damaged, or it holds no program.
    """
    if find_spec("coremltools") is None:
        raise SpecError(
            f"path {str(folder)!r}",
            "needs the package coremltools, which is not installed",
            'run pip install "compressor[coreml]"',
        )
    with quiet_libraries():
        from coremltools.proto import Model_pb2
    from google.protobuf.message import DecodeError

    with refused(folder, f"a {_KIND}"):
        path = _program(folder)
        spec = Model_pb2.Model()
        try:
            spec.ParseFromString(path.read_bytes())
        except DecodeError as error:
            raise ValueError(f"{path.name} is not a model") from error
        if spec.WhichOneof("Type") != "mlProgram":
            raise ValueError(f"{path.name} is a {spec.WhichOneof('Type')}, and no ML program")
        blocks = [
            function.block_specializations[function.opset]
            for function in spec.mlProgram.functions.values()
            if function.opset in function.block_specializations
        ]
        held = _Weights(path.parent)
        operations = [operation for block in blocks for operation in _operations(block)]
        stored = [tensor for operation in operations for tensor in _stored(operation, held)]
        metadata = dict(spec.description.metadata.userDefined)
        version = metadata.pop(_VERSION, "")
        producer = f"coremltools {version}" if version else ""
        kinds = [x.type for x in operations if x.type != "const"]
        ends = [_ends(features) for features in (spec.description.input, spec.description.output)]
        files = {
            str(file.relative_to(folder)): file.stat().st_size
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        return described(_KIND, folder, files, stored, facts(kinds, ends, producer), metadata)


def _program(folder: Path) -> Path:
    """Return the file that the package's list names as its model."""
    listed = read_json(folder / _MANIFEST, f"model {str(folder)!r}", "has a damaged list of parts")
    try:
        place = listed["itemInfoEntries"][listed["rootModelIdentifier"]]["path"]
        path = (folder / _DATA / str(place)).resolve()
    except (KeyError, TypeError) as error:
        raise ValueError(f"{_MANIFEST} names no model") from error
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{_MANIFEST} names a file outside of it")
    return path


class _Weights:
    """Files of weights; each is a list of records that point at their bytes."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: dict[str, memoryview] = {}

    def read(self, name: str, offset: int) -> memoryview:
        """Return the bytes of a record."""
        if name not in self._files:
            path = (self._folder / name.removeprefix(_HERE)).resolve()
            if not path.is_relative_to(self._folder.resolve()):
                raise ValueError(f"weights {name!r} lie outside of it")
            self._files[name] = memoryview(path.read_bytes())
        data = self._files[name]
        if offset + _RECORD.size > len(data):
            raise ValueError(f"a weight is at {offset:,}, beyond {name!r}")
        mark, _, size, start = _RECORD.unpack_from(data, offset)
        if mark != _MARK or start + size > len(data):
            raise ValueError(f"there is no weight at {offset:,} in {name!r}")
        return data[start : start + size]


def _operations(block: Any) -> Iterator[Any]:
    for operation in block.operations:
        yield operation
        for inner in operation.blocks:
            yield from _operations(inner)


def _stored(operation: Any, held: _Weights) -> Iterator[Stored]:
    name = operation.outputs[0].name if operation.outputs else operation.type
    if operation.type == "const" and "val" in operation.attributes:
        yield from _tensor(name, operation.attributes["val"], held)
    elif operation.type == _CODED:
        parts = {key: operation.attributes[key] for key in ("quantized_data", "scale")}
        (scale,) = _tensor(f"{name}.scale", parts["scale"], held, SCALE, least=0)
        dtype = _dtype(parts["quantized_data"])
        zeros = [*_tensor("", operation.attributes["zero_point"], held, least=0)]
        values = zeros[0].values if zeros else None
        asymmetric = values is not None and bool(np.any(values))
        label = scheme(dtype, prod(scale.shape), int(asymmetric))
        for codes in _tensor(name, parts["quantized_data"], held, label, least=0):
            yield replace(codes, values=None) if asymmetric else codes
        yield scale
    elif operation.type.startswith("constexpr_"):
        for key in sorted(operation.attributes):
            yield from _tensor(f"{name}.{key}", operation.attributes[key], held)


def _tensor(
    name: str, value: Any, held: _Weights, label: str = "", least: int = SMALL
) -> Iterator[Stored]:
    """Yield a value if it is a tensor, not an argument: those of integers are below ``least``."""
    if value.type.WhichOneof("type") != "tensorType":
        return
    shape = tuple(int(d.constant.size) for d in value.type.tensorType.dimensions)
    dtype = _dtype(value)
    argument = prod(shape) < least if "float" not in dtype else not shape and least
    if dtype == "string" or argument:
        return
    if value.WhichOneof("value") == "blobFileValue":
        data = held.read(value.blobFileValue.fileName, value.blobFileValue.offset)
        yield Stored(name, shape, dtype, len(data), elements(data, dtype, shape), label)
        return
    given = value.immediateValue.tensor
    kind = given.WhichOneof("value")
    if kind is None:
        return
    listed = getattr(given, kind).values
    if isinstance(listed, bytes):
        data = memoryview(listed)
        yield Stored(name, shape, dtype, len(data), elements(data, dtype, shape), label)
    else:
        array = np.asarray(listed, dtype)
        yield Stored(name, shape, dtype, array.nbytes, array, label)


def _dtype(value: Any) -> str:
    from coremltools.proto import MIL_pb2

    number = value.type.tensorType.dataType
    try:
        name = str(MIL_pb2.DataType.Name(number)).lower()
    except ValueError as error:
        raise ValueError(f"a tensor is of the unknown type {number}") from error
    return name.replace("float8e4m3fn", "float8_e4m3fn").replace("float8e5m2", "float8_e5m2")


def _ends(features: Any) -> list[TensorSpec]:
    from coremltools.proto import FeatureTypes_pb2

    specs = []
    for feature in features:
        array = feature.type.multiArrayType
        kind = FeatureTypes_pb2.ArrayFeatureType.ArrayDataType.Name(array.dataType)
        dtype = {"DOUBLE": "float64"}.get(kind, kind.lower())
        specs.append(TensorSpec(feature.name, tuple(int(n) for n in array.shape), dtype))
    return specs
