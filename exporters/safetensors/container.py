"""The safetensors container, written one tensor at a time.

The library's own writer wants all tensors in memory; here a model larger than memory is written
from tensors that are computed as they are asked for. The library reads the result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from compressor.errors import ArtifactError
from compressor.loading import STORED, Entry

_ALIGNMENT = 8


def ordered(tensors: Mapping[str, ir.TensorProtocol]) -> list[str]:
    """Return the names in file order: wide elements first, so that all are aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.bitwidth, name))


def header(tensors: Mapping[str, ir.TensorProtocol], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the data: the length of a JSON object, and it, padded."""
    content: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name in ordered(tensors):
        tensor = tensors[name]
        entry = entry_of(tensor)
        content[name] = {
            "dtype": STORED[entry.dtype],
            "shape": list(entry.stored_shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


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
    with path.open("wb") as stream:
        stream.write(header(tensors, metadata))
        for name in ordered(tensors):
            data = tensors[name].tobytes()
            if len(data) != tensors[name].nbytes:
                raise ArtifactError(
                    f"tensor {name!r}",
                    f"has {len(data)} bytes, its type and shape take {tensors[name].nbytes}",
                    "the pass that made it is at fault; report it",
                )
            stream.write(data)
