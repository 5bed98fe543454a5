"""Quantized tensors: integer codes with their scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Granularity = Literal["tensor", "channel", "group"]


@dataclass(frozen=True)
class Scheme:
    """How numbers are represented.

    Attributes:
        bits: width of a code.
        symmetric: the zero point is 0.
        signed: codes are signed.
        granularity: one scale a tensor, a row (output channel), or a group of columns.
        group: columns in a group, for granularity ``group``.
    """

    bits: int
    symmetric: bool = True
    signed: bool = True
    granularity: Granularity = "channel"
    group: int | None = None

    def __str__(self) -> str:
        kind = ("int" if self.signed else "uint") + str(self.bits)
        span = f"group {self.group}" if self.granularity == "group" else self.granularity
        return f"{kind}/{span}" + ("" if self.symmetric else " asym")

    @property
    def low(self) -> int:
        """Smallest code. Symmetric signed schemes leave out ``-2^(bits-1)``."""
        if not self.signed:
            return 0
        return -(1 << (self.bits - 1)) + (1 if self.symmetric else 0)

    @property
    def high(self) -> int:
        """Largest code."""
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized weight in canonical form.

    Attributes:
        codes: ``[rows, columns]``, int8 (uint8 for unsigned schemes), one code an element.
        scale: ``[rows, groups]`` or ``[1, 1]``, float32; ``groups`` is 1 unless grouped.
        zero_point: like ``scale``, in the dtype of ``codes``.
        scheme: what the numbers mean.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor
    scheme: Scheme

    def dequantize(self) -> torch.Tensor:
        """Return ``(codes - zero_point) * scale`` as float32 ``[rows, columns]``."""
        rows, columns = self.codes.shape
        groups = self.scale.shape[1]
        codes = self.codes.reshape(rows, groups, columns // groups).to(torch.float32)
        zero = self.zero_point.to(torch.float32)[:, :, None]
        return ((codes - zero) * self.scale[:, :, None]).reshape(rows, columns)
