"""Operators that torchvision brings: boxes, regions, and convolution at shifted places."""

from __future__ import annotations

import math
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
from compressor.models.executor.ops.reference import BY_REFERENCE
from compressor.models.executor.ops.windows import WINDOW, Window


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
    first, second = boxes.chunk(2, -1)
    if center_point_box:
        first, second = first - second / 2, first + second / 2
    corners = torch.cat([torch.minimum(first, second), torch.maximum(first, second)], -1)
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
) -> Tensor:
    half_pixel = coordinate_transformation_mode == "half_pixel"
    bins = output_height, output_width
    pooled = [x.new_zeros(0, x.shape[1], *bins)]
    for batch, roi in zip(integers(batches), rois.tolist(), strict=True):
        scaled = [value * spatial_scale - (0.5 if half_pixel else 0.0) for value in roi]
        weights = []
        for axis, (start, end) in enumerate(zip(scaled[1::-1], scaled[:1:-1], strict=True)):
            width = (end - start if half_pixel else max(end - start, 1.0)) / bins[axis]
            samples = sampling_ratio or max(math.ceil(width), 1)
            matrix = _bin_weights((start, width), (bins[axis], samples), x.shape[2 + axis])
            weights.append(matrix.to(x))
        pooled.append((weights[0] @ x[batch] @ weights[1].t())[None])
    return torch.cat(pooled)


def _bin_weights(bins: tuple[float, float], counts: tuple[int, int], length: int) -> Tensor:
    """Return the share of each pixel in the mean of each bin, ``[bins, pixels]``.

    Args:
        bins: where the first bin starts, and how long a bin is.
        counts: number of bins, and of samples a bin, each of them between two pixels.
        length: number of pixels.
    """
    start, width = bins
    steps = torch.arange(math.prod(counts)) + 0.5
    place = (start + steps * (width / counts[1]))[:, None]
    outside = (place < -1) | (place > length)
    distance = (place.clamp(0, length - 1) - torch.arange(length)).abs()
    weights = torch.clamp(1 - distance, min=0).masked_fill(outside, 0)
    return weights.reshape(*counts, length).mean(1)


def _deformable_convolution(
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    group: int = 1,
    offset_group: int = 1,
    window: Window = WINDOW,
) -> Tensor:
    """Convolution at shifted places (Dai et al. 2017), each tap weighted by a mask (Zhu 2019)."""
    pads = window.around(x.shape[2:], weight.shape[2:])
    strides, dilations = window.moves(2)
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
    "RoiAlign": Operator(_roi_align, otherwise=BY_REFERENCE),
}
