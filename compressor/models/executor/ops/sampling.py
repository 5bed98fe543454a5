"""Operators that read a plane at places between its pixels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.ops.host import integers
from compressor.models.executor.program import Op

_MODES = {
    "linear": "bilinear",
    "bilinear": "bilinear",
    "nearest": "nearest",
    "cubic": "bicubic",
    "bicubic": "bicubic",
}


def _grid_sample(node: NodeView) -> Op:
    mode = _MODES[node.choice("mode", tuple(_MODES), "linear")]
    padding = node.choice("padding_mode", ("zeros", "border", "reflection"), "zeros")
    corners = node.flag("align_corners")

    def run(x: Tensor, grid: Tensor) -> Tensor:
        return functional.grid_sample(x, grid, mode, padding, corners)

    return run


def _affine_grid(node: NodeView) -> Op:
    corners = node.flag("align_corners")
    node.on_host(1)

    def run(theta: Tensor, size: Tensor) -> Tensor:
        return functional.affine_grid(theta, integers(size), corners)

    return run


def _deformable_convolution(node: NodeView) -> Op:
    """Convolution at shifted places (Dai et al. 2017), each tap weighted by a mask (Zhu 2019)."""
    groups, offset_groups = node.integer("group", 1), node.integer("offset_group", 1)
    strides = node.integers("strides") or (1, 1)
    dilations = node.integers("dilations") or (1, 1)
    pads = node.integers("pads") or (0, 0, 0, 0)
    node.ignore("kernel_shape")

    def run(
        x: Tensor,
        weight: Tensor,
        offset: Tensor,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        batch, channels, height, width = x.shape
        taps = weight.shape[2] * weight.shape[3]
        rows, columns = offset.shape[2:]
        shift = offset.reshape(batch * offset_groups, taps, 2, rows, columns)
        places = []
        for axis, (length, outputs) in enumerate(((height, rows), (width, columns))):
            tap = torch.arange(weight.shape[2 + axis], device=x.device) * dilations[axis]
            start = torch.arange(outputs, device=x.device) * strides[axis] - pads[axis]
            # Taps and outputs of the two axes lie in (taps, taps, rows, columns).
            tap = tap[:, None, None, None] if axis == 0 else tap[None, :, None, None]
            start = start[:, None] if axis == 0 else start[None, :]
            base = (tap + start).expand(*weight.shape[2:], rows, columns).reshape(1, taps, rows, -1)
            place = base + shift[:, :, axis]
            places.append(place * 2 / max(length - 1, 1) - 1 if length > 1 else place - 1)
        grid = torch.stack(places[::-1], -1).reshape(batch * offset_groups, taps * rows, columns, 2)
        planes = x.reshape(batch * offset_groups, -1, height, width)
        sampled = functional.grid_sample(planes, grid, "bilinear", "zeros", True)
        sampled = sampled.reshape(batch * offset_groups, -1, taps, rows, columns)
        if mask is not None:
            sampled = sampled * mask.reshape(batch * offset_groups, 1, taps, rows, columns)
        blocks = sampled.reshape(batch, groups, channels // groups * taps, rows * columns)
        matrix = weight.reshape(groups, weight.shape[0] // groups, -1)
        result = (matrix @ blocks).reshape(batch, weight.shape[0], rows, columns)
        return result if bias is None else result + bias.reshape(-1, 1, 1)

    return run


SAMPLING: Table = {
    "AffineGrid": _affine_grid,
    "DeformConv": _deformable_convolution,
    "GridSample": _grid_sample,
}
