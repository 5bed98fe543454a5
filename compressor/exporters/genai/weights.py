"""Weights of a decoder as initializers: codes in the blocks of ``MatMulNBits``, or floats.

Nothing is computed before an initializer is written, and then some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx_ir as ir
import torch

from compressor.errors import SpecError, not_finite
from compressor.exporters.onnx.matmul_nbits import Compute, Packing, block_of, has_kernel
from compressor.models.element_types import natural_type
from compressor.types.layers import Layer, QuantizedTensor, Scheme, StoredTensor
from compressor.types.tensors import Array

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CHUNK = 1 << 22  # elements that are computed at once
_STORED_BITS = {2: 2, 3: 4, 4: 4, 8: 8}  # by bits of a code, those that it is stored in
_TABLE_BITS = (4, 8)  # of codes in a table of which rows are looked up
_SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point")


@dataclass(frozen=True, eq=False)
class Codes:
    """Weights of equal inputs, stacked along their rows, as blocks of codes.

    Attributes:
        name: of the product, in front of the initializers' own names.
        sources: the weights, from top to bottom.
        packing: of all of them together.
        has_zeros: zero points are stored; otherwise they are half of the range of codes.
    """

    name: str
    sources: tuple[StoredTensor, ...]
    packing: Packing
    has_zeros: bool

    def tensors(self) -> dict[str, ir.TensorProtocol]:
        """Return the initializers in the order of the operator's inputs, none evaluated."""
        reading = _Reading(self)
        packing, rows = self.packing, (self.packing.layer.rows, self.packing.blocks)
        shapes = [packing.code_shape, rows, packing.zero_shape]
        types = [ir.DataType.UINT8, ir.DataType.FLOAT, ir.DataType.UINT8]
        made: dict[str, ir.TensorProtocol] = {}
        for index in range(2 + self.has_zeros):
            read = partial(reading.part, index, types[index])
            name = f"{self.name}.{_SUFFIXES[index]}"
            made[name] = ir.LazyTensor(read, types[index], ir.Shape(shapes[index]), name=name)
        return made

    def pieces(self) -> Iterator[tuple[Array, Array, Array]]:
        """Yield packed codes, scales and packed zero points, some rows at a time."""
        for source in self.sources:
            codes = source.codes
            assert codes is not None
            matrix = codes.layer.canonical(source.read())
            step = max(1, _CHUNK // matrix.shape[1]) if codes.by_rows else matrix.shape[0]
            for start in range(0, matrix.shape[0], step):
                yield self._packed(codes.compute(matrix[start : start + step]))

    def _packed(self, found: QuantizedTensor) -> tuple[Array, Array, Array]:
        rows, columns = found.codes.shape
        packing = replace(self.packing, layer=replace(self.packing.layer, shape=(rows, columns)))
        groups = found.scale.shape[1]
        scale = found.scale.expand(rows, groups).numpy()
        zeros = found.zero_point.expand(rows, groups).numpy()
        if not packing.group:
            scale, zeros = scale[:, 0], zeros[:, 0]
        return packing.codes(found.codes.numpy()), packing.scales(scale), packing.zero_points(zeros)


class _Reading:
    """Computes codes once for the initializers that are written one after another."""

    def __init__(self, codes: Codes):
        self._codes = codes
        self._left: dict[int, Array] = {}

    def part(self, index: int, dtype: ir.DataType) -> ir.TensorProtocol:
        """Return packed codes, scales or zero points; each is forgotten as it is given away."""
        if index not in self._left:
            parts = zip(*self._codes.pieces(), strict=True)
            arrays = (np.concatenate(part) for part in parts)
            self._left = dict(zip(range(2 + self._codes.has_zeros), arrays, strict=False))
        return ir.Tensor(np.ascontiguousarray(self._left.pop(index)), dtype=dtype)


def codes_of(name: str, sources: Sequence[StoredTensor], compute: Compute) -> Codes | None:
    """Return how weights are stored together; ``None`` where they cannot be, or are floats.

    Raises:
        SpecError: one is stored as codes for which there is no kernel.
    """
    found = [_one(source, compute) for source in sources]
    first = found[0]
    if first is None or any(each is None or _form(each) != _form(first) for each in found):
        return None
    layer = first.packing.layer
    rows = sum(source.shape[0] for source in sources)
    packing = replace(first.packing, layer=replace(layer, shape=(rows, layer.columns)))
    return Codes(name, tuple(sources), packing, first.has_zeros)


def check_table(codes: Codes) -> None:
    """Check that rows of codes can be looked up.

    Raises:
        SpecError: there is no kernel for them.
    """
    packing = codes.packing
    if packing.bits not in _TABLE_BITS or packing.layer.columns % packing.block:
        raise _refused(codes.sources[0], "has rows of 4 or 8 bits in whole blocks")


def _form(codes: Codes) -> tuple[object, ...]:
    packing = codes.packing
    return packing.layer.columns, packing.bits, packing.block, codes.has_zeros, packing.offset


def _one(source: StoredTensor, compute: Compute) -> Codes | None:
    codes = source.codes
    if codes is None:
        return None
    scheme, layer = codes.scheme, codes.layer
    if codes.inputs is not None:
        raise _refused(source, f"rounds no inputs to {codes.inputs}")
    bits = _STORED_BITS.get(scheme.bits, 0) if scheme.element == "int" else 0
    if not bits or scheme.granularity == "rows" or layer.transposed or len(layer.shape) != 2:
        raise _refused(source, "multiplies with integers of 2, 3, 4 and 8 bits")
    group = (scheme.group or 0) if scheme.granularity == "group" else 0
    block = _block(scheme, layer, group)
    if not has_kernel(bits, block, compute):
        hint = "; set matmul-compute: int8" if has_kernel(bits, block, "int8") else ""
        raise _refused(source, f"computes in {compute} with other widths and groups{hint}")
    offset = 1 << (bits - 1) if scheme.signed else 0
    packing = Packing(layer, bits, block, offset, group)
    return Codes(layer.name, (source,), packing, not (scheme.symmetric and scheme.signed))


def _block(scheme: Scheme, layer: Layer, group: int) -> int:
    """Return the columns of a block; those of a table's rows are cut into whole ones."""
    block = block_of(group, layer.columns)
    while layer.is_table and scheme.granularity != "group" and layer.columns % block:
        block //= 2
    return block


def float_tensors(
    name: str, sources: Sequence[StoredTensor], dtype: torch.dtype | None, plus: float = 0.0
) -> ir.LazyTensor:
    """Return float weights, one above the other, as an initializer that is read as it is written.

    Args:
        dtype: its type in the file; ``None`` is that of the first weight.
        plus: what is added to them.

    Raises:
        ModelError: as it is read, if a value is NaN or infinite.
    """
    stored = dtype or sources[0].dtype
    shape = (sum(source.shape[0] for source in sources), *sources[0].shape[1:])

    def read() -> ir.TensorProtocol:
        parts = [_finite(source).to(stored) for source in sources]
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        values = values + plus if plus else values
        return ir.tensor(values.detach().contiguous(), dtype=natural_type(stored))

    return ir.LazyTensor(read, natural_type(stored), ir.Shape(shape), name=name)


def _finite(source: StoredTensor) -> torch.Tensor:
    values = source.read()
    if not bool(values.isfinite().all()):
        raise not_finite(f"tensor {source.name!r}")
    return values


def check_float(source: StoredTensor) -> None:
    """Check the type of a float weight.

    Raises:
        SpecError: ONNX Runtime does not widen it.
    """
    if source.codes is None and source.dtype not in FLOATS:
        raise SpecError(
            f"tensor {source.name!r}",
            f"is {str(source.dtype).removeprefix('torch.')}, which is not written to ONNX here",
            "cast it to float32",
        )


def _refused(source: StoredTensor, what: str) -> SpecError:
    assert source.codes is not None
    return SpecError(
        f"layer {source.codes.layer.name!r}",
        f"is {source.codes.scheme}, and ONNX Runtime {what}",
        "use preset int4-g32, int4-g128 or int8, or skip the layer by a rule",
    )
