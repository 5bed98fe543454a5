"""Random quantized weights of every scheme, and the graphs that they are put into."""

from __future__ import annotations

import torch

from compressor.types.layers import Layer, QuantizedTensor, Scheme

_CODE_DTYPES = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8}


def random_codes(layer: Layer, scheme: Scheme, seed: int = 0) -> QuantizedTensor:
    """Return codes over the scheme's whole range, the two ends included, for a layer's weight."""
    rows, columns = layer.rows, layer.columns
    noise = torch.Generator().manual_seed(seed)
    shape = (1, 1) if scheme.granularity == "tensor" else (rows, scheme.groups(columns))
    scale = torch.rand(shape, generator=noise) * 0.01 + 0.005
    if scheme.signed_scale:
        scale[1::2] *= -1
    zero = torch.zeros(shape, dtype=torch.int8 if scheme.signed else torch.uint8)
    if scheme.element == "e4m3":
        codes = (torch.randn(rows, columns, generator=noise) * 100).to(torch.float8_e4m3fn)
    elif scheme.element == "e2m1":
        codes = torch.randint(0, 16, (rows, columns), generator=noise, dtype=torch.uint8)
    else:
        span = (scheme.low, scheme.high + 1)
        codes = torch.randint(*span, (rows, columns), generator=noise).to(zero.dtype)
        codes[0, 0], codes[0, 1] = scheme.low, scheme.high
        if not scheme.symmetric:
            zero = torch.randint(*span, shape, generator=noise).to(zero.dtype)
    tensor_scale = None
    if scheme.scale_type == "e8m0":
        scale = torch.exp2(torch.log2(scale).round())
    elif scheme.scale_type == "e4m3":
        scale = (scale * 1000).to(torch.float8_e4m3fn).to(torch.float32)
        tensor_scale = torch.tensor(0.000_73)
    elif scheme.scale_type != "float32":
        scale = scale.to(getattr(torch, scheme.scale_type)).to(torch.float32)
    return QuantizedTensor(codes, scale, zero, scheme, tensor_scale)


def group(bits: int, size: int, **fields: object) -> Scheme:
    return Scheme(bits, granularity="group", group=size, **fields)  # type: ignore[arg-type]


UNSIGNED = {"signed": False, "symmetric": False}
SCHEMES = [
    Scheme(8, narrow=False),
    Scheme(8, granularity="tensor"),
    Scheme(8, symmetric=False),
    group(8, 32, narrow=False),
    Scheme(4, narrow=False),
    group(4, 32, narrow=False, signed_scale=True),
    group(4, 16, **UNSIGNED),
    Scheme(3, narrow=False),
    group(3, 16, **UNSIGNED),
    group(2, 32, narrow=False, signed_scale=True),
    group(2, 16, **UNSIGNED),
    Scheme(2, **UNSIGNED),  # type: ignore[arg-type]
    Scheme(8, element="e4m3"),
    Scheme(8, element="e4m3", granularity="tensor"),
    group(8, 32, element="e4m3"),
    group(4, 32, element="e2m1", scale_type="e8m0"),
    group(4, 16, element="e2m1", scale_type="e4m3"),
    group(4, 16, element="e2m1"),
]
"""One of each kind, for weights of 64 columns."""

FORMS: dict[str, tuple[str, tuple[int, int]]] = {
    "matmul": ("y = MatMul(x, fc.weight)", (64, 48)),
    "linear": ("t = Transpose<perm = [1, 0]>(fc.weight) y = MatMul(x, t)", (48, 64)),
    "gemm": ("y = Gemm(x, fc.weight)", (64, 48)),
    "gemm-transB": ("y = Gemm<transB = 1>(x, fc.weight)", (48, 64)),
}
"""The ways in which a matrix of 48 rows and 64 columns is multiplied with."""


def text(form: str, dtype: str = "float") -> str:
    return f"g ({dtype}[n, 64] x) => ({dtype}[n, 48] y) {{ {FORMS[form][0]} }}"
