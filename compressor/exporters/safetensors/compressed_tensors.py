"""The layout of compressed-tensors: which tensors a quantized weight becomes.

``transformers`` and vLLM read it. Forms of a weight ``[rows, columns]``, by its scheme:

- integers: ``pack-quantized``: codes in words of 32 bits (also those of 8 bits, which is the form
  that vLLM takes for weights alone), the shape, and packed zero points of asymmetric schemes;
- integers of 8 bits whose inputs are rounded, too: ``int-quantized``: codes in place of the weight;
- ``e4m3``: ``float-quantized``: codes in place of the weight;
- ``e2m1``: ``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized``: two codes a byte.

Names and conventions are those of the package compressed-tensors 0.20, which is not needed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from compressor.errors import SpecError
from compressor.models.codec.bit_stream import (
    BITS,
    pack_nibbles,
    pack_words,
    pack_words_down,
    packed_columns,
    whole_words,
)
from compressor.models.codec.headers import STORED_AS
from compressor.models.rounded_inputs import input_tensor_scale
from compressor.types.layers import QuantizedTensor, Scheme, StoredTensor, WeightCodes

_WEIGHT = ".weight"
_MATRIX = 2
SCALE_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "float16m6": torch.float16,
    "bfloat16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.uint8,
}
_FP4_GROUPS = {"e4m3": 16, "e8m0": 32}
_E8M0_BIAS = 127
_BYTE = 8


@dataclass(frozen=True)
class Entry:
    """One of the tensors that a weight is stored as.

    ``row_bits`` of it belong to one row of the weight; 0 where it is not divided among rows.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    row_bits: int = 0

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def offset(self, row: int) -> int:
        """Return the byte at which rows from ``row`` on start: a multiple of :func:`row_multiple`.

        0 where the tensor is not divided among rows.
        """
        return row * self.row_bits // _BYTE


def row_multiple(scheme: Scheme) -> int:
    """Return the multiple of rows at which blocks may start: zero points are packed along rows."""
    return whole_words(scheme.bits) if packs_zero_points(scheme) else 1


def stored_entries(tensor: StoredTensor) -> tuple[Entry, ...]:
    """Describe what a tensor is stored as: itself, or codes and what belongs to them.

    Raises:
        SpecError: the layout has no form for it.
    """
    if tensor.codes is None:
        return (_kept_entry(tensor),)
    scheme = tensor.codes.scheme
    problem = _problem(tensor, scheme)
    if problem:
        raise SpecError(
            f"layer {tensor.name.removesuffix(_WEIGHT)!r}",
            f"{problem}, which compressed-tensors cannot store",
            "skip the layer by a rule, or export another layout",
        )
    return (*_weight_entries(tensor, scheme), *_input_entries(tensor))


def _input_entries(tensor: StoredTensor) -> tuple[Entry, ...]:
    """Describe what is stored about a layer's inputs."""
    inputs = None if tensor.codes is None else tensor.codes.inputs
    base = tensor.name.removesuffix(_WEIGHT)
    if inputs is None or not inputs.calibrated:
        return ()
    if inputs.static:
        return (Entry(f"{base}.input_scale", tensor.dtype, (1,)),)
    return (Entry(f"{base}.input_global_scale", torch.float32, (1,)),)


def _weight_entries(tensor: StoredTensor, scheme: Scheme) -> tuple[Entry, ...]:
    rows, columns = tensor.shape
    base = tensor.name.removesuffix(_WEIGHT)
    groups = 1 if scheme.granularity == "tensor" else scheme.groups(columns)
    scale_dtype = SCALE_DTYPES[scheme.scale_type]
    if scheme.granularity == "tensor":
        scale = Entry(f"{base}.weight_scale", scale_dtype, (1,))
    else:
        bits = groups * scale_dtype.itemsize * _BYTE
        scale = Entry(f"{base}.weight_scale", scale_dtype, (rows, groups), bits)
    if unpacked(tensor):
        stored = torch.float8_e4m3fn if scheme.element == "e4m3" else torch.int8
        return Entry(tensor.name, stored, (rows, columns), columns * _BYTE), scale
    packed = f"{base}.weight_packed"
    if scheme.element == "e2m1":
        codes = Entry(packed, torch.uint8, (rows, columns // 2), columns * scheme.bits)
        whole = Entry(f"{base}.weight_global_scale", torch.float32, (1,))
        return (codes, scale, whole) if scheme.scale_type == "e4m3" else (codes, scale)
    words = packed_columns(columns, scheme.bits)
    codes = Entry(packed, torch.int32, (rows, words), words * 4 * _BYTE)
    shape = Entry(f"{base}.weight_shape", torch.int64, (_MATRIX,))
    if scheme.symmetric:
        return codes, scale, shape
    zero_point = f"{base}.weight_zero_point"
    if scheme.granularity == "tensor":
        return codes, scale, shape, Entry(zero_point, torch.int8, (1,))
    packed_rows = packed_columns(rows, scheme.bits)
    zeros = Entry(zero_point, torch.int32, (packed_rows, groups), groups * scheme.bits)
    return codes, scale, shape, zeros


def unpacked(tensor: StoredTensor) -> bool:
    """Return whether codes take the weight's own place, a byte each.

    So do integers that are multiplied with integers.
    """
    codes = tensor.codes
    return codes is not None and (codes.scheme.element == "e4m3" or _multiplied(codes))


def _multiplied(codes: WeightCodes) -> bool:
    return codes.scheme.element == "int" and codes.inputs is not None


def _kept_entry(tensor: StoredTensor) -> Entry:
    if tensor.dtype not in STORED_AS:
        raise SpecError(
            f"tensor {tensor.name!r}",
            f"is {str(tensor.dtype).removeprefix('torch.')}, which safetensors cannot store",
            "cast it to another type, or leave out this export",
        )
    rows = tensor.shape[0] if tensor.shape else 1
    row_bits = _BYTE * tensor.float_nbytes // rows if rows else 0
    return Entry(tensor.name, tensor.dtype, tensor.shape, row_bits)


def stored_tensors(tensor: StoredTensor, codes: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Compute the tensors stored in place of a quantized weight.

    Args:
        codes: its codes, or those of a block of its rows that starts at a multiple of
            :func:`row_multiple`. The bytes of a block's tensors belong at :meth:`Entry.offset` of
            the entry of that name.

    Returns:
        Contiguous tensors in the order and with the dtypes of :func:`stored_entries`.

    Raises:
        SpecError: as :func:`stored_entries`.
    """
    scheme = codes.scheme
    made: dict[str, torch.Tensor] = {}
    for entry in stored_entries(tensor):
        match entry.name.rpartition(".")[2]:
            case "weight":
                value = codes.codes
            case "weight_packed" if scheme.element == "e2m1":
                value = pack_nibbles(codes.codes)
            case "weight_packed":
                value = pack_words(codes.codes, scheme.bits)
            case "weight_scale":
                value = _stored_scale(codes)
            case "weight_global_scale":
                if codes.tensor_scale is None:
                    raise ValueError(f"{tensor.name}: nvfp4 codes come with a tensor_scale")
                # The layout stores what weights were multiplied with before they were rounded.
                value = 1 / codes.tensor_scale.to(torch.float32).reshape(1)
            case "input_scale":
                assert tensor.codes is not None and tensor.codes.inputs is not None  # noqa: PT018
                value = torch.tensor([tensor.codes.inputs.scale])
            case "input_global_scale":
                assert tensor.codes is not None and tensor.codes.inputs is not None  # noqa: PT018
                value = 1 / input_tensor_scale(tensor.codes.inputs)
            case "weight_shape":
                value = torch.tensor(tensor.shape, dtype=torch.int64)
            case _:
                value = _stored_zero_point(codes)
        # A view of a single column counts as contiguous, and is yet no view of bytes.
        made[entry.name] = value.to(entry.dtype).flatten().view(value.shape)
    return made


def _problem(tensor: StoredTensor, scheme: Scheme) -> str:
    """Return why the layout cannot hold a weight; empty where it can."""
    layer = tensor.codes.layer if tensor.codes is not None else None
    if not tensor.name.endswith(_WEIGHT):
        return f"its parameter is called {tensor.name.rpartition('.')[2]!r}, not 'weight'"
    if len(tensor.shape) != _MATRIX or (layer is not None and layer.transposed):
        return "its weight is not a matrix of output channels by inputs"
    if scheme.element == "e2m1":
        group = _FP4_GROUPS.get(scheme.scale_type)
        fits = scheme.granularity == "group" and scheme.group == group
        return "" if fits else f"its scheme is {scheme}"
    biased = scheme.symmetric and not scheme.signed
    floats = scheme.scale_type in ("float32", "float16", "float16m6", "bfloat16")
    if scheme.bits not in BITS or biased or not floats:
        return f"its scheme is {scheme} with scales of {scheme.scale_type}"
    return ""


def packs_zero_points(scheme: Scheme) -> bool:
    """Return whether zero points are stored in words, which run along rows."""
    return scheme.element == "int" and not scheme.symmetric and scheme.granularity != "tensor"


def _stored_scale(codes: QuantizedTensor) -> torch.Tensor:
    scale = codes.scale
    if codes.scheme.scale_type == "e8m0":
        return torch.frexp(scale).exponent + (_E8M0_BIAS - 1)
    return scale.reshape(1) if codes.scheme.granularity == "tensor" else scale


def _stored_zero_point(codes: QuantizedTensor) -> torch.Tensor:
    scheme, zero_point = codes.scheme, codes.zero_point
    if scheme.granularity != "tensor":
        return pack_words_down(zero_point, scheme.bits)
    # One that is not packed is signed, as codes are once they are unpacked.
    offset = 0 if scheme.signed else 1 << (scheme.bits - 1)
    return zero_point.to(torch.int16).reshape(1) - offset
