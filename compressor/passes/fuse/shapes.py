"""Rules about shapes: constant shapes where possible, no detours through other shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.graph.values import all_nodes, constant_array, input_of, is_op
from compressor.passes.fuse.draft import (
    Dim,
    Draft,
    axes_of,
    integers,
    positive,
    private_maker,
    put,
    rank,
    replace,
    same_dim,
)


def note_shapes(model: ir.Model, symbolic: Mapping[ir.Value, Any]) -> None:
    """Fill in the lengths of Reshapes' outputs by the ``symbolic`` shapes that folding found."""
    for node in all_nodes(model.graph):
        if not is_op(node, "Reshape"):
            continue
        shape, output = node.inputs[1], node.outputs[0]
        computed = None if shape is None else symbolic.get(shape)
        if not isinstance(computed, ir.Shape):
            continue
        dims: list[Any] = [None if isinstance(d, int) and d <= 0 else d for d in computed]
        if output.shape is not None:
            if len(output.shape) != len(dims):
                continue
            pairs = zip(output.shape, dims, strict=True)
            dims = [have if _known(have) else want for have, want in pairs]
        output.shape = ir.Shape(dims)


def share_lengths(model: ir.Model) -> None:
    """Call a length as that of the input is called that it surely is, where it had no name.

    Inference names lengths when it meets them. What rules find out about one later makes others
    known, and so equal.
    """
    for node in all_nodes(model.graph):
        output = node.outputs[0]
        known = None if output.shape is None else _lengths_of(node)
        if output.shape is None or known is None or len(known) != len(output.shape):
            continue
        pairs = zip(output.shape, known, strict=True)
        output.shape = ir.Shape(
            [new if not isinstance(old, int) and _known(new) and _inferred(old) else old
             for old, new in pairs]
        )  # fmt: skip


def _lengths_of(node: ir.Node) -> list[Dim] | None:
    """Return the lengths of what a node writes by those of what it reads; ``None`` if not known."""
    row = operator(node)
    shapes = [v.shape for v in node.inputs if v is not None]
    if not shapes or any(shape is None for shape in shapes):
        return None
    each: list[list[Dim]] = [list(shape) for shape in shapes if shape is not None]
    perm = node.attributes.get_ints("perm", None)
    if is_op(node, "Transpose") and perm is not None:
        return [each[0][axis] for axis in perm]
    if row.family in ("unary", "softmax", "layer-norm"):
        return each[0]
    if row.is_matmul and len(each[0]) == len(each[1]) > 1:
        (*first, rows, _), (*second, _, columns) = each[:2]
        return [*first, rows, columns] if _same(first, second) else None
    if row.family == "binary":
        longest = max(each, key=len)
        ones = [all(d == 1 for d in dims) for dims in each]
        fits = all(one or _same(dims, longest[len(longest) - len(dims):])
                   for one, dims in zip(ones, each, strict=True))  # fmt: skip
        return longest if fits else None
    return None


def _inferred(dim: ir.SymbolicDim) -> bool:
    """Whether a length has no name, or one that shape inference gave it."""
    return dim.value is None or dim.value.startswith("unk__")


def slice_of_shape(node: ir.Node, draft: Draft) -> bool:
    """Replace ``Slice(Shape(x))`` with constant bounds by ``Shape(x, start, end)``."""
    if draft.opset < 15 or not is_op(node, "Slice"):
        return False
    shape = node.inputs[0].producer() if node.inputs[0] is not None else None
    if shape is None or not is_op(shape, "Shape") or shape.attributes.get("end") is not None:
        return False
    starts, ends = integers(input_of(node, 1)), integers(input_of(node, 2))
    steps, count = integers(input_of(node, 4)) or [1], rank(shape.inputs[0])
    if shape.attributes.get_int("start", 0) or count is None or steps != [1]:
        return False
    if starts is None or ends is None or len(starts) != 1:
        return False
    start, end, _ = slice(starts[0], ends[0]).indices(count)
    if start >= end:
        return False
    replace(node, "Shape", [shape.inputs[0]], {"start": start, "end": end})
    return True


def known_lengths(node: ir.Node, draft: Draft) -> bool:
    """Compute ``Gather(Shape(x), places)`` where these lengths are known and others are not."""
    shape = node.inputs[0].producer() if operator(node).is_table and node.inputs[0] else None
    source = shape.inputs[0] if shape is not None and is_op(shape, "Shape") else None
    places = constant_array(node.inputs[1]) if source is not None else None
    if shape is None or source is None or source.shape is None or places is None:
        return False
    ends = (shape.attributes.get_int(key, None) for key in ("start", "end"))
    lengths = list(source.shape)[slice(*ends)]
    found = [lengths[p] for p in places.flat if -len(lengths) <= p < len(lengths)]
    known = [length for length in found if isinstance(length, int)]
    if len(known) < places.size:
        return False
    values = np.reshape(known, places.shape)
    constant = draft.constant(values, ir.DataType.INT64, f"{node.outputs[0].name}/lengths")
    replace(node, "Identity", [constant])
    return True


def shape_of_input(node: ir.Node, draft: Draft) -> bool:
    """Take a dynamic length from the graph's input that it belongs to.

    What every layer computes from it, such as a causal mask, then becomes one expression.
    """
    if not is_op(node, "Shape") or node.inputs[0] is None or node.inputs[0].is_graph_input():
        return False
    shape = node.inputs[0].shape
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", -1)
    if shape is None or start < 0 or end != start + 1 or end > len(shape):
        return False
    length = shape[start]
    for value in draft.model.graph.inputs:
        for axis, dim in enumerate(value.shape or ()):
            if not isinstance(dim, int) and same_dim(dim, length):
                replace(node, "Shape", [value], {"start": axis, "end": axis + 1})
                return True
    return False


def copy_lengths(node: ir.Node, draft: Draft) -> bool:
    """Give a Reshape with several dynamic axes a constant shape.

    Axes that keep their length become 0 (copied from the input); at most one other may be
    dynamic and becomes -1.
    """
    if not is_op(node, "Reshape") or integers(node.inputs[1]) is not None:
        return False
    data, output = node.inputs[0], node.outputs[0]
    shape = _lengths_to(output, data)
    if shape is None:
        return False
    constant = draft.constant(shape, ir.DataType.INT64, f"{output.name}/shape")
    replace(node, "Reshape", [data, constant])
    return True


def _lengths_to(output: ir.Value, data: ir.Value | None) -> list[int] | None:
    """Return the numbers with which a ``Reshape`` gives data the shape of an output."""
    if data is None or data.shape is None or output.shape is None:
        return None
    shape: list[int] = []
    for axis, dim in enumerate(output.shape):
        if isinstance(dim, int):
            shape.append(dim)
        elif axis < len(data.shape) and same_dim(data.shape[axis], dim):
            shape.append(0)
        else:
            shape.append(-1)
    fixed_zero = any(isinstance(d, int) and d == 0 for d in output.shape)
    return None if fixed_zero or shape.count(-1) > 1 else shape


def other_axes(node: ir.Node, draft: Draft) -> bool:
    """Replace ``Unsqueeze(Squeeze(x))`` of different axes by one ``Reshape``."""
    inner = private_maker(node.inputs[0], node, "Squeeze") if is_op(node, "Unsqueeze") else None
    shape = None if inner is None else _lengths_to(node.outputs[0], inner.inputs[0])
    if inner is None or shape is None:
        return False
    constant = draft.constant(shape, ir.DataType.INT64, f"{node.outputs[0].name}/shape")
    replace(node, "Reshape", [inner.inputs[0], constant])
    return True


def swap_last_axes(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Replace a transposition that goes through three axes by a direct one.

    ``[B, H, T, D] -> [-1, T, D] -> [-1, D, T] -> [B, H, D, T]`` is how attention's keys are
    lowered; runtimes look for ``Transpose(0, 1, 3, 2)``.
    """
    inner = _reshaped_before(node, [0, 2, 1])
    if inner is None or inner.inputs[0] is None:
        return False
    start, middle, end = inner.inputs[0].shape, inner.outputs[0].shape, node.outputs[0].shape
    if start is None or middle is None or end is None or len(start) < 3:
        return False
    swapped: list[Dim] = [*start[:-2], start[-1], start[-2]]
    if len(middle) != 3 or len(end) != len(start) or not _same(middle[1:], start[-2:]):
        return False
    if not _same(end, swapped):
        return False
    axes = [*range(len(start) - 2), len(start) - 1, len(start) - 2]
    replace(node, "Transpose", [inner.inputs[0]], {"perm": axes})
    return True


def separate_heads(node: ir.Node, draft: Draft) -> bool:
    """Split the heads before, not after, the transposition.

    ``[T, B, H D] -> [T, B H, D] -> [B H, T, D] -> [B, H, T, D]``, as ``nn.MultiheadAttention``
    does it, becomes ``[T, B, H D] -> [T, B, H, D] -> [B, H, T, D]``.
    """
    inner = _reshaped_before(node, [1, 0, 2])
    source = None if inner is None else inner.inputs[0]
    if inner is None or source is None or source.shape is None:
        return False
    middle, end = inner.outputs[0].shape, node.outputs[0].shape
    if middle is None or end is None or (len(source.shape), len(middle), len(end)) != (3, 3, 4):
        return False
    (length, batch, width), heads, depth = source.shape, end[1], end[3]
    same = [(middle[0], length), (middle[2], depth), (end[2], length)]
    if not all(same_dim(a, b) for a, b in same):
        return False
    if not same_dim(end[0], batch) and not isinstance(length, int):
        return False  # where all others are known, the number of elements says how long it is
    if not (isinstance(heads, int) and isinstance(depth, int) and width == heads * depth):
        return False
    name = f"{node.outputs[0].name}_heads"
    shape = draft.constant([0, 0, heads, depth], ir.DataType.INT64, f"{name}/shape")
    split = put(node, "Reshape", [source, shape])
    split.outputs[0].name, split.outputs[0].shape = name, ir.Shape([length, batch, heads, depth])
    node.outputs[0].shape = ir.Shape([batch, heads, length, depth])
    replace(node, "Transpose", [split.outputs[0]], {"perm": [1, 2, 0, 3]})
    return True


def _reshaped_before(node: ir.Node, perm: list[int]) -> ir.Node | None:
    """Return the first Reshape of ``Reshape(Transpose(Reshape(x)))``, if a node is the last."""
    if not is_op(node, "Reshape"):
        return None
    transpose = private_maker(node.inputs[0], node, "Transpose")
    if transpose is None or list(transpose.attributes.get_ints("perm", [])) != perm:
        return None
    return private_maker(transpose.inputs[0], transpose, "Reshape")


def transpose_without_unsqueeze(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Replace ``Squeeze(Transpose(Unsqueeze(x)))`` of the same axis by one Transpose."""
    if not is_op(node, "Squeeze"):
        return False
    transpose = private_maker(node.inputs[0], node, "Transpose")
    if transpose is None:
        return False
    unsqueeze = private_maker(transpose.inputs[0], transpose, "Unsqueeze")
    perm = transpose.attributes.get_ints("perm", None)
    if unsqueeze is None or perm is None:
        return False
    added, dropped = axes_of(unsqueeze, len(perm)), axes_of(node, len(perm))
    if added is None or dropped is None or len(added) != 1 or len(dropped) != 1:
        return False
    if perm[dropped[0]] != added[0]:
        return False
    rest = [p - (p > added[0]) for p in perm if p != added[0]]
    replace(node, "Transpose", [unsqueeze.inputs[0]], {"perm": rest})
    return True


def plain_reshape(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Drop ``allowzero`` where it means nothing; some readers of ONNX do not know it."""
    if not is_op(node, "Reshape") or not node.attributes.get_int("allowzero", 0):
        return False
    shape = integers(node.inputs[1])
    if shape is None or 0 in shape:
        return False
    node.attributes.pop("allowzero")
    return True


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
    if inner.graph is not None:
        inner.graph.remove(inner, safe=True)
    return True


def _cuts(node: ir.Node) -> dict[int, _Cut] | None:
    """Return start, end and step by axis, or ``None`` if they are not constants."""
    starts, ends = integers(input_of(node, 1)), integers(input_of(node, 2))
    if starts is None or ends is None:
        return None
    axes: list[int] | None = list(range(len(starts)))
    steps: list[int] | None = [1] * len(starts)
    if input_of(node, 3) is not None:
        axes = integers(input_of(node, 3))
        axes = None if axes is None else positive(axes, rank(node.inputs[0]))
    if input_of(node, 4) is not None:
        steps = integers(input_of(node, 4))
    if axes is None or steps is None:
        return None
    return dict(zip(axes, zip(starts, ends, steps, strict=True), strict=True))


def _known(dim: Dim) -> bool:
    return isinstance(dim, int) or dim.value is not None


def _same(first: Any, second: Any) -> bool:
    return len(first) == len(second) and all(
        same_dim(a, b) for a, b in zip(first, second, strict=True)
    )
