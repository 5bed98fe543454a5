"""Resampling of signals and images, and Fourier transforms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.executor.node import (
    Host,
    Ints,
    Operator,
    Read,
    Table,
    along,
    integers,
    one_of,
    positive,
    settings,
)
from compressor.models.executor.ops.reference import BY_REFERENCE
from compressor.models.executor.ops.shapes import rows_of

# Resizing, one axis after the other.


_MODE = one_of("nearest", "linear", "cubic")
_COORDINATES = one_of(
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
)
_NEAREST = one_of("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


@dataclass(frozen=True)
class _Method:
    """The attributes of ``Resize``."""

    mode: str = _MODE
    coordinate_transformation_mode: str = _COORDINATES
    nearest_mode: str = _NEAREST
    cubic_coeff_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False


_METHOD: Any = settings(_Method)


def _resize(
    x: Tensor,
    _: Host | None = None,
    scales: Host | None = None,
    sizes: Host | None = None,
    *,
    method: _Method = _METHOD,
    axes: Ints = None,
) -> Tensor:
    over = positive(range(x.dim()) if axes is None else axes, x.dim())
    lengths = [x.shape[axis] for axis in over]
    if sizes is not None and sizes.numel():
        results = integers(sizes)
        factors = [size / length for length, size in zip(lengths, results, strict=True)]
    elif scales is not None and scales.numel():
        factors = scales.tolist()
        # In float32, as runtimes multiply: 3 x 5/3 is 5 there, and below it in float64.
        results = [int(length * scale) for length, scale in zip(lengths, scales, strict=True)]
    else:
        raise ValueError("neither scales nor sizes are given")
    for axis, length, result, scale in zip(over, lengths, results, factors, strict=True):
        if result != length or scale != 1.0:
            x = _resize_axis(x, axis, (result, scale), method)
    return x


def _positions(length: int, result: int, scale: float, coordinates: str) -> Tensor:
    """Return where each row of the result lies among the rows of the input.

    In ``float32``, as ONNX Runtime computes them: near a tie the type decides who is nearest.
    """
    rows = torch.arange(result, dtype=torch.float32)
    if coordinates == "align_corners":
        return rows * (length - 1) / max(result - 1, 1)
    if coordinates == "asymmetric":
        return rows / scale
    if coordinates == "tf_half_pixel_for_nn":
        return (rows + 0.5) / scale
    if coordinates == "pytorch_half_pixel" and result <= 1:
        return torch.zeros_like(rows)
    positions = (rows + 0.5) / scale - 0.5
    if coordinates == "half_pixel_symmetric":
        return length / 2 * (1 - result / (scale * length)) + positions
    return positions


def _nearest_rows(positions: Tensor, mode: str) -> Tensor:
    if mode == "floor":
        return positions.floor()
    if mode == "ceil":
        return positions.ceil()
    if mode == "round_prefer_floor":
        return (positions - 0.5).ceil()
    return (positions + 0.5).floor()


def _taps(positions: Tensor, length: int, scale: float, method: _Method) -> tuple[Tensor, Tensor]:
    """Return which rows each row of the result is made of, and their weights.

    Antialiasing stretches the filter over the rows that a row of the result stands for.
    """
    stretch = max(1.0, 1.0 / scale) if method.antialias else 1.0
    reach = (2 if method.mode == "cubic" else 1) * stretch
    first = (positions - reach).floor() + 1
    rows = first[:, None] + torch.arange(math.ceil(2 * reach) + (stretch > 1))
    distance = ((rows - positions[:, None]) / stretch).abs()
    if method.mode == "cubic":
        weights = _cubic(distance, method.cubic_coeff_a)
    else:
        weights = torch.clamp(1 - distance, min=0)
    if method.exclude_outside:
        weights = torch.where((rows < 0) | (rows >= length), 0, weights)
    if method.exclude_outside or stretch > 1:
        weights = weights / weights.sum(1, keepdim=True)
    return rows.to(torch.int64).clamp(0, length - 1), weights


def _cubic(distance: Tensor, a: float) -> Tensor:
    """Keys' cubic convolution kernel, "Cubic convolution interpolation" (1981), equation 4."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, 0))


def _resize_axis(x: Tensor, axis: int, change: tuple[int, float], method: _Method) -> Tensor:
    """Resize one axis to a length by a factor, which it may be only close to."""
    (result, scale), length = change, x.shape[axis]
    positions = _positions(length, result, scale, method.coordinate_transformation_mode)
    if method.mode == "nearest":
        rows = _nearest_rows(positions, method.nearest_mode).to(torch.int64)
        return rows_of(x, axis, rows.clamp(0, length - 1))
    exact = x if x.is_floating_point() else x.to(torch.float32)
    total = torch.zeros_like(exact.narrow(axis, 0, 1))
    rows, weights = _taps(positions, length, scale, method)
    for sources, weight in zip(rows.t(), weights.t(), strict=True):
        part = exact.index_select(axis, sources.to(x.device))
        total = total + part * along(weight.to(exact), axis, x.dim())
    return total if x.is_floating_point() else torch.round(total).to(x.dtype)


# Places between pixels.

_INTERPOLATIONS = {
    "linear": "bilinear",
    "bilinear": "bilinear",
    "nearest": "nearest",
    "cubic": "bicubic",
    "bicubic": "bicubic",
}
_INTERPOLATION = one_of(*_INTERPOLATIONS)
_PADDING = one_of("zeros", "border", "reflection")


def _grid_sample(
    x: Tensor,
    grid: Tensor,
    *,
    mode: str = _INTERPOLATION,
    padding_mode: str = _PADDING,
    align_corners: bool = False,
) -> Tensor:
    return functional.grid_sample(x, grid, _INTERPOLATIONS[mode], padding_mode, align_corners)


# Fourier transforms; complex numbers are pairs in the last axis.

# An attribute before opset 20, an input since.
_AXIS: Any = Read(lambda node, _: node.read("axis", "int", 1 if node.opset < 20 else -2))


def _dft(
    x: Tensor,
    length: Host | None = None,
    given: Host | None = None,
    *,
    inverse: bool = False,
    onesided: bool = False,
    axis: int = _AXIS,
) -> Tensor:
    over = axis if given is None else int(given.item())
    over = over if over >= 0 else over + 1  # the pairs do not count as an axis
    size = None if length is None else int(length.item())
    pairs = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x[..., 0]
    if not onesided:
        transform = torch.fft.ifft if inverse else torch.fft.fft
        return torch.view_as_real(transform(pairs, n=size, dim=over))
    if inverse:
        real: Tensor = torch.fft.irfft(pairs, n=size, dim=over)
        return real.unsqueeze(-1)
    return torch.view_as_real(torch.fft.rfft(x[..., 0], n=size, dim=over))


SIGNAL: Table = {
    "DFT": Operator(_dft),
    "GridSample": Operator(_grid_sample),
    "Resize": Operator(_resize, otherwise=BY_REFERENCE),
}
