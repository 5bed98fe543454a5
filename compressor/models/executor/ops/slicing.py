"""Operators that cut a tensor or put rows around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.executor.dtypes import moved
from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.ops.host import integers, positive
from compressor.models.executor.program import Op, Result


def _slice(node: NodeView) -> Op:
    """Bounds are attributes before opset 10 and inputs since."""
    if node.opset < 10:
        starts, ends, axes = node.integers("starts"), node.integers("ends"), node.integers("axes")
        if starts is None or ends is None:
            raise node.refuse("attribute 'starts' or 'ends' is missing")

        def run_old(x: Tensor) -> Tensor:
            return _cut(x, starts, ends, axes, None)

        return run_old
    node.on_host(1, 2, 3, 4)

    def run(
        x: Tensor,
        starts: Tensor,
        ends: Tensor,
        axes: Tensor | None = None,
        steps: Tensor | None = None,
    ) -> Tensor:
        return _cut(
            x,
            integers(starts),
            integers(ends),
            None if axes is None else integers(axes),
            None if steps is None else integers(steps),
        )

    return run


def _cut(
    x: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    axes: Sequence[int] | None,
    steps: Sequence[int] | None,
) -> Tensor:
    over = positive(range(len(starts)) if axes is None else axes, x.dim())
    bounds = [slice(None)] * x.dim()
    for start, end, axis, step in zip(starts, ends, over, steps or [1] * len(starts), strict=True):
        # Python's own rules for bounds outside the axis are ONNX's.
        rows = range(*slice(start, end, step).indices(x.shape[axis]))
        if step > 0:
            bounds[axis] = slice(rows.start, rows.stop, step)
        else:
            x = _select(x, axis, torch.tensor(list(rows), dtype=torch.int64))
    return x[tuple(bounds)]


def _select(x: Tensor, axis: int, rows: Tensor) -> Tensor:
    return moved(x, lambda value: value.index_select(axis, rows.to(x.device)))


def _split(node: NodeView) -> Op:
    axis = node.integer("axis", 0)
    fixed = node.integers("split")
    parts = node.output_count
    node.integer("num_outputs", parts)
    node.on_host(1)

    def run(x: Tensor, split: Tensor | None = None) -> Result:
        sizes = fixed if split is None else integers(split)
        if sizes is None:
            width = -(-x.shape[axis] // parts)
            sizes = [width] * (parts - 1) + [x.shape[axis] - width * (parts - 1)]
        return torch.split(x, list(sizes), axis)

    return run


def _pad(node: NodeView) -> Op:
    mode = node.choice("mode", ("constant", "reflect", "edge", "wrap"), "constant")
    fixed = node.integers("pads")
    fill = node.number("value", 0.0)
    place = _SOURCES.get(mode)
    node.on_host(1, 2, 3)

    def run(
        x: Tensor,
        pads: Tensor | None = None,
        value: Tensor | None = None,
        axes: Tensor | None = None,
    ) -> Tensor:
        amounts = list(fixed or ()) if pads is None else integers(pads)
        over = positive(range(x.dim()) if axes is None else integers(axes), x.dim())
        before, after = amounts[: len(over)], amounts[len(over) :]
        if place is not None:
            for axis, first, last in zip(over, before, after, strict=True):
                if first or last:
                    x = _select(x, axis, place(x.shape[axis], first, last))
            return x
        pairs = [0] * (2 * x.dim())
        for axis, first, last in zip(over, before, after, strict=True):
            pairs[2 * (x.dim() - 1 - axis)] = first
            pairs[2 * (x.dim() - 1 - axis) + 1] = last
        return functional.pad(x, pairs, value=fill if value is None else value.item())

    return run


def _edge(length: int, before: int, after: int) -> Tensor:
    return torch.arange(-before, length + after).clamp(0, length - 1)


def _wrap(length: int, before: int, after: int) -> Tensor:
    return torch.arange(-before, length + after) % length


def _reflect(length: int, before: int, after: int) -> Tensor:
    period = max(2 * (length - 1), 1)
    rows = torch.arange(-before, length + after) % period
    return torch.where(rows < length, rows, period - rows)


_SOURCES: dict[str, Callable[[int, int, int], Tensor]] = {
    "edge": _edge,
    "reflect": _reflect,
    "wrap": _wrap,
}
"""Which row of the input each row of the output is, by mode: (length, before, after)."""


def _center_crop_pad(node: NodeView) -> Op:
    fixed = node.integers("axes")
    node.on_host(1)

    def run(x: Tensor, shape: Tensor) -> Tensor:
        over = positive(range(x.dim()) if fixed is None else fixed, x.dim())
        for axis, want in zip(over, integers(shape), strict=True):
            have = x.shape[axis]
            if want < have:
                x = x.narrow(axis, (have - want) // 2, want)
            elif want > have:
                before = (want - have) // 2
                pairs = [0, 0] * (x.dim() - axis)
                pairs[-2:] = [before, want - have - before]
                x = functional.pad(x, pairs)
        return x

    return run


def _triangle(node: NodeView) -> Op:
    upper = node.flag("upper", default=True)
    node.on_host(1)

    def run(x: Tensor, k: Tensor | None = None) -> Tensor:
        diagonal = 0 if k is None else int(k.item())
        return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)

    return run


def _reverse_sequence(node: NodeView) -> Op:
    batch_axis, time_axis = node.integer("batch_axis", 1), node.integer("time_axis", 0)

    def run(x: Tensor, lengths: Tensor) -> Tensor:
        turned = x.movedim((time_axis, batch_axis), (0, 1))
        time = torch.arange(turned.shape[0], device=x.device)[:, None]
        source = torch.where(time < lengths, lengths - 1 - time, time)
        places = source.reshape(*source.shape, *(1,) * (x.dim() - 2)).expand(turned.shape)
        return torch.gather(turned, 0, places).movedim((0, 1), (time_axis, batch_axis))

    return run


SLICING: Table = {
    "CenterCropPad": _center_crop_pad,
    "Pad": _pad,
    "ReverseSequence": _reverse_sequence,
    "Slice": _slice,
    "Split": _split,
    "Trilu": _triangle,
}
