"""Which form a tensor of a graph is stored in, and its bytes in that form.

What is known of the graph decides for narrow codes. Zeros are known only once a weight has been
read, so sparse forms are chosen while it is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx_ir as ir
import torch

from compressor.errors import ArtifactError, SpecError
from compressor.models.codec import STORED, Entry
from compressor.models.codec.bit_stream import pack_bits
from compressor.models.codec.forms import INTEGERS, Bitmask, Bits, NOfM, Part
from compressor.models.codec.sparse import GROUP, bitmask, fits_groups, group_values
from compressor.types.tensors import Array

_LEAST_ELEMENTS = 1024  # of a tensor that may become sparse: smaller ones are not worth a mask
_LEAST_AXES = 2
_WORTH = 0.9  # of the bytes at most, so that decoding pays
_REGULAR = 1.05  # times the bytes of a mask that groups may take: they decode faster
_PLACE_BITS = 2
_FAULT = "the pass that made it is at fault; report it"


@dataclass(frozen=True)
class Planned:
    """A tensor before it is written.

    Attributes:
        name: the tensor.
        entry: how it is stored unless it turns out to be sparse.
        sparse: the names of mask and of indices, if it may be stored as sparse.
    """

    name: str
    entry: Entry
    sparse: tuple[str, str] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes, those of all elements where it may be sparse."""
        return sum(part_bytes(part) for part in self.entry.parts(self.name).values())


@dataclass(frozen=True)
class Encoded:
    """A tensor as it is written.

    Attributes:
        name: the tensor.
        entry: its form.
        parts: the elements of what is stored, by name; the first has the tensor's name.
    """

    name: str
    entry: Entry
    parts: Mapping[str, Array]

    def shapes(self) -> dict[str, Part]:
        """Return the types and shapes of the parts, all of which are known now."""
        return {
            own: part if part.shape is not None else Part(part.dtype, self.parts[own].shape)
            for own, part in self.entry.parts(self.name).items()
        }


def plan_tensors(
    tensors: Mapping[str, ir.TensorProtocol], widths: Mapping[str, int], sparse: bool
) -> dict[str, Planned]:
    """Choose forms as far as that can be done without reading a tensor.

    Args:
        tensors: those of a graph, by name.
        widths: bits of the codes that have fewer than their type.
        sparse: tensors may be stored as sparse.

    Raises:
        SpecError: safetensors does not hold a tensor's element type.
    """
    planned, taken = {}, set(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED:
            raise SpecError(
                f"tensor {name!r}",
                f"is {tensor.dtype.name.lower()}, which safetensors does not hold",
                "cast it to another type, or leave out this export",
            )
        entry = Entry(tensor.dtype, tuple(int(d) for d in tensor.shape.numpy()))
        width = widths.get(name, entry.width)
        if tensor.dtype in INTEGERS and width < entry.width:
            entry = replace(entry, form=Bits(width))
        names = None
        if sparse and _may_be_sparse(entry):
            names = (_free(f"{name}.mask", taken), _free(f"{name}.indices", taken))
        planned[name] = Planned(name, entry, names)
    return planned


def encoded(planned: Planned, tensor: ir.TensorProtocol) -> Encoded:
    """Evaluate a tensor and bring it into its form, the smallest one that fits.

    Raises:
        ArtifactError: it has not the bytes that its type and shape want, or wider codes than the
            graph says.
    """
    name, entry = planned.name, planned.entry
    if isinstance(entry.form, Bits):
        return Encoded(name, entry, {name: _narrow(name, entry, tensor)})
    data = tensor.tobytes()
    if len(data) != tensor.nbytes:
        raise ArtifactError(
            f"tensor {name!r}",
            f"has {len(data)} bytes, its type and shape take {tensor.nbytes}",
            _FAULT,
        )
    if planned.sparse is not None:
        elements = np.frombuffer(data, f"<u{entry.width // 8}")
        found = _sparse(planned, elements)
        if found is not None:
            return found
    return Encoded(name, entry, {name: np.frombuffer(data, np.uint8)})


def part_bytes(part: Part) -> int:
    """Return the bytes of a part whose shape is known."""
    return prod(part.shape or ()) * _ITEMSIZE[part.dtype]


_ITEMSIZE = {name: max(1, dtype.bitwidth // 8) for dtype, name in STORED.items()}


def _may_be_sparse(entry: Entry) -> bool:
    numbers = not entry.decoded and entry.dtype not in (ir.DataType.BOOL, ir.DataType.COMPLEX64)
    return numbers and len(entry.shape) >= _LEAST_AXES and entry.count >= _LEAST_ELEMENTS


def _free(name: str, taken: set[str]) -> str:
    """Return a name that no tensor has, and take it."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _narrow(name: str, entry: Entry, tensor: ir.TensorProtocol) -> Array:
    signed = entry.dtype in (ir.DataType.INT8, ir.DataType.INT4, ir.DataType.INT2)
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


def _sparse(planned: Planned, elements: Array) -> Encoded | None:
    """Store a tensor as sparse if that is smaller."""
    assert planned.sparse is not None
    entry, (mask, indices) = planned.entry, planned.sparse
    size, values = elements.itemsize, int(np.count_nonzero(elements))
    masked = values * size + elements.size // 8
    best = min(masked * _REGULAR, elements.nbytes * _WORTH)
    for n in (1, 2):
        kept = elements.size // GROUP * n
        if values > kept or kept * size + kept * _PLACE_BITS // 8 > best:
            continue
        for axis in _group_axes(entry.shape):
            moved = np.moveaxis(elements.reshape(entry.shape), axis, -1).reshape(-1, GROUP)
            if fits_groups(moved, n):
                own, places = group_values(moved, n)
                stored = pack_bits(torch.from_numpy(places), _PLACE_BITS).numpy()
                form = NOfM(n, axis, indices)
                parts = {planned.name: own, indices: stored}
                return Encoded(planned.name, replace(entry, form=form), parts)
    if masked > elements.nbytes * _WORTH:
        return None
    bits, own = bitmask(elements)
    parts = {planned.name: own, mask: bits}
    return Encoded(planned.name, replace(entry, form=Bitmask(mask)), parts)


def _group_axes(shape: Collection[int]) -> list[int]:
    """Return the axes along which N:M weights may lie: input channels come second or first."""
    return [axis for axis in (1, 0) if list(shape)[axis] % GROUP == 0]
