"""Merge slices of different axes: `x[:, :, ::2, ::2]` is lowered to one Slice an axis."""

from __future__ import annotations

import onnx_ir as ir

from compressor.graph.values import is_op
from compressor.passes.fuse.draft import Draft
from compressor.passes.fuse.edit import input_of, integers, positive, private_maker, rank, replace

_Cut = tuple[int, int, int]


def merge_slices(node: ir.Node, draft: Draft) -> bool:
    """Replace ``Slice(Slice(x))`` on different axes, with constant bounds, by one Slice."""
    if not is_op(node, "Slice"):
        return False
    inner = private_maker(node.inputs[0], node, "Slice")
    if inner is None:
        return False
    first, second = _cuts(inner), _cuts(node)
    if first is None or second is None or first.keys() & second.keys():
        return False
    cuts = sorted((first | second).items())
    name = node.outputs[0].name or "slice"
    columns = {
        "starts": [cut[0] for _, cut in cuts],
        "ends": [cut[1] for _, cut in cuts],
        "axes": [axis for axis, _ in cuts],
        "steps": [cut[2] for _, cut in cuts],
    }
    inputs = [draft.constant(v, ir.DataType.INT64, f"{name}/{k}") for k, v in columns.items()]
    data = inner.inputs[0]
    replace(node, "Slice", [data, *inputs])
    inner_graph = inner.graph
    if inner_graph is not None:
        inner_graph.remove(inner, safe=True)
    return True


def _cuts(node: ir.Node) -> dict[int, _Cut] | None:
    """Return start, end and step by axis, or ``None`` if they are not constants."""
    starts, ends = integers(input_of(node, 1)), integers(input_of(node, 2))
    if starts is None or ends is None:
        return None
    axes: list[int] | None = list(range(len(starts)))
    steps: list[int] | None = [1] * len(starts)
    if input_of(node, 3) is not None:
        given = integers(input_of(node, 3))
        axes = None if given is None else positive(given, rank(node.inputs[0]))
    if input_of(node, 4) is not None:
        steps = integers(input_of(node, 4))
    if axes is None or steps is None:
        return None
    return dict(zip(axes, zip(starts, ends, steps, strict=True), strict=True))
