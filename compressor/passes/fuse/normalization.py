"""Recognise layer normalization that was written out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compressor.graph.values import constant_array, is_op, static_shape
from compressor.passes.fuse.draft import Draft
from compressor.passes.fuse.edit import axes_of, maker, rank, replace, scalar, sole_reader


@dataclass(frozen=True)
class _Normalized:
    source: ir.Value
    epsilon: float


def layer_norm(node: ir.Node, draft: Draft) -> bool:
    """Replace ``(x - mean) / sqrt(variance + epsilon) [* scale] [+ bias]`` by LayerNormalization.

    Over the last axis only, and in float32, where the operator computes the same. RMSNormalization
    exists from opset 23 on only; below it the standard operators stay, which runtimes fuse.
    """
    if draft.opset < 17 or not is_op(node, "Div", "Mul"):
        return False
    found = _normalized(node)
    length = None if found is None else _last_length(found.source)
    if found is None or length is None or found.source.dtype != ir.DataType.FLOAT:
        return False
    last, scale = node, None
    reader = sole_reader(node.outputs[0])
    if is_op(reader, "Mul") and reader is not None:
        scale = _vector(reader, node.outputs[0], length)
        last = reader if scale is not None else node
    bias = None
    reader = sole_reader(last.outputs[0])
    if scale is not None and is_op(reader, "Add") and reader is not None:
        bias = _vector(reader, last.outputs[0], length)
        last = reader if bias is not None else last
    if scale is None:
        ones = np.ones(length, np.float32)
        scale = draft.constant(ones, ir.DataType.FLOAT, f"{node.outputs[0].name}/scale")
    inputs = [found.source, scale] + ([bias] if bias is not None else [])
    replace(last, "LayerNormalization", inputs, {"axis": -1, "epsilon": found.epsilon})
    return True


def _normalized(node: ir.Node) -> _Normalized | None:
    """Match ``(x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon)``."""
    deviation, root = node.inputs
    if is_op(node, "Mul"):
        inverse = maker(root, "Reciprocal")
        if inverse is None:
            deviation, root = root, deviation
            inverse = maker(root, "Reciprocal")
        root = None if inverse is None else inverse.inputs[0]
    subtract, square_root = maker(deviation, "Sub"), maker(root, "Sqrt")
    add = None if square_root is None else maker(square_root.inputs[0], "Add")
    if subtract is None or add is None or deviation is None:
        return None
    source = subtract.inputs[0]
    numbers = [scalar(v) for v in add.inputs]
    rest = [v for v, number in zip(add.inputs, numbers, strict=True) if number is None]
    epsilons = [number for number in numbers if number is not None]
    if source is None or len(rest) != 1 or len(epsilons) != 1:
        return None
    mean = _mean_of(subtract.inputs[1])
    squares = _mean_of(rest[0])
    if mean is not source or squares is None or not _is_square(squares, deviation):
        return None
    return _Normalized(source, epsilons[0])


def _mean_of(value: ir.Value | None) -> ir.Value | None:
    """Return what a value is the mean of, over the last axis, which is kept."""
    node = maker(value, "ReduceMean")
    if node is None or not node.attributes.get_int("keepdims", 1):
        return None
    count = rank(node.inputs[0])
    axes = axes_of(node, count)
    return node.inputs[0] if count is not None and axes == [count - 1] else None


def _is_square(value: ir.Value, of: ir.Value) -> bool:
    node = maker(value, "Mul", "Pow")
    if node is None or node.inputs[0] is not of:
        return False
    return node.inputs[1] is of if is_op(node, "Mul") else scalar(node.inputs[1]) == 2


def _last_length(value: ir.Value) -> int | None:
    if value.shape is None or not len(value.shape):
        return None
    last = value.shape[-1]
    return last if isinstance(last, int) else None


def _vector(node: ir.Node, other: ir.Value, length: int) -> ir.Value | None:
    """Return the other operand if it is a known vector of ``length``."""
    rest = [v for v in node.inputs if v is not other and v is not None]
    if len(rest) != 1 or static_shape(rest[0]) != (length,):
        return None
    known = rest[0].is_initializer() or constant_array(rest[0]) is not None
    return rest[0] if known else None
