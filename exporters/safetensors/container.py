"""The safetensors container, written one tensor at a time.

The library's own writer wants all tensors in memory; here a model larger than memory is written
from tensors that are computed as they are asked for. The library reads the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from compressor.errors import ArtifactError
from compressor.loading import STORED, Entry

_ALIGNMENT = 8


@dataclass(frozen=True)
class Described:
    """What a header says of a tensor.

    Attributes:
        name: the tensor.
        dtype: its element type, as safetensors calls it.
        shape: its shape.
        bits: of an element.
        nbytes: of the whole.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bits: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """A file before it is written.

    Attributes:
        header: the bytes before the data.
        offsets: the byte of the file at which each tensor starts, by name, in their order.
        nbytes: size of the file.
    """

    header: bytes
    offsets: Mapping[str, int]
    nbytes: int


def layout(tensors: Iterable[Described], metadata: Mapping[str, str]) -> Layout:
    """Give each tensor its place: wide elements first, so that all are aligned, then by name."""
    content: dict[str, object] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda t: (-t.bits, t.name)):
        starts[tensor.name] = end
        content[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + start for name, start in starts.items()}
    return Layout(header, offsets, len(header) + end)


def model_layout(tensors: Mapping[str, ir.TensorProtocol], metadata: Mapping[str, str]) -> Layout:
    """Lay out the tensors of a graph."""
    described = []
    for name, tensor in tensors.items():
        entry = entry_of(tensor)
        described.append(
            Described(
                name,
                STORED[entry.dtype],
                entry.stored_shape,
                tensor.dtype.bitwidth,
                tensor.nbytes,
            )
        )
    return layout(described, metadata)


def header(tensors: Mapping[str, ir.TensorProtocol], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the data."""
    return model_layout(tensors, metadata).header


def entry_of(tensor: ir.TensorProtocol) -> Entry:
    """Describe a tensor as ``model.json`` does."""
    return Entry(tensor.dtype, tuple(int(d) for d in tensor.shape.numpy()))


def write(
    path: Path, tensors: Mapping[str, ir.TensorProtocol], metadata: Mapping[str, str]
) -> None:
    """Write the file, evaluating one tensor after another.

    Raises:
        ArtifactError: a tensor has not the bytes that its type and shape want.
    """
    placed = model_layout(tensors, metadata)
    with path.open("wb") as stream:
        stream.write(placed.header)
        for name in placed.offsets:
            data = tensors[name].tobytes()
            if len(data) != tensors[name].nbytes:
                raise ArtifactError(
                    f"tensor {name!r}",
                    f"has {len(data)} bytes, its type and shape take {tensors[name].nbytes}",
                    "the pass that made it is at fault; report it",
                )
            stream.write(data)
