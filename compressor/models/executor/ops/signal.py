"""Resampling of signals and images, and Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from compressor.models.executor.ops.shapes import rows_of

# Resizing, one axis after the other.


@dataclass(frozen=True)
class _Axis:
    """One axis that is resized.

    Attributes:
        axis: which one.
        length: its length before.
        result: its length after.
        scale: the factor, which ``result / length`` approximates.
        start: where the region begins, as a share of the axis.
        end: where it ends.
    """

    axis: int
    length: int
    result: int
    scale: float
    start: float
    end: float


_MODE = one_of("nearest", "linear", "cubic")
_COORDINATES = one_of(
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
    "tf_half_pixel_for_nn",
)
_NEAREST = one_of("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
_POLICY = one_of("stretch", "not_larger", "not_smaller")


@dataclass(frozen=True)
class _Method:
    """What the attributes of ``Resize`` say."""

    mode: str = _MODE
    coordinate_transformation_mode: str = _COORDINATES
    nearest_mode: str = _NEAREST
    cubic_coeff_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    extrapolation_value: float = 0.0


_METHOD: Any = settings(_Method)


def _resize(
    x: Tensor,
    roi: Host | None = None,
    scales: Host | None = None,
    sizes: Host | None = None,
    *,
    method: _Method = _METHOD,
    axes: Ints = None,
    keep_aspect_ratio_policy: str = _POLICY,
) -> Tensor:
    over = positive(range(x.dim()) if axes is None else axes, x.dim())
    cropped = method.coordinate_transformation_mode == "tf_crop_and_resize"
    starts, ends = [0.0] * len(over), [1.0] * len(over)
    if cropped and roi is not None and roi.numel():
        region = roi.tolist()
        starts, ends = region[: len(over)], region[len(over) :]
    lengths = [x.shape[axis] for axis in over]
    if sizes is not None and sizes.numel():
        results, factors = _from_sizes(lengths, integers(sizes), keep_aspect_ratio_policy)
    elif scales is not None and scales.numel():
        factors = scales.tolist()
        shares = [b - a if cropped else 1.0 for a, b in zip(starts, ends, strict=True)]
        parts = zip(lengths, shares, factors, strict=True)
        results = [math.floor(length * share * scale) for length, share, scale in parts]
    else:
        raise ValueError("neither scales nor sizes are given")
    for fields in zip(over, lengths, results, factors, starts, ends, strict=True):
        axis = _Axis(*fields)
        if axis.result != axis.length or axis.scale != 1.0 or cropped:
            x = _resize_axis(x, axis, method)
    return x


def _from_sizes(
    lengths: Sequence[int], sizes: list[int], policy: str
) -> tuple[list[int], list[float]]:
    """Return the lengths of the result and the factors."""
    scales = [size / length for length, size in zip(lengths, sizes, strict=True)]
    if policy == "stretch":
        return sizes, scales
    scale = (min if policy == "not_larger" else max)(scales)
    return [math.floor(scale * length + 0.5) for length in lengths], [scale] * len(lengths)


def _positions(axis: _Axis, coordinates: str) -> Tensor:
    """Return where each row of the result lies among the rows of the input.

    In ``float32``, as ONNX Runtime computes them: near a tie the type decides who is nearest.
    """
    rows = torch.arange(axis.result, dtype=torch.float32)
    last = axis.length - 1
    if coordinates == "align_corners":
        return rows * last / (axis.result - 1) if axis.result > 1 else torch.zeros_like(rows)
    if coordinates == "asymmetric":
        return rows / axis.scale
    if coordinates == "tf_half_pixel_for_nn":
        return (rows + 0.5) / axis.scale
    if coordinates == "tf_crop_and_resize":
        if axis.result > 1:
            return axis.start * last + rows * ((axis.end - axis.start) * last / (axis.result - 1))
        return torch.full_like(rows, 0.5 * (axis.start + axis.end) * last)
    if coordinates == "pytorch_half_pixel" and axis.result <= 1:
        return torch.zeros_like(rows)
    positions = (rows + 0.5) / axis.scale - 0.5
    if coordinates == "half_pixel_symmetric":
        adjustment = axis.result / (axis.scale * axis.length)
        return axis.length / 2 * (1 - adjustment) + positions
    return positions


def _nearest_rows(positions: Tensor, mode: str) -> Tensor:
    if mode == "floor":
        return positions.floor()
    if mode == "ceil":
        return positions.ceil()
    if mode == "round_prefer_floor":
        return (positions - 0.5).ceil()
    return (positions + 0.5).floor()


def _taps(positions: Tensor, axis: _Axis, method: _Method) -> tuple[Tensor, Tensor]:
    """Return which rows each row of the result is made of, and their weights.

    Antialiasing stretches the filter over the rows that a row of the result stands for.
    """
    stretch = max(1.0, 1.0 / axis.scale) if method.antialias else 1.0
    reach = (2 if method.mode == "cubic" else 1) * stretch
    first = (positions - reach).floor() + 1
    rows = first[:, None] + torch.arange(math.ceil(2 * reach) + (stretch > 1))
    distance = ((rows - positions[:, None]) / stretch).abs()
    if method.mode == "cubic":
        weights = _cubic(distance, method.cubic_coeff_a)
    else:
        weights = torch.clamp(1 - distance, min=0)
    if method.exclude_outside:
        weights = torch.where((rows < 0) | (rows >= axis.length), 0, weights)
    if method.exclude_outside or stretch > 1:
        weights = weights / weights.sum(1, keepdim=True)
    return rows.to(torch.int64).clamp(0, axis.length - 1), weights


def _cubic(distance: Tensor, a: float) -> Tensor:
    """Keys' cubic convolution kernel, "Cubic convolution interpolation" (1981), equation 4."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, 0))


def _resize_axis(x: Tensor, axis: _Axis, method: _Method) -> Tensor:
    positions = _positions(axis, method.coordinate_transformation_mode)
    if method.mode == "nearest":
        rows = _nearest_rows(positions, method.nearest_mode).to(torch.int64)
        result = rows_of(x, axis.axis, rows.clamp(0, axis.length - 1))
    else:
        result = _weighted(x, axis, *_taps(positions, axis, method))
    if method.coordinate_transformation_mode != "tf_crop_and_resize":
        return result
    outside = ((positions < 0) | (positions > axis.length - 1)).to(x.device)
    outside = along(outside, axis.axis, x.dim())
    return torch.where(outside, method.extrapolation_value, result).to(x.dtype)


def _weighted(x: Tensor, axis: _Axis, rows: Tensor, weights: Tensor) -> Tensor:
    exact = x if x.is_floating_point() else x.to(torch.float32)
    result: Tensor | None = None
    for tap in range(rows.shape[1]):
        weight = weights[:, tap].to(device=x.device, dtype=exact.dtype)
        weight = along(weight, axis.axis, x.dim())
        part = exact.index_select(axis.axis, rows[:, tap].to(x.device)) * weight
        result = part if result is None else result + part
    assert result is not None
    return result if x.is_floating_point() else torch.round(result).to(x.dtype)


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


# Fourier transforms and their windows; complex numbers are pairs in the last axis.


def _complex(x: Tensor) -> Tensor:
    if x.shape[-1] == 2:
        return torch.view_as_complex(x.contiguous())
    return torch.complex(x[..., 0], torch.zeros_like(x[..., 0]))


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
    if not onesided:
        transform = torch.fft.ifft if inverse else torch.fft.fft
        return torch.view_as_real(transform(_complex(x), n=size, dim=over))
    if inverse:
        real: Tensor = torch.fft.irfft(_complex(x), n=size, dim=over)
        return real.unsqueeze(-1)
    return torch.view_as_real(torch.fft.rfft(x[..., 0], n=size, dim=over))


SIGNAL: Table = {
    "DFT": Operator(_dft),
    "GridSample": Operator(_grid_sample),
    "Resize": Operator(_resize),
}
