"""Reload a compressed model: ``model.json`` and ``model.safetensors``, memory-mapped, no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir
import torch
from safetensors import SafetensorError, safe_open

from compressor.carriers.torch_graph import GraphModule, from_numpy
from compressor.errors import ModelError, SpecError
from compressor.graph.as_json import graph_from_json

DESCRIPTION = "model.json"
WEIGHTS = "model.safetensors"
FORMAT = "compressor"
SCHEMA = 1

STORED: dict[ir.DataType, str] = {
    ir.DataType.FLOAT: "F32",
    ir.DataType.DOUBLE: "F64",
    ir.DataType.FLOAT16: "F16",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.INT8: "I8",
    ir.DataType.INT16: "I16",
    ir.DataType.INT32: "I32",
    ir.DataType.INT64: "I64",
    ir.DataType.UINT8: "U8",
    ir.DataType.UINT16: "U16",
    ir.DataType.UINT32: "U32",
    ir.DataType.UINT64: "U64",
    ir.DataType.BOOL: "BOOL",
    ir.DataType.COMPLEX64: "C64",
    ir.DataType.FLOAT8E4M3FN: "F8_E4M3",
    ir.DataType.FLOAT8E5M2: "F8_E5M2",
    ir.DataType.FLOAT8E4M3FNUZ: "F8_E4M3FNUZ",
    ir.DataType.FLOAT8E5M2FNUZ: "F8_E5M2FNUZ",
    ir.DataType.FLOAT8E8M0: "F8_E8M0",
    ir.DataType.INT4: "U8",
    ir.DataType.UINT4: "U8",
    ir.DataType.INT2: "U8",
    ir.DataType.UINT2: "U8",
    ir.DataType.FLOAT4E2M1: "U8",
}
"""How each element type is stored in safetensors; those narrower than a byte are packed."""

_BY_NAME = {dtype.numpy().name: dtype for dtype in STORED}
_EDITED = "it was edited or damaged; export the model again"


def load(path: str | Path, *, device: str = "cpu", mmap: bool = True) -> torch.nn.Module:
    """Load a compressed model as a module in evaluation mode.

    Nothing is unpickled and no code of the model's author runs. Weights stay in the file until an
    operator reads them, and quantized layers stay quantized in memory (4-bit codes take a byte
    each there).

    Args:
        path: the directory that holds ``model.json``, or that file.
        device: where the weights go; anything but ``cpu`` reads them at once.
        mmap: map the file. Without, all weights are read at once and the file may go away.

    Returns:
        A module that takes the model's inputs by position or name, and returns its outputs by
        name.

    Raises:
        SpecError: there is no such device.
        ModelError: a file is missing, cut, of another schema, or does not fit the other one.
    """
    file = Path(path)
    if file.is_dir():
        file /= DESCRIPTION
    description = _read_description(file)
    model = graph_from_json(description.graph, description.subject)
    _check_graph(model, description)
    tensors = _read_weights(file.parent / description.weights, description, mmap)
    module = GraphModule(model, tensors).eval()
    if device == "cpu":
        return module
    try:
        return module.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise SpecError(f"device {device!r}", f"is not usable ({reason})", "use cpu") from error


@dataclass(frozen=True)
class Entry:
    """What ``model.json`` says of one tensor."""

    dtype: ir.DataType
    shape: tuple[int, ...]

    @property
    def packed(self) -> int:
        """Elements in a byte."""
        return max(1, 8 // self.dtype.bitwidth)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the file: that of the bytes, for packed elements."""
        if self.packed == 1:
            return self.shape
        return (-(-int(np.prod(self.shape, dtype=np.int64)) // self.packed),)

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        value: dict[str, Any] = {"dtype": self.dtype.numpy().name, "shape": list(self.shape)}
        if self.packed > 1:
            value["packed"] = self.packed
        return value


@dataclass(frozen=True)
class Description:
    """The content of ``model.json``, checked."""

    subject: str
    graph: Mapping[str, Any]
    tensors: Mapping[str, Entry]
    weights: str


def _read_description(path: Path) -> Description:
    subject = f"model {str(path)!r}"
    if not path.is_file():
        raise ModelError(
            subject, "does not exist", "give a directory that a safetensors export wrote"
        )
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(
            subject, f"is not JSON ({type(error).__name__}: {error})", _EDITED
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        _fail(subject, f'is not a compressed model (no "format": "{FORMAT}")')
    if document.get("schema") != SCHEMA:
        raise ModelError(
            subject,
            f"has schema {document.get('schema')!r}, this version reads {SCHEMA}",
            "export the model again, or install the version that wrote it",
        )
    graph, tensors, weights = (document.get(k) for k in ("graph", "tensors", "weights"))
    if not isinstance(graph, dict) or not isinstance(tensors, dict):
        _fail(subject, "lacks its graph or its tensors")
    if not isinstance(weights, str) or Path(weights).name != weights:
        _fail(subject, f"names the weights {weights!r}, which is not a file beside it")
    entries = {name: _entry(name, value, subject) for name, value in tensors.items()}
    return Description(subject, graph, entries, weights)


def _entry(name: str, value: Any, subject: str) -> Entry:
    fields = value if isinstance(value, dict) else {}
    dtype, shape = _BY_NAME.get(str(fields.get("dtype"))), fields.get("shape")
    if dtype is None or not isinstance(shape, list):
        _fail(subject, f"does not say the dtype and shape of {name!r}")
    if not all(type(length) is int and length >= 0 for length in shape):
        _fail(subject, f"gives {name!r} the shape {shape!r}")
    entry = Entry(dtype, tuple(shape))
    if fields.get("packed", 1) != entry.packed:
        _fail(subject, f"packs {fields.get('packed')!r} elements of {name!r} in a byte")
    return entry


def _check_graph(model: ir.Model, description: Description) -> None:
    """Check that the graph and the list of tensors agree."""
    initializers = model.graph.initializers
    for name in initializers.keys() ^ description.tensors.keys():
        _fail(description.subject, f"has {name!r} in its graph or its list of tensors, not in both")
    for name, entry in description.tensors.items():
        value = initializers[name].const_value
        if value is None or value.dtype != entry.dtype or _shape(value) != entry.shape:
            _fail(description.subject, f"describes {name!r} differently in its graph")


def _shape(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(int(d) for d in tensor.shape.numpy())


def _read_weights(path: Path, description: Description, mmap: bool) -> dict[str, torch.Tensor]:
    subject = f"weights {str(path)!r}"
    if not path.is_file():
        raise ModelError(subject, "do not exist", "copy the file beside model.json")
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            _check_stored(stored, description, subject)
            tensors = {name: file.get_tensor(name) for name in description.tensors}
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            subject, f"cannot be read ({error})", "the file is cut or damaged; copy it again"
        ) from error
    for name, entry in description.tensors.items():
        if entry.packed > 1:
            tensors[name] = _unpacked(tensors[name], entry, name)
        elif not mmap:
            tensors[name] = tensors[name].clone()
    return tensors


def _check_stored(stored: Mapping[str, Any], description: Description, subject: str) -> None:
    remedy = "it belongs to another model.json; export the model again"
    for name, entry in description.tensors.items():
        if name not in stored:
            raise ModelError(subject, f"lack the tensor {name!r}", remedy)
        have = (stored[name].get_dtype(), tuple(stored[name].get_shape()))
        want = (STORED[entry.dtype], entry.stored_shape)
        if have != want:
            raise ModelError(
                subject,
                f"hold {name!r} as {have[0]}{list(have[1])}, not {want[0]}{list(want[1])}",
                remedy,
            )
    extra = sorted(stored.keys() - description.tensors.keys())
    if extra:
        raise ModelError(subject, f"hold {extra[0]!r}, which the model does not have", remedy)


def _unpacked(data: torch.Tensor, entry: Entry, name: str) -> torch.Tensor:
    packed = ir.PackedTensor(data.numpy(), entry.dtype, shape=entry.shape, name=name)
    return from_numpy(packed)


def _fail(subject: str, problem: str) -> NoReturn:
    raise ModelError(subject, problem, _EDITED)
