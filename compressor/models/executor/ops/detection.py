"""Operators of detectors: suppression of boxes and pools over regions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.ops.host import integers
from compressor.models.executor.program import Op


def _non_max_suppression(node: NodeView) -> Op:
    centred = node.flag("center_point_box")
    node.on_host(2, 3, 4)

    def run(
        boxes: Tensor,
        scores: Tensor,
        limit: Tensor | None = None,
        overlap: Tensor | None = None,
        least: Tensor | None = None,
    ) -> Tensor:
        most = 0 if limit is None else int(limit.item())
        threshold = 0.0 if overlap is None else float(overlap.item())
        corners = _corners(boxes, centred)
        found = [torch.empty((0, 3), dtype=torch.int64, device=boxes.device)]
        for batch in range(scores.shape[0]):
            for label in range(scores.shape[1]):
                rated = scores[batch, label]
                _, order = torch.sort(rated, descending=True, stable=True)
                if least is not None:
                    order = order[rated[order] > least.to(rated.device)]
                kept = _suppress(corners[batch][order], threshold, most)
                chosen = order[kept]
                prefix = torch.tensor([batch, label], device=boxes.device).expand(len(kept), 2)
                found.append(torch.cat([prefix, chosen[:, None]], 1))
        return torch.cat(found)

    return run


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


@dataclass(frozen=True)
class _RoiAlign:
    """What the attributes of ``RoiAlign`` say."""

    height: int
    width: int
    ratio: int
    scale: float
    half_pixel: bool
    highest: bool


def _roi_align(node: NodeView) -> Op:
    # Before opset 16 coordinates were not shifted.
    forms = ("half_pixel", "output_half_pixel")
    usual = "half_pixel" if node.opset >= 16 else "output_half_pixel"
    settings = _RoiAlign(
        node.integer("output_height", 1),
        node.integer("output_width", 1),
        node.integer("sampling_ratio", 0),
        node.number("spatial_scale", 1.0),
        node.choice("coordinate_transformation_mode", forms, usual) == "half_pixel",
        node.choice("mode", ("avg", "max"), "avg") == "max",
    )

    def run(x: Tensor, rois: Tensor, batches: Tensor) -> Tensor:
        pooled = [
            _pool_region(x[batch], roi, settings)
            for batch, roi in zip(integers(batches), rois.tolist(), strict=True)
        ]
        if not pooled:
            return x.new_zeros(0, x.shape[1], settings.height, settings.width)
        return torch.stack(pooled)

    return run


def _pool_region(plane: Tensor, roi: list[float], settings: _RoiAlign) -> Tensor:
    """Sample a grid in each bin, one axis after the other, and pool it."""
    shift = 0.5 if settings.half_pixel else 0.0
    left, top, right, bottom = (value * settings.scale - shift for value in roi)
    extent = [bottom - top, right - left]
    if not settings.half_pixel:
        extent = [max(length, 1.0) for length in extent]
    bins = (settings.height, settings.width)
    counts = [
        settings.ratio or max(math.ceil(length / n), 1)
        for length, n in zip(extent, bins, strict=True)
    ]
    rows, columns = (
        _interpolation(plane, axis, (start, length / n), (n * count, count))
        for axis, start, length, n, count in zip(
            (1, 2), (top, left), extent, bins, counts, strict=True
        )
    )
    shape = (plane.shape[0], bins[0], counts[0], bins[1], counts[1])
    if not settings.highest:
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


DETECTION: Table = {"NonMaxSuppression": _non_max_suppression, "RoiAlign": _roi_align}
