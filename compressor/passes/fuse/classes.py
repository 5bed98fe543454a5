"""Rules for the labels of classifiers: what is looked up for the index of the greatest score."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.graph.values import constant_array, input_of, is_op
from compressor.passes.fuse.draft import (
    Draft,
    integers,
    positive,
    private_maker,
    put,
    rank,
    replace,
)

_LARGEST = 1 << 12  # labels that are stored in another type
_ML = "ai.onnx.ml"


def look_up_labels(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Replace a flat ``ArrayFeatureExtractor`` of one row by a ``Gather`` of flat indices."""
    if not is_op(node, "Reshape") or integers(input_of(node, 1)) != [-1] or node.inputs[0] is None:
        return False
    picks = node.inputs[0].producer()
    if picks is None or (picks.domain, picks.op_type) != (_ML, "ArrayFeatureExtractor"):
        return False
    if rank(picks.inputs[0]) != 1:
        return False
    flat = put(node, "Reshape", [picks.inputs[1], node.inputs[1]])
    flat.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    replace(node, "Gather", [picks.inputs[0], flat.outputs[0]], {"axis": 0})
    return True


def cast_labels(node: ir.Node, draft: Draft) -> bool:
    """Store looked-up constants in the type that they are cast to."""
    gather = private_maker(node.inputs[0], node) if is_op(node, "Cast") else None
    gather = gather if operator(gather).is_table else None
    table = constant_array(gather.inputs[0]) if gather is not None else None
    dtype = ir.DataType(node.attributes.get_int("to", 0))
    if gather is None or table is None or table.dtype.kind not in "iub" or table.size > _LARGEST:
        return False
    if dtype not in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.FLOAT):
        return False
    made = draft.constant(table.astype(dtype.numpy()), dtype, f"{node.outputs[0].name}/labels")
    axis = gather.attributes.get_int("axis", 0)
    replace(node, "Gather", [made, gather.inputs[1]], {"axis": axis})
    return True


def index_without_axis(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Drop the axis of the greatest of each row, not keep it to drop it by a ``Reshape``."""
    if not is_op(node, "Reshape") or integers(input_of(node, 1)) != [-1]:
        return False
    greatest = private_maker(node.inputs[0], node, "ArgMax", "ArgMin")
    if greatest is None or rank(greatest.inputs[0]) != 2:
        return False
    if not greatest.attributes.get_int("keepdims", 1):
        return False
    numbers = {name: a.as_int() for name, a in greatest.attributes.items()}
    replace(node, greatest.op_type, list(greatest.inputs), {**numbers, "keepdims": 0})
    return True


def labels_that_count(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Take the index itself where the labels are 0, 1, 2 and so on."""
    if not operator(node).is_table or node.attributes.get_int("axis", 0) != 0:
        return False
    index = node.inputs[1]
    greatest = None if index is None else index.producer()
    table = constant_array(node.inputs[0]) if is_op(greatest, "ArgMax", "ArgMin") else None
    if greatest is None or table is None or table.ndim != 1 or table.dtype != np.int64:
        return False
    scores = greatest.inputs[0]
    axis = positive([greatest.attributes.get_int("axis", 0)], rank(scores))
    if scores is None or scores.shape is None or axis is None:
        return False
    if scores.shape[axis[0]] != table.size or not np.array_equal(table, np.arange(table.size)):
        return False
    replace(node, "Identity", [index])
    return True
