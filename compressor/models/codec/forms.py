"""Forms in which a tensor lies in a safetensors file, and what the files beside it are called.

``docs/safetensors-format.md`` describes all of it for other readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compressor.graph.values import INTEGER_CODES
from compressor.models.codec.bit_stream import stream_bytes, unpack_bits
from compressor.models.codec.headers import STORED_AS
from compressor.models.codec.sparse import GROUP, from_bitmask, from_group_values
from compressor.models.element_types import TORCH_DTYPES, from_numpy
from compressor.types.tensors import Array

DESCRIPTION = "model.json"
FORMAT = "compressor"
SCHEMA = 1

DIGEST = "description"
"""The note in a file that holds the sha256 of ``model.json``."""

WRITER = "version"
"""The note in a file that holds the version that wrote it."""

CHECKSUM = "crc32"
"""The key in a tensor's entry of ``model.json`` that holds the checksum of its bytes."""

FILES = "files"
"""The key in ``model.json`` for the hashes of the files beside it.

A file of weights is hashed without the hash of ``model.json``, which could not hold its own: first
the data, then the header with zeros in that place.
"""

STORED = {
    dtype: "U8" if dtype.bitwidth < 8 else STORED_AS[held]
    for dtype, held in TORCH_DTYPES.items()
    if held in STORED_AS and dtype.bitwidth != 6  # which do not fill bytes
}
"""How each element type is stored in safetensors; those narrower than a byte are packed."""

SIGNED = frozenset({ir.DataType.INT8, ir.DataType.INT4, ir.DataType.INT2})
_BYTES = "U8"
_BYTE = 8
_PACKED = {dtype: max(1, _BYTE // dtype.bitwidth) for dtype in STORED}  # looked up at every opening
PLACE_BITS = 2
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Shape = tuple[int, ...]


class Part(NamedTuple):
    """One of the tensors in the file that a tensor of the model is stored as.

    The shape is ``None`` for a single axis of a length that only the file knows.
    """

    dtype: str
    shape: Shape | None


@dataclass(frozen=True)
class Bits:
    """A stream of codes that have fewer bits than their type."""

    width: int

    def __str__(self) -> str:
        return f"{self.width}-bit codes"


@dataclass(frozen=True)
class Bitmask:
    """The elements that are not zero, and beside them a mask of that name in the file."""

    mask: str

    def __str__(self) -> str:
        return "bitmask"


@dataclass(frozen=True)
class NOfM:
    """In each group of four elements a fixed number of values, and their places.

    Attributes:
        n: values in a group, 1 or 2.
        axis: the axis along which groups lie: it is brought to the end, then elements are counted.
        indices: the name of the places in the file.
    """

    n: int
    axis: int
    indices: str

    def __str__(self) -> str:
        return f"{self.n}:{GROUP} along axis {self.axis}"


Form = Bits | Bitmask | NOfM


@dataclass(frozen=True)
class Entry:
    """How a tensor is stored; the form ``None`` has all elements, packed if below a byte.

    Attributes:
        checksum: the CRC-32 of its parts in the file; empty where an earlier version wrote it.
    """

    dtype: ir.DataType
    shape: Shape
    form: Form | None = None
    checksum: str = ""

    @property
    def packed(self) -> int:
        """Elements of this type in a byte."""
        return _PACKED[self.dtype]

    @property
    def count(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def decoded(self) -> bool:
        """Whether what lies in the file has to be decoded."""
        return self.form is not None or _PACKED[self.dtype] > 1

    @property
    def width(self) -> int:
        """Bits of an element in the file, values of sparse tensors included."""
        return self.form.width if isinstance(self.form, Bits) else self.dtype.bitwidth

    def parts(self, name: str) -> dict[str, Part]:
        """Return what is stored of the tensor of this name, by the names in the file."""
        whole = STORED[self.dtype]
        match self.form:
            case Bitmask(mask):
                return {
                    name: Part(whole, None),
                    mask: Part(_BYTES, (stream_bytes(self.count, 1),)),
                }
            case NOfM(n, _, indices):
                values = self.count // GROUP * n
                places = stream_bytes(values, PLACE_BITS)
                return {name: Part(whole, (values,)), indices: Part(_BYTES, (places,))}
        if self.decoded:
            return {name: Part(_BYTES, (stream_bytes(self.count, self.width),))}
        return {name: Part(whole, self.shape)}

    def as_json(self) -> dict[str, Any]:
        """Return the entry as ``model.json`` has it."""
        fields: dict[str, Any] = {"dtype": self.dtype.numpy().name, "shape": list(self.shape)}
        match self.form:
            case Bits(width):
                fields |= {"form": "bits", "bits": width}
            case Bitmask(mask):
                fields |= {"form": "bitmask", "mask": mask}
            case NOfM(n, axis, indices):
                fields |= {"form": "n-of-m", "n": n, "m": GROUP, "axis": axis, "indices": indices}
            case None if self.packed > 1:
                fields["packed"] = self.packed
        return {**fields, CHECKSUM: self.checksum} if self.checksum else fields

    def decode(self, name: str, stored: Mapping[str, Tensor]) -> Tensor:
        """Return a tensor from what is stored of it.

        Args:
            stored: its parts, flat.

        Raises:
            ValueError: a part contradicts another one.
        """
        values = stored[name]
        match self.form:
            case Bitmask(mask):
                elements = from_bitmask(stored[mask].numpy(), _words(values), self.count)
                return self._typed(elements).view(self.shape)
            case NOfM(n, axis, indices):
                places = unpack_bits(stored[indices], PLACE_BITS, values.numel()).numpy()
                groups = self._typed(from_group_values(_words(values), places, n))
                moved = [d for i, d in enumerate(self.shape) if i != axis] + [self.shape[axis]]
                return groups.view(moved).movedim(-1, axis).contiguous()
        if self.dtype in INTEGER_CODES:
            codes = unpack_bits(values, self.width, self.count, self.dtype in SIGNED)
            return codes.view(self.shape)
        return from_numpy(ir.PackedTensor(values.numpy(), self.dtype, shape=self.shape))

    def _typed(self, elements: Array) -> Tensor:
        return torch.from_numpy(elements).view(TORCH_DTYPES[self.dtype])


def _words(values: Tensor) -> Array:
    """Return elements as unsigned integers of the same size."""
    words = values.view(_WORDS[values.itemsize]).numpy()
    return words.view(np.dtype(f"u{values.itemsize}"))
