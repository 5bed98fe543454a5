"""Rules that drop detours: what is written, only to be taken apart or put back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.graph.values import constant_array, input_of, is_op, static_shape
from compressor.passes.fuse.draft import (
    Draft,
    axes_of,
    integers,
    maker,
    node_graph,
    positive,
    private_maker,
    put,
    rank,
    replace,
    same_dim,
    scalar,
)


def pool_parts(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Average before channels are put together, and before pixels are repeated.

    ``GlobalAveragePool(Concat(a, b))`` becomes ``Concat`` of two averages: the whole is not copied.
    Repeating every pixel equally often changes no average.
    """
    if not is_op(node, "GlobalAveragePool") or node.inputs[0] is None:
        return False
    source = maker(node.inputs[0], "Resize", "Upsample")
    if source is not None and _repeats(source):
        replace(node, "GlobalAveragePool", [source.inputs[0]])
        return True
    whole = private_maker(node.inputs[0], node, "Concat")
    count = rank(node.inputs[0])
    if whole is None or count is None or whole.attributes.get_int("axis", 0) not in (1, 1 - count):
        return False
    pools = []
    for index, part in enumerate(whole.inputs):
        assert part is not None
        pool = put(node, "GlobalAveragePool", [part])
        pool.outputs[0].name = f"{node.outputs[0].name}_part{index}"
        if part.shape is not None:
            pool.outputs[0].shape = ir.Shape([*part.shape[:2], *[1] * (count - 2)])
        pools.append(pool.outputs[0])
    replace(node, "Concat", pools, {"axis": 1})
    return True


_EQUALLY = {
    ("asymmetric", "floor"),
    ("half_pixel", "round_prefer_floor"),
    ("half_pixel", "round_prefer_ceil"),
}
"""Which pixel is the nearest, such that a whole factor repeats each equally often."""


def _repeats(node: ir.Node) -> bool:
    """Whether a node repeats every pixel equally often: the nearest one, by whole factors."""
    attributes = node.attributes
    if attributes.get_string("mode", "nearest") != "nearest" or rank(node.inputs[0]) is None:
        return False
    if attributes.get_ints("axes", None) is not None:
        return False
    index = 1 if is_op(node, "Upsample") or len(node.inputs) == 2 else 2
    factors = constant_array(input_of(node, index))
    if factors is None or factors.size != rank(node.inputs[0]) or input_of(node, 3) is not None:
        return False
    if (factors % 1).any() or (factors[:2] != 1).any() or (factors < 1).any():
        return False
    if index == 1:  # before opset 11
        return True
    places = attributes.get_string("coordinate_transformation_mode", "half_pixel")
    return (places, attributes.get_string("nearest_mode", "round_prefer_floor")) in _EQUALLY


def split_packed(node: ir.Node, draft: Draft) -> bool:
    """Take packed queries, keys and values apart before, not after, a transposition.

    ``[T, B, 3 W] -> [T, B, 3, W] -> [3, T, B, W]``, of which each third is taken, as
    ``nn.MultiheadAttention`` does it, becomes a ``Split`` of the last axis.
    """
    perm = list(node.attributes.get_ints("perm", ())) if is_op(node, "Transpose") else []
    inner = private_maker(node.inputs[0], node, "Reshape") if perm else None
    taken = _taken(node) if inner is not None else None
    source = None if inner is None else inner.inputs[0]
    if inner is None or taken is None or source is None or source.shape is None:
        return False
    middle, last = inner.outputs[0].shape, len(source.shape) - 1
    if middle is None or len(middle) != last + 2 or perm != [last, *range(last), last + 1]:
        return False
    if not all(same_dim(a, b) for a, b in zip(source.shape[:-1], middle[:last], strict=True)):
        return False
    count, width = middle[last:]
    if (
        not isinstance(count, int)
        or not isinstance(width, int)
        or count * width != source.shape[-1]
    ):
        return False
    split = _split(node, source, count, width, draft)
    for index, part in enumerate(split.outputs):
        part.name = f"{node.outputs[0].name}_part{index}"
        part.type, part.shape = node.outputs[0].type, ir.Shape([*source.shape[:-1], width])
    for reader, index in taken:
        replace(reader, "Identity", [split.outputs[index]])
    return True


def _taken(node: ir.Node) -> list[tuple[ir.Node, int]] | None:
    """Return what reads a node, if all of that takes one index of the first axis, with the index.

    That is a ``Gather`` of one number.
    """
    found = []
    for use in node.outputs[0].uses():
        index = constant_array(input_of(use.node, 1))
        takes = operator(use.node).is_table and use.idx == 0 and use.node.graph is node.graph
        if not takes or index is None or index.ndim or use.node.attributes.get_int("axis", 0):
            return None
        found.append((use.node, int(index)))
    return found if found and not node.outputs[0].is_graph_output() else None


def _split(node: ir.Node, source: ir.Value, count: int, width: int, draft: Draft) -> ir.Node:
    """Put a split of the last axis into equal parts before a node."""
    axis = len(source.shape or ()) - 1
    attributes: dict[str, int | Sequence[int]] = {"axis": axis}
    inputs = [source]
    if draft.opset < 13:
        attributes["split"] = [width] * count
    else:
        name = f"{node.outputs[0].name}/split"
        inputs.append(draft.constant([width] * count, ir.DataType.INT64, name))
    made = ir.node("Split", inputs, attributes, num_outputs=count)
    node_graph(node).insert_before(node, made)
    return made


def keep_axes(node: ir.Node, draft: Draft) -> bool:
    """Keep an axis that an ``Unsqueeze`` would put back.

    It was dropped by a reduction, by taking one index, or by a ``Squeeze``.
    """
    if not is_op(node, "Unsqueeze"):
        return False
    source = maker(node.inputs[0])
    if source is None or not source.inputs or source.graph is not node.graph:
        return False
    before = rank(source.inputs[0])
    added = axes_of(node, before)
    row = operator(source)
    if is_op(source, "Squeeze"):
        dropped = axes_of(source, before)
        if dropped is None or added is None or sorted(dropped) != sorted(added):
            return False
        replace(node, "Identity", [source.inputs[0]])
        return True
    if row.family == "reduction" and source.op_type.startswith("Reduce"):
        dropped = axes_of(source, before)
        alone = private_maker(node.inputs[0], node) is not None
        if source.attributes.get_int("keepdims", 1) or not alone or not dropped or added is None:
            return False
        if sorted(dropped) != sorted(added):
            return False
        ints = {"axes": dropped} if "axes" in source.attributes else {}
        replace(node, source.op_type, list(source.inputs), {**ints, "keepdims": 1})
        return True
    index = constant_array(input_of(source, 1)) if row.is_table else None
    axis = positive([source.attributes.get_int("axis", 0)], before)
    if index is None or index.ndim or axis is None or added != axis:
        return False
    one = draft.constant([int(index)], ir.DataType.INT64, f"{node.outputs[0].name}/index")
    replace(node, "Gather", [source.inputs[0], one], {"axis": axis[0]})
    return True


def same_shape(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Drop a ``Reshape`` whose numbers say no more than that every axis is as long as before."""
    source = node.inputs[0] if is_op(node, "Reshape") else None
    wanted = integers(input_of(node, 1)) if source is not None else None
    if source is None or source.shape is None or wanted is None or len(wanted) != len(source.shape):
        return False
    if node.attributes.get_int("allowzero", 0) and 0 in wanted:
        return False
    kept = [d in (0, n) for n, d in zip(source.shape, wanted, strict=True)]
    if not all(kept) and (kept.count(False), wanted.count(-1)) != (1, 1):
        return False
    if not all(kept) and wanted[kept.index(False)] != -1:
        return False
    replace(node, "Identity", [source])
    return True


def reduce_one(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Drop a mean, sum or extreme over axes of one element each, which are kept."""
    source = node.inputs[0] if is_op(node, *_OF_ONE) else None
    axes = None if source is None else axes_of(node, rank(source))
    if source is None or source.shape is None or not axes:
        return False
    if not node.attributes.get_int("keepdims", 1) or any(source.shape[a] != 1 for a in axes):
        return False
    replace(node, "Identity", [source])
    return True


def times_zero(node: ir.Node, draft: Draft) -> bool:
    """Replace an integer times zero, by which models keep inputs that they do not need."""
    if operator(node).arithmetic != "*":
        return False
    shapes = [static_shape(value) if value is not None else None for value in node.inputs]
    dtype = node.outputs[0].dtype
    if None in shapes or dtype is None or not dtype.is_integer():
        return False
    if not any(scalar(value) == 0 for value in node.inputs):
        return False
    lengths = np.broadcast_shapes(*(shape for shape in shapes if shape is not None))
    name = f"{node.outputs[0].name}/zero"
    replace(node, "Identity", [draft.constant(np.zeros(lengths), dtype, name)])
    return True


_OF_ONE = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")
"""Reductions that leave a single element as it is."""

_SEQUENCES, _ROWS = 3, 2  # axes of what a recurrent layer reads, and a Gemm


def branch_that_fits(node: ir.Node, draft: Draft) -> bool:
    """Take the branch whose result has as many axes as its reader wants, if the other has not.

    PyTorch writes ``x.squeeze(axis)`` as an ``If`` on the length of the axis. Where the axis stays,
    the model would fail.
    """
    if not is_op(node, "If") or len(node.outputs) != 1:
        return False
    if constant_array(node.inputs[0]) is not None:
        return False
    wanted = _wanted_rank(node.outputs[0])
    ends = [node.attributes[name].as_graph().outputs[0] for name in ("then_branch", "else_branch")]
    ranks = [_rank_inside(end) for end in ends]
    if wanted is None or None in ranks or [r == wanted for r in ranks].count(True) != 1:
        return False
    fits = draft.constant(ranks[0] == wanted, ir.DataType.BOOL, f"{node.outputs[0].name}/fits")
    node.replace_input_with(0, fits)
    return True


def _wanted_rank(value: ir.Value) -> int | None:
    """Return how many axes a reader needs a value to have, if one does."""
    for use in value.uses():
        row = operator(use.node)
        if use.idx == 0 and row.recurrent is not None:
            return _SEQUENCES
        with_bias = row.is_product and not (row.is_convolution or row.bias_is_separate)
        if use.idx == 0 and with_bias:
            return _ROWS
        if is_op(use.node, "Unsqueeze"):
            axes, wanted = axes_of(use.node, None), _wanted_rank(use.node.outputs[0])
            if axes is not None and wanted is not None:
                return wanted - len(axes)
    return None


def _rank_inside(value: ir.Value) -> int | None:
    """Return the number of axes of what a branch returns: of a value outside, or of its Squeeze."""
    node = value.producer()
    if rank(value) is not None or node is None:
        return rank(value)
    if is_op(node, "Identity"):
        return rank(node.inputs[0])
    outside = rank(node.inputs[0]) if is_op(node, "Squeeze") else None
    axes = None if outside is None else axes_of(node, outside)
    return None if outside is None or axes is None else outside - len(axes)
