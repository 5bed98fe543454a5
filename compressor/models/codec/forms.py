"""Forms in which a tensor lies in a safetensors file, and the way back.

``docs/safetensors-format.md`` describes them for other readers.
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

from compressor.models.codec.bit_stream import stream_bytes, unpack_bits
from compressor.models.codec.sparse import GROUP, from_bitmask, from_group_values
from compressor.models.executor import from_numpy
from compressor.models.executor.dtypes import TORCH_DTYPES
from compressor.types.tensors import Array

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

INTEGERS = frozenset(
    {
        *(ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4),
        *(ir.DataType.INT2, ir.DataType.UINT2),
    }
)
"""Element types whose codes may be stored in fewer bits."""

_BYTES = "U8"
_BYTE = 8
_PACKED = {dtype: max(1, _BYTE // dtype.bitwidth) for dtype in STORED}  # asked at every opening
_PLACE_BITS = 2
_WORDS: Mapping[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}
_SIGNED = frozenset({ir.DataType.INT8, ir.DataType.INT4, ir.DataType.INT2})

Shape = tuple[int, ...]


class Part(NamedTuple):
    """One of the tensors in the file that a tensor of the model is stored as.

    Attributes:
        dtype: its element type, as safetensors calls it.
        shape: its shape; ``None`` for a single axis of a length that only the file knows.
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
    """The elements that are not zero, and beside them a mask.

    Attributes:
        mask: the mask's name in the file.
    """

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
    """What ``model.json`` says of one tensor.

    Attributes:
        dtype: its element type.
        shape: its shape.
        form: how it is stored; ``None`` for all of its elements, those narrower than a byte
            packed.
    """

    dtype: ir.DataType
    shape: Shape
    form: Form | None = None

    @property
    def packed(self) -> int:
        """Elements of this type in a byte."""
        return _PACKED[self.dtype]

    @property
    def count(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def beside(self) -> str | None:
        """The name in the file of what lies beside the values."""
        match self.form:
            case Bitmask(mask):
                return mask
            case NOfM(indices=indices):
                return indices
        return None

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
                places = stream_bytes(values, _PLACE_BITS)
                return {name: Part(whole, (values,)), indices: Part(_BYTES, (places,))}
        if self.decoded:
            return {name: Part(_BYTES, (stream_bytes(self.count, self.width),))}
        return {name: Part(whole, self.shape)}

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        value: dict[str, Any] = {"dtype": self.dtype.numpy().name, "shape": list(self.shape)}
        match self.form:
            case Bits(width):
                value |= {"form": "bits", "bits": width}
            case Bitmask(mask):
                value |= {"form": "bitmask", "mask": mask}
            case NOfM(n, axis, indices):
                value |= {"form": "n-of-m", "n": n, "m": GROUP, "axis": axis, "indices": indices}
            case None if self.packed > 1:
                value["packed"] = self.packed
        return value

    def decode(self, name: str, stored: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor that was stored so.

        Args:
            name: the tensor.
            stored: its parts, flat.

        Raises:
            ValueError: a part contradicts another one.
        """
        own = stored[name]
        match self.form:
            case Bitmask(mask):
                elements = from_bitmask(stored[mask].numpy(), _words(own), self.count)
                return self._typed(elements).view(self.shape)
            case NOfM(n, axis, indices):
                places = unpack_bits(stored[indices], _PLACE_BITS, own.numel()).numpy()
                groups = self._typed(from_group_values(_words(own), places, n))
                moved = [d for i, d in enumerate(self.shape) if i != axis] + [self.shape[axis]]
                return groups.view(moved).movedim(-1, axis).contiguous()
        if self.dtype in INTEGERS:
            codes = unpack_bits(own, self.width, self.count, self.dtype in _SIGNED)
            return codes.view(self.shape)
        return from_numpy(ir.PackedTensor(own.numpy(), self.dtype, shape=self.shape))

    def _typed(self, elements: Array) -> Tensor:
        return torch.from_numpy(elements).view(TORCH_DTYPES[self.dtype])


def _words(values: Tensor) -> Array:
    """Return elements as unsigned integers of the same size."""
    words = values.view(_WORDS[values.itemsize]).numpy()
    return words.view(np.dtype(f"u{values.itemsize}"))
