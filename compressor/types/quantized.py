"""Quantized tensors: codes with their scales and zero points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from compressor.types.layers import Layer

Granularity = Literal["tensor", "channel", "group", "rows"]
Element = Literal["int", "e4m3", "e2m1", "codebook"]
ScaleType = Literal["float32", "float16", "bfloat16", "e4m3", "e8m0"]

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the eight positive codes of ``e2m1`` mean; the fourth bit is the sign.

OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3.
"""
_LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
_SCALE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "e4m3": 8, "e8m0": 8}


@dataclass(frozen=True)
class Scheme:
    """How numbers are represented.

    Attributes:
        bits: width of a code.
        symmetric: the zero point is 0.
        signed: codes are signed.
        granularity: one scale a tensor, a row (output channel), or a group of columns; one
            codebook a tensor or a group of ``rows``.
        group: columns in a group, for granularity ``group``; rows, for ``rows``.
        element: what a code is: an integer, a float of 8 bits (``e4m3``, without infinities) or
            of 4 (``e2m1``), or a place in a ``codebook``.
        scale_type: the type in which scales, or numbers of codebooks, are stored; their values
            are rounded to it.
        narrow: symmetric signed integers leave out ``-2^(bits-1)``, as runtimes want for
            products of two integers.
    """

    bits: int
    symmetric: bool = True
    signed: bool = True
    granularity: Granularity = "channel"
    group: int | None = None
    element: Element = "int"
    scale_type: ScaleType = "float32"
    narrow: bool = True

    def __str__(self) -> str:
        span = f"group {self.group}" if self.granularity == "group" else self.granularity
        if self.element == "codebook":
            return f"cluster{self.bits}/" + (f"rows {self.group}" if self.group else "tensor")
        if self.element == "e4m3":
            return f"fp8-e4m3/{span}"
        if self.element == "e2m1":
            return f"{'nvfp4' if self.scale_type == 'e4m3' else 'mxfp4'}/{span}"
        kind = ("int" if self.signed else "uint") + str(self.bits)
        return f"{kind}/{span}" + ("" if self.symmetric else " asym")

    @property
    def low(self) -> int:
        """Smallest code of an integer scheme."""
        if not self.signed:
            return 0
        return -(1 << (self.bits - 1)) + (1 if self.symmetric and self.narrow else 0)

    @property
    def high(self) -> int:
        """Largest code of an integer scheme."""
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1

    @property
    def largest(self) -> float:
        """Largest value of a code: 448 for ``e4m3``, 6 for ``e2m1``."""
        return float(self.high) if self.element == "int" else _LARGEST[self.element]

    def groups(self, columns: int) -> int:
        """Scales in a row of so many columns."""
        return columns // self.group if self.granularity == "group" and self.group else 1

    def codebooks(self, rows: int) -> int:
        """Codebooks of a matrix of so many rows; the last one may be for fewer."""
        return -(-rows // self.group) if self.granularity == "rows" and self.group else 1

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of packed codes, scales and zero points, or codebooks, of a matrix."""
        if self.element == "codebook":
            numbers = self.codebooks(rows) << self.bits
            held = rows * columns * self.bits + numbers * _SCALE_BITS[self.scale_type]
            return -(-held // 8)
        scales = 1 if self.granularity == "tensor" else rows * self.groups(columns)
        bits = rows * columns * self.bits + scales * _SCALE_BITS[self.scale_type]
        bits += 0 if self.symmetric else scales * self.bits
        return -(-bits // 8) + (4 if self.scale_type == "e4m3" else 0)


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized weight in canonical form.

    Attributes:
        codes: ``[rows, columns]``, one code an element: int8 (uint8 for unsigned schemes),
            float8_e4m3fn for ``e4m3``, uint8 from 0 to 15 for ``e2m1`` (the sign is bit 3), and
            uint8 for codebooks.
        scale: ``[rows, groups]`` or ``[1, 1]``, float32 that holds values of the scale's type;
            ``groups`` is 1 unless grouped.
        zero_point: like ``scale``, in the dtype of integer codes; zeros for float elements.
        scheme: what the numbers mean.
        tensor_scale: a number that all scales are multiplied with, float32 without axes; nvfp4
            has one, whose scales of groups are themselves 8 bits wide.
        codebook: for element ``codebook`` what the codes mean, float32
            ``[codebooks, 2 ** bits]``, each for ``group`` rows or for all; scales are 1.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor
    scheme: Scheme
    tensor_scale: torch.Tensor | None = None
    codebook: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """Return what the codes mean before they are scaled, float32 ``[rows, columns]``."""
        if self.codebook is not None:
            rows, size = self.codes.shape[0], self.codebook.shape[1]
            first = torch.arange(rows) // (self.scheme.group or max(rows, 1)) * size
            places = self.codes.to(torch.int64) + first[:, None]
            return self.codebook.flatten()[places]
        if self.scheme.element != "e2m1":
            return self.codes.to(torch.float32)
        table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
        return table[self.codes.to(torch.int64)]

    def dequantize(self) -> torch.Tensor:
        """Return ``(codes - zero_point) * scale`` as float32 ``[rows, columns]``."""
        rows, columns = self.codes.shape
        groups = self.scale.shape[1]
        values = self.values().reshape(rows, groups, columns // groups)
        scale = self.scale if self.tensor_scale is None else self.scale * self.tensor_scale
        if not self.scheme.symmetric:
            values = values - self.zero_point.to(torch.float32)[:, :, None]
        return (values * scale[:, :, None]).reshape(rows, columns)


@dataclass(frozen=True, eq=False)
class WeightCodes:
    """A layer's weight that is to be stored as codes, found when they are wanted.

    Attributes:
        layer: whose weight it is.
        scheme: what :attr:`compute` returns.
        compute: takes the float weight in canonical form and the dtype it has in the model, and
            returns its codes; pure, so it may be called again.
        by_rows: ``compute`` may be given some of the rows at a time: the codes of a row depend
            on nothing else.
    """

    layer: Layer
    scheme: Scheme
    compute: Callable[[torch.Tensor], QuantizedTensor]
    by_rows: bool = False
