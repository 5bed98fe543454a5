"""Resizing by interpolation, one axis after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.models.executor.dtypes import moved
from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.ops.host import integers, positive
from compressor.models.executor.program import Op

_COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
    "tf_half_pixel_for_nn",
)
_NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


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


@dataclass(frozen=True)
class _Method:
    """What the attributes say."""

    mode: str
    coordinates: str
    nearest: str
    cubic: float
    exclude_outside: bool
    antialias: bool
    extrapolation: float


def _method(node: NodeView) -> _Method:
    if node.opset < 11:  # the first form of the operator, and Upsample before it
        return _Method(
            node.choice("mode", ("nearest", "linear"), "nearest"),
            "asymmetric",
            "floor",
            -0.75,
            False,
            False,
            0.0,
        )
    return _Method(
        node.choice("mode", ("nearest", "linear", "cubic"), "nearest"),
        node.choice("coordinate_transformation_mode", _COORDINATES, "half_pixel"),
        node.choice("nearest_mode", _NEAREST, "round_prefer_floor"),
        node.number("cubic_coeff_a", -0.75),
        node.flag("exclude_outside"),
        node.flag("antialias"),
        node.number("extrapolation_value", 0.0),
    )


def _resize(node: NodeView) -> Op:
    method = _method(node)
    fixed = node.integers("axes")
    policy = node.choice(
        "keep_aspect_ratio_policy", ("stretch", "not_larger", "not_smaller"), "stretch"
    )
    node.on_host(1, 2, 3)
    old = node.opset < 11

    def run(
        x: Tensor,
        roi: Tensor | None = None,
        scales: Tensor | None = None,
        sizes: Tensor | None = None,
    ) -> Tensor:
        if old:
            roi, scales = None, roi
        axes = positive(range(x.dim()) if fixed is None else fixed, x.dim())
        region = [0.0] * len(axes) + [1.0] * len(axes)
        cropped = method.coordinates == "tf_crop_and_resize"
        if cropped and roi is not None and roi.numel():
            region = roi.tolist()
        if sizes is not None and sizes.numel():
            plan = _from_sizes(x, axes, integers(sizes), policy, region)
        elif scales is not None and scales.numel():
            plan = _from_scales(x, axes, scales.tolist(), region, cropped)
        else:
            raise ValueError("neither scales nor sizes are given")
        for axis in plan:
            if axis.result != axis.length or axis.scale != 1.0 or cropped:
                x = _resize_axis(x, axis, method)
        return x

    return run


def _from_sizes(
    x: Tensor, axes: Sequence[int], sizes: Sequence[int], policy: str, region: Sequence[float]
) -> list[_Axis]:
    if policy != "stretch":
        pick = min if policy == "not_larger" else max
        scale = pick(size / x.shape[axis] for axis, size in zip(axes, sizes, strict=True))
        sizes = [math.floor(scale * x.shape[axis] + 0.5) for axis in axes]
        scales = [scale] * len(axes)
    else:
        scales = [size / x.shape[axis] for axis, size in zip(axes, sizes, strict=True)]
    count = len(axes)
    return [
        _Axis(axis, x.shape[axis], sizes[i], scales[i], region[i], region[count + i])
        for i, axis in enumerate(axes)
    ]


def _from_scales(
    x: Tensor, axes: Sequence[int], scales: Sequence[float], region: Sequence[float], cropped: bool
) -> list[_Axis]:
    plan, count = [], len(axes)
    for i, axis in enumerate(axes):
        start, end = region[i], region[count + i]
        share = end - start if cropped else 1.0
        result = math.floor(x.shape[axis] * share * scales[i])
        plan.append(_Axis(axis, x.shape[axis], result, scales[i], start, end))
    return plan


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
    weights = (
        _cubic(distance, method.cubic)
        if method.mode == "cubic"
        else torch.clamp(1 - distance, min=0)
    )
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
    positions = _positions(axis, method.coordinates)
    if method.mode == "nearest":
        rows = _nearest_rows(positions, method.nearest).to(torch.int64).clamp(0, axis.length - 1)
        result = _rows(x, axis.axis, rows)
    else:
        result = _weighted(x, axis, *_taps(positions, axis, method))
    if method.coordinates != "tf_crop_and_resize":
        return result
    outside = ((positions < 0) | (positions > axis.length - 1)).to(x.device)
    shape = [1] * x.dim()
    shape[axis.axis] = -1
    return torch.where(outside.reshape(shape), method.extrapolation, result).to(x.dtype)


def _rows(x: Tensor, axis: int, rows: Tensor) -> Tensor:
    return moved(x, lambda value: value.index_select(axis, rows.to(x.device)))


def _weighted(x: Tensor, axis: _Axis, rows: Tensor, weights: Tensor) -> Tensor:
    exact = x if x.is_floating_point() else x.to(torch.float32)
    shape = [1] * x.dim()
    shape[axis.axis] = -1
    result: Tensor | None = None
    for tap in range(rows.shape[1]):
        weight = weights[:, tap].to(device=x.device, dtype=exact.dtype).reshape(shape)
        part = exact.index_select(axis.axis, rows[:, tap].to(x.device)) * weight
        result = part if result is None else result + part
    assert result is not None
    return result if x.is_floating_point() else torch.round(result).to(x.dtype)


RESIZE: Table = {"Resize": _resize, "Upsample": _resize}
