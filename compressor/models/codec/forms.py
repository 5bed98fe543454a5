"""Forms in which a tensor lies in a safetensors file: chosen, encoded, and decoded.

The graph alone decides for narrow codes. Zeros are counted when a weight is read, so sparse forms
are chosen while it is written. ``docs/safetensors-format.md`` describes all forms for other
readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compressor.errors import ArtifactError, SpecError
from compressor.graph.values import INTEGER_CODES
from compressor.models.codec.bit_stream import pack_bits, stream_bytes, unpack_bits
from compressor.models.codec.headers import DTYPES
from compressor.models.codec.sparse import (
    GROUP,
    bitmask,
    fits_groups,
    from_bitmask,
    from_group_values,
    group_values,
)
from compressor.models.element_types import TORCH_DTYPES, from_numpy
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

_SIGNED = frozenset({ir.DataType.INT8, ir.DataType.INT4, ir.DataType.INT2})
_BYTES = "U8"
_BYTE = 8
_PACKED = {dtype: max(1, _BYTE // dtype.bitwidth) for dtype in STORED}  # looked up at every opening
_PLACE_BITS = 2
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_LEAST_ELEMENTS = 1024  # of a tensor that may become sparse: smaller ones are not worth a mask
_LEAST_AXES = 2
_WORTH = 0.9  # of the bytes at most, so that decoding pays
_REGULAR = 1.05  # times the bytes of a mask that groups may take: they decode faster
_FAULT = "the pass that made it is at fault; report it"

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
    """How a tensor is stored; the form ``None`` has all elements, packed if below a byte."""

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

    def decode(self, name: str, stored: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor that :func:`encoded` stored.

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
                places = unpack_bits(stored[indices], _PLACE_BITS, values.numel()).numpy()
                groups = self._typed(from_group_values(_words(values), places, n))
                moved = [d for i, d in enumerate(self.shape) if i != axis] + [self.shape[axis]]
                return groups.view(moved).movedim(-1, axis).contiguous()
        if self.dtype in INTEGER_CODES:
            codes = unpack_bits(values, self.width, self.count, self.dtype in _SIGNED)
            return codes.view(self.shape)
        return from_numpy(ir.PackedTensor(values.numpy(), self.dtype, shape=self.shape))

    def _typed(self, elements: Array) -> Tensor:
        return torch.from_numpy(elements).view(TORCH_DTYPES[self.dtype])


def _words(values: Tensor) -> Array:
    """Return elements as unsigned integers of the same size."""
    words = values.view(_WORDS[values.itemsize]).numpy()
    return words.view(np.dtype(f"u{values.itemsize}"))


@dataclass(frozen=True)
class Planned:
    """A tensor before it is written.

    Attributes:
        entry: how it is stored unless it turns out to be sparse.
        sparse: the names of mask and of indices, if it may be stored as sparse.
    """

    name: str
    entry: Entry
    sparse: tuple[str, str] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes, those of all elements where it may be sparse."""
        parts = self.entry.parts(self.name).values()
        return sum(prod(part.shape or ()) * DTYPES[part.dtype].itemsize for part in parts)


def plan_tensors(
    tensors: Mapping[str, ir.TensorProtocol], widths: Mapping[str, int], sparse: bool
) -> tuple[Planned, ...]:
    """Choose the forms of a graph's tensors, except those that depend on the values.

    Args:
        widths: bits of the codes that have fewer than their type.
        sparse: tensors may be stored as sparse.

    Raises:
        SpecError: safetensors does not hold a tensor's element type.
    """
    planned, taken = [], set(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED:
            raise SpecError(
                f"tensor {name!r}",
                f"is {tensor.dtype.name.lower()}, which safetensors does not hold",
                "cast it to another type, or leave out this export",
            )
        entry = Entry(tensor.dtype, tuple(int(d) for d in tensor.shape.numpy()))
        width = widths.get(name, entry.width)
        if tensor.dtype in INTEGER_CODES and width < entry.width:
            entry = replace(entry, form=Bits(width))
        names = None
        if sparse and _may_be_sparse(entry):
            names = (_free(f"{name}.mask", taken), _free(f"{name}.indices", taken))
        planned.append(Planned(name, entry, names))
    return tuple(planned)


def _may_be_sparse(entry: Entry) -> bool:
    numbers = not entry.decoded and entry.dtype not in (ir.DataType.BOOL, ir.DataType.COMPLEX64)
    return numbers and len(entry.shape) >= _LEAST_AXES and entry.count >= _LEAST_ELEMENTS


def _free(name: str, taken: set[str]) -> str:
    """Return a name that no tensor has, and take it."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def encoded(planned: Planned, tensor: ir.TensorProtocol) -> tuple[Entry, dict[str, Array]]:
    """Evaluate a tensor and bring it into the smallest form that fits.

    Returns:
        How it is stored, and the elements of its parts by name, its own first.

    Raises:
        ArtifactError: it has not the bytes that its type and shape take, or wider codes than the
            graph says.
    """
    name, entry = planned.name, planned.entry
    if isinstance(entry.form, Bits):
        return entry, {name: _narrow(name, entry, tensor)}
    data = tensor.tobytes()
    if len(data) != tensor.nbytes:
        raise ArtifactError(
            f"tensor {name!r}",
            f"has {len(data)} bytes, its type and shape take {tensor.nbytes}",
            _FAULT,
        )
    smaller = None
    if planned.sparse is not None:
        elements = np.frombuffer(data, f"<u{entry.width // 8}")
        smaller = _sparse(name, entry, planned.sparse, elements)
    return smaller or (entry, {name: np.frombuffer(data, np.uint8)})


def _narrow(name: str, entry: Entry, tensor: ir.TensorProtocol) -> Array:
    signed = entry.dtype in _SIGNED
    codes = np.asarray(tensor.numpy()).astype(np.int8 if signed else np.uint8)
    low, span = (-(1 << entry.width - 1) if signed else 0), 1 << entry.width
    if (
        codes.shape != entry.shape
        or codes.min(initial=low) < low
        or codes.max(initial=low) >= low + span
    ):
        raise ArtifactError(
            f"tensor {name!r}",
            f"is {list(codes.shape)} with codes from {codes.min(initial=0)} to "
            f"{codes.max(initial=0)}, not {list(entry.shape)} of {entry.width} bits",
            _FAULT,
        )
    return pack_bits(torch.from_numpy(codes), entry.width).numpy()


def _sparse(
    name: str, entry: Entry, beside: tuple[str, str], elements: Array
) -> tuple[Entry, dict[str, Array]] | None:
    """Store a tensor as sparse if that is smaller.

    Args:
        beside: the names of its mask and of its indices.
        elements: all of them, unsigned integers ``[count]``.
    """
    mask, indices = beside
    size, count = elements.itemsize, int(np.count_nonzero(elements))
    masked = count * size + elements.size // 8
    best = min(masked * _REGULAR, elements.nbytes * _WORTH)
    for n in (1, 2):
        kept = elements.size // GROUP * n
        if count > kept or kept * size + kept * _PLACE_BITS // 8 > best:
            continue
        # N:M weights have their groups along the input channels, which come second or first.
        for axis in (axis for axis in (1, 0) if entry.shape[axis] % GROUP == 0):
            moved = np.moveaxis(elements.reshape(entry.shape), axis, -1).reshape(-1, GROUP)
            if fits_groups(moved, n):
                values, places = group_values(moved, n)
                stored = pack_bits(torch.from_numpy(places), _PLACE_BITS).numpy()
                return replace(entry, form=NOfM(n, axis, indices)), {name: values, indices: stored}
    if masked > elements.nbytes * _WORTH:
        return None
    bits, values = bitmask(elements)
    return replace(entry, form=Bitmask(mask)), {name: values, mask: bits}
