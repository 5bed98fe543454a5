"""Layers and their weights: in a form that all carriers share, as codes, and as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite, log10, prod
from typing import Literal

import torch

from compressor.errors import not_finite
from compressor.types.rounded_inputs import InputScheme

LayerKind = Literal["Conv", "ConvTranspose", "Gemm", "MatMul", "Gather", "LSTM", "GRU", "RNN"]
CONVOLUTION: LayerKind = "Conv"
LINEAR: LayerKind = "MatMul"
TABLE: LayerKind = "Gather"
"""The kinds of layer that a bare checkpoint is taken to hold."""
LSTM: LayerKind = "LSTM"
RECURRENT: tuple[LayerKind, ...] = (LSTM, "GRU", "RNN")

Granularity = Literal["tensor", "channel", "group", "rows"]
Element = Literal["int", "e4m3", "e2m1", "codebook"]
ScaleType = Literal["float32", "float16", "float16m6", "bfloat16", "e4m3", "e8m0"]
"""``float16m6`` is float16 with the last 4 of its 10 bits of mantissa zero.

Its product with a zero point of 4 bits is a number of float16.
"""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the eight positive codes of ``e2m1`` mean; the fourth bit is the sign.

OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3.
"""
_LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
_SUMMED_AT_ONCE = 1 << 18
_SCALE_BITS = {"float32": 32, "e4m3": 8, "e8m0": 8}  # all others take 16


@dataclass(frozen=True)
class Layer:
    """One weight and how it is stored.

    The canonical form of a weight is a matrix: its rows are output channels, and its columns
    everything that is summed over. Algorithms see only that form; :meth:`canonical` and
    :meth:`stored` convert.

    Attributes:
        name: the parameter's path without ``.weight``; the same on every carrier.
        kind: the operator that reads the weight.
        weight: the parameter's (initializer's) name.
        shape: the stored shape.
        dtype: the stored numpy dtype name.
        transposed: whether the stored matrix has the summed axis first; a recurrent layer has a
            matrix for each direction.
        groups: number of channel groups of a convolution.
        bias: the bias parameter's name, if there is one.
        inputs: names of the graph values that the layer reads, weight excluded.
        output: the graph value that the layer writes.
        node: the graph node's name, by which rules may refer to the layer.
    """

    name: str
    kind: LayerKind
    weight: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    transposed: bool = False
    groups: int = 1
    bias: str | None = None
    inputs: tuple[str, ...] = ()
    output: str = ""
    node: str = field(default="", compare=False)

    @property
    def is_table(self) -> bool:
        """Whether the layer is a lookup table, such as an embedding."""
        return self.kind == "Gather"

    @property
    def is_recurrent(self) -> bool:
        """Whether the layer is recurrent: weight ``[directions, gates * hidden, columns]``."""
        return self.kind in RECURRENT

    @property
    def is_linear(self) -> bool:
        """Whether the layer is a product of matrices."""
        return self.kind in ("Gemm", "MatMul")

    @property
    def is_convolution(self) -> bool:
        """Whether the layer is a convolution, transposed or not."""
        return self.kind in ("Conv", "ConvTranspose")

    @property
    def is_transposed_convolution(self) -> bool:
        """Whether the layer is a transposed convolution."""
        return self.kind == "ConvTranspose"

    @property
    def bias_is_separate(self) -> bool:
        """Whether the operator has no bias input, so that another node adds the bias."""
        return self.kind == "MatMul"

    @property
    def rows(self) -> int:
        """Number of output channels (for an embedding: of table rows)."""
        if self.is_transposed_convolution:
            return self.shape[1] * self.groups
        if self.is_recurrent:
            return self.shape[0] * self.shape[2 if self.transposed else 1]
        return self.shape[-1] if self.transposed else self.shape[0]

    @property
    def columns(self) -> int:
        """Number of weights in the sum of one output value."""
        return self.parameters // self.rows

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return prod(self.shape)

    @property
    def output_axis(self) -> int:
        """The axis of the stored weight that runs over output channels (of one group)."""
        if self.is_transposed_convolution or (self.is_recurrent and not self.transposed):
            return 1
        return len(self.shape) - 1 if self.transposed else 0

    @property
    def rows_first(self) -> bool:
        """Whether the stored weight's first axis is the canonical form's, its rows."""
        return not (self.is_transposed_convolution or self.is_recurrent or self.transposed)

    def canonical(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ``weight`` (stored shape) as a matrix ``[rows, columns]``.

        Raises:
            ValueError: the tensor has another shape.
        """
        if tuple(weight.shape) != self.shape:
            raise ValueError(f"{self.weight}: shape {tuple(weight.shape)} is not {self.shape}")
        if self.is_transposed_convolution:
            per_group = self.shape[0] // self.groups
            split = weight.reshape(self.groups, per_group, self.shape[1], -1)
            return split.transpose(1, 2).reshape(self.rows, self.columns)
        if self.transposed and self.is_recurrent:
            return weight.transpose(1, 2).reshape(self.rows, -1)
        if self.transposed:
            return weight.reshape(-1, self.rows).T
        return weight.reshape(self.rows, -1)

    def stored(self, matrix: torch.Tensor) -> torch.Tensor:
        """Invert :meth:`canonical`."""
        if self.is_transposed_convolution:
            per_group = self.shape[0] // self.groups
            split = matrix.reshape(self.groups, self.shape[1], per_group, -1)
            return split.transpose(1, 2).reshape(self.shape).contiguous()
        if self.transposed and self.is_recurrent:
            directions, columns, rows = self.shape
            return matrix.reshape(directions, rows, columns).transpose(1, 2).contiguous()
        if self.transposed:
            return matrix.T.reshape(self.shape).contiguous()
        return matrix.reshape(self.shape).contiguous()


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
        paired: positions of a kernel, 1 for a product, if no pair of codes may overflow on x86
            CPUs without VNNI.
        signed_scale: scales of symmetric integers may be negative. There is one code more below
            zero than above, and so each group has it on the side where it needs it.
    """

    bits: int
    symmetric: bool = True
    signed: bool = True
    granularity: Granularity = "channel"
    group: int | None = None
    element: Element = "int"
    scale_type: ScaleType = "float32"
    narrow: bool = True
    paired: int | None = None
    signed_scale: bool = False

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
        """Bytes of packed codes, scales and zero points, or codebooks, of a matrix.

        >>> Scheme(bits=4, granularity="group", group=32).nbytes(rows=16, columns=64)
        640
        """
        if self.element == "codebook":
            numbers = self.codebooks(rows) << self.bits
            held = rows * columns * self.bits + numbers * _SCALE_BITS.get(self.scale_type, 16)
            return -(-held // 8)
        scales = 1 if self.granularity == "tensor" else rows * self.groups(columns)
        bits = rows * columns * self.bits + scales * _SCALE_BITS.get(self.scale_type, 16)
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
    """Codes that a layer's weight is stored as, computed on demand.

    Attributes:
        layer: the layer of the weight.
        scheme: the scheme of the codes.
        compute: takes the float weight in canonical form and the dtype it has in the model, and
            returns its codes; pure, so it may be called repeatedly.
        by_rows: whether the codes of a row depend on that row alone, so that ``compute`` accepts
            some of the rows.
        inputs: how the layer's inputs are rounded; ``None`` if they are not.
    """

    layer: Layer
    scheme: Scheme
    compute: Callable[[torch.Tensor], QuantizedTensor]
    by_rows: bool = False
    inputs: InputScheme | None = None

    @classmethod
    def known(cls, layer: Layer, codes: QuantizedTensor) -> WeightCodes:
        """Return codes that are already computed."""
        return cls(layer, codes.scheme, lambda _: codes)

    def read(self, weight: Callable[[Layer], torch.Tensor]) -> QuantizedTensor:
        """Compute the codes; ``weight`` returns a layer's float weight in its stored shape."""
        return self.compute(self.layer.canonical(weight(self.layer)))


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A parameter or buffer of a checkpoint, read on demand.

    Attributes:
        name: its name in the checkpoint.
        shape: its shape.
        dtype: its element type, such as ``torch.bfloat16``.
        read: returns the float tensor; a view of the file where it is memory-mapped.
        codes: the codes stored in its place, if it is quantized.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    codes: WeightCodes | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def float_nbytes(self) -> int:
        """Bytes of the elements as floats, even if codes are stored instead."""
        return self.elements * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes as stored; codes are packed."""
        if self.codes is None:
            return self.float_nbytes
        layer = self.codes.layer
        return self.codes.scheme.nbytes(layer.rows, layer.columns)


def sqnr_db(reference: torch.Tensor, approximation: torch.Tensor) -> float | None:
    """Return the signal to noise ratio, ``10 log10(Σ reference² / Σ (reference - approx)²)``.

    >>> round(sqnr_db(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])), 1)
    20.0

    Returns:
        Decibels; ``None`` where the error or the signal is zero.

    Raises:
        ValueError: shapes differ or a value is not finite.
    """
    if reference.shape != approximation.shape:
        raise ValueError(f"shapes {tuple(reference.shape)} and {tuple(approximation.shape)} differ")
    signal = noise = 0.0
    before, after = reference.reshape(-1), approximation.reshape(-1)
    for start in range(0, before.numel(), _SUMMED_AT_ONCE):
        exact = before[start : start + _SUMMED_AT_ONCE].to(torch.float64)
        signal += float(exact.square().sum())
        noise += float((exact - after[start : start + _SUMMED_AT_ONCE]).square().sum())
    if not isfinite(signal + noise):
        raise ValueError("a value is not finite")
    return None if noise == 0 or signal == 0 else 10 * log10(signal / noise)


def check_finite(layer: Layer, matrix: torch.Tensor) -> None:
    """Raise :class:`ModelError` if a layer's weight holds NaN or infinite values."""
    if not bool(torch.isfinite(matrix).all()):
        raise not_finite(f"layer {layer.name!r}", "its weight holds values")
