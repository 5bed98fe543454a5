"""The header of a safetensors file: where each tensor goes, before any of them is written.

The library's own writer wants all tensors in memory; here a model larger than memory is written
from tensors that are computed as they are asked for. The library reads the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_ALIGNMENT = 8
_LENGTH = 8  # bytes that say how long the header is


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


def layout(tensors: Iterable[Described], metadata: Mapping[str, str], room: int = 0) -> Layout:
    """Give each tensor its place: wide elements first, so that all are aligned, then by name.

    Args:
        tensors: what will be in the file.
        metadata: its notes.
        room: bytes that the header takes at least; spaces fill it up.
    """
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
    text += b" " * max(-len(text) % _ALIGNMENT, room - _LENGTH - len(text))
    header = len(text).to_bytes(_LENGTH, "little") + text
    offsets = {name: len(header) + start for name, start in starts.items()}
    return Layout(header, offsets, len(header) + end)
