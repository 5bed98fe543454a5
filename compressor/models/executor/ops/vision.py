"""Operators that torchvision brings: boxes, regions, and convolution at shifted places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.executor.node import (
    Host,
    Node,
    Operator,
    Read,
    Table,
    along,
    integers,
    one_of,
)
from compressor.models.executor.ops.windows import SLIDE, Slide


def _non_max_suppression(
    boxes: Tensor,
    scores: Tensor,
    limit: Host | None = None,
    overlap: Host | None = None,
    least: Host | None = None,
    *,
    center_point_box: bool = False,
) -> Tensor:
    most = 0 if limit is None else int(limit.item())
    threshold = 0.0 if overlap is None else float(overlap.item())
    corners = _corners(boxes, center_point_box)
    kept = [torch.empty((0, 3), dtype=torch.int64, device=boxes.device)]
    for batch in range(scores.shape[0]):
        for label in range(scores.shape[1]):
            ranked = scores[batch, label]
            _, order = torch.sort(ranked, descending=True, stable=True)
            if least is not None:
                order = order[ranked[order] > least.to(ranked.device)]
            best = order[_suppress(corners[batch][order], threshold, most)]
            prefix = torch.tensor([batch, label], device=boxes.device).expand(len(best), 2)
            kept.append(torch.cat([prefix, best[:, None]], 1))
    return torch.cat(kept)


def _corners(boxes: Tensor, centred: bool) -> Tensor:
    """Return boxes as smallest and largest corner."""
    first, second = boxes[..., :2], boxes[..., 2:]
    if centred:
        return torch.cat([first - second / 2, first + second / 2], -1)
    return torch.cat([torch.minimum(first, second), torch.maximum(first, second)], -1)


def _suppress(boxes: Tensor, threshold: float, most: int) -> list[int]:
    """Keep the best box, drop what overlaps it, and go on with the best of the rest.

    Args:
        boxes: corners, the best box first.
        threshold: share of the union from which on boxes are the same object.
        most: how many to keep.
    """
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    rest = torch.arange(len(boxes), device=boxes.device)
    kept: list[int] = []
    while len(rest) and len(kept) < most:
        best, rest = rest[0], rest[1:]
        kept.append(int(best.item()))
        low = torch.maximum(boxes[best, :2], boxes[rest, :2])
        high = torch.minimum(boxes[best, 2:], boxes[rest, 2:])
        common = torch.clamp(high - low, min=0).prod(1)
        union = area[best] + area[rest] - common
        # Boxes without area overlap nothing.
        same = (common > threshold * union) & (union > 0)
        rest = rest[~same]
    return kept


def _shift(node: Node, name: str) -> str:
    """Return the form of the coordinates; before opset 16 they were not shifted by default."""
    forms = "half_pixel", "output_half_pixel"
    form: str = one_of(*(forms if node.opset >= 16 else forms[::-1])).how(node, name)
    return form


_ROI_COORDINATES: Any = Read(_shift)
_ROI_MODE = one_of("avg", "max")


def _roi_align(
    x: Tensor,
    rois: Tensor,
    batches: Tensor,
    *,
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    coordinate_transformation_mode: str = _ROI_COORDINATES,
    mode: str = _ROI_MODE,
) -> Tensor:
    half_pixel = coordinate_transformation_mode == "half_pixel"
    bins = output_height, output_width
    pooled = []
    for batch, roi in zip(integers(batches), rois.tolist(), strict=True):
        left, top, right, bottom = (
            value * spatial_scale - (0.5 if half_pixel else 0.0) for value in roi
        )
        extent = [bottom - top, right - left]
        if not half_pixel:
            extent = [max(length, 1.0) for length in extent]
        pooled.append(_pool_region(x[batch], (top, left), extent, (bins, sampling_ratio), mode))
    return torch.stack(pooled) if pooled else x.new_zeros(0, x.shape[1], *bins)


def _pool_region(
    plane: Tensor,
    start: Sequence[float],
    extent: Sequence[float],
    grid: tuple[tuple[int, int], int],
    mode: str,
) -> Tensor:
    """Sample a grid in each bin, one axis after the other, and pool it."""
    bins, ratio = grid
    counts = [
        ratio or max(math.ceil(length / n), 1) for length, n in zip(extent, bins, strict=True)
    ]
    rows, columns = (
        _interpolation(plane, 1 + i, (start[i], extent[i] / n), (n * counts[i], counts[i]))
        for i, n in enumerate(bins)
    )
    shape = (plane.shape[0], bins[0], counts[0], bins[1], counts[1])
    if mode == "avg":
        samples = (rows[0] + rows[1]) @ plane @ (columns[0] + columns[1]).t()
        return samples.reshape(shape).mean((2, 4))
    # The highest share that a pixel has in a sample, not the highest sample, as ONNX defines it.
    shares = [row @ plane @ column.t() for row in rows for column in columns]
    return torch.stack(shares).amax(0).reshape(shape).amax((2, 4))


def _interpolation(
    plane: Tensor, axis: int, bins: tuple[float, float], samples: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the matrices that pick the neighbours before and after each sample of an axis.

    Args:
        plane: (channels, rows, columns).
        axis: 1 for rows, 2 for columns.
        bins: where the first bin starts, and how long a bin is.
        samples: number of samples, and of samples a bin.
    """
    length = plane.shape[axis]
    start, width = bins
    total, count = samples
    index = torch.arange(total)
    within = (index % count + 0.5) / count
    place = start + (torch.div(index, count, rounding_mode="floor") + within) * width
    outside = (place < -1) | (place > length)
    place = place.clamp(0, length - 1)
    before = place.floor().to(torch.int64)
    after = (before + 1).clamp(max=length - 1)
    share = (place - before).masked_fill(outside, 0.0)
    rest = (1 - (place - before)).masked_fill(outside, 0.0)
    empty = torch.zeros(total, length)
    return (
        empty.scatter(1, before[:, None], rest[:, None]).to(plane),
        empty.scatter(1, after[:, None], share[:, None]).to(plane),
    )


def _deformable_convolution(
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    group: int = 1,
    offset_group: int = 1,
    slide: Slide = SLIDE,
) -> Tensor:
    """Convolution at shifted places (Dai et al. 2017), each tap weighted by a mask (Zhu 2019)."""
    pads, (strides, dilations) = slide.padding(2), slide.moves(2)
    batch, channels, height, width = x.shape
    taps = weight.shape[2] * weight.shape[3]
    rows, columns = offset.shape[2:]
    shift = offset.reshape(batch * offset_group, taps, 2, rows, columns)
    places = []
    for axis, (length, outputs) in enumerate(((height, rows), (width, columns))):
        tap = torch.arange(weight.shape[2 + axis], device=x.device) * dilations[axis]
        start = torch.arange(outputs, device=x.device) * strides[axis] - pads.before[axis]
        # Taps and outputs of the two axes lie in (taps, taps, rows, columns).
        base = along(tap, axis, 4) + along(start, 2 + axis, 4)
        base = base.expand(*weight.shape[2:], rows, columns).reshape(1, taps, rows, -1)
        place = base + shift[:, :, axis]
        places.append(place * 2 / max(length - 1, 1) - 1 if length > 1 else place - 1)
    grid = torch.stack(places[::-1], -1).reshape(batch * offset_group, taps * rows, columns, 2)
    planes = x.reshape(batch * offset_group, -1, height, width)
    sampled = functional.grid_sample(planes, grid, "bilinear", "zeros", True)
    sampled = sampled.reshape(batch * offset_group, -1, taps, rows, columns)
    if mask is not None:
        sampled = sampled * mask.reshape(batch * offset_group, 1, taps, rows, columns)
    blocks = sampled.reshape(batch, group, channels // group * taps, rows * columns)
    matrix = weight.reshape(group, weight.shape[0] // group, -1)
    result = (matrix @ blocks).reshape(batch, weight.shape[0], rows, columns)
    return result if bias is None else result + bias.reshape(-1, 1, 1)


VISION: Table = {
    "DeformConv": Operator(_deformable_convolution, ignored=("kernel_shape",)),
    "NonMaxSuppression": Operator(_non_max_suppression),
    "RoiAlign": Operator(_roi_align),
}
