"""Reductions and norms in LiteRT's operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from compressor.exporters.litert import moves
from compressor.exporters.litert.file import Tensor
from compressor.exporters.litert.lowering import Call
from compressor.exporters.litert.store import turned
from compressor.types.tensors import Array

_LEAST_NORM = float(np.finfo(np.float32).tiny)


def _axes(call: Call, rank: int) -> list[int]:
    """Return the axes of a reduction, from its second input or its attribute."""
    given = call.constant(1)
    axes = call.ints("axes") if given is None else [int(x) for x in given.reshape(-1)]
    if not axes and call.node.attributes.get_int("noop_with_empty_axes", 0) == 1:
        raise call.refusal("reduces over no axis")
    return sorted(axis % rank for axis in axes) or list(range(rank))


def _lie_in_order(axes: Sequence[int], rank: int) -> bool:
    """Whether what is left without some axes has ONNX's order if channels lie last."""
    left = [moves.axis_at(axis, rank, last=True) for axis in range(rank) if axis not in axes]
    return left == sorted(left)


def reduce(name: str, call: Call, before: str = "", after: str = "") -> None:
    """Write a reduction.

    Args:
        before: an operator that each element goes through first.
        after: one that each result goes through.
    """
    source = call.operand(0)
    rank, graph = len(source.shape), call.graph
    axes = _axes(call, rank)
    kept = bool(call.node.attributes.get_int("keepdims", 1))
    last = source.last and (kept or _lie_in_order(axes, rank))
    source = call.operand(0, last)
    if before:
        source = graph.emit(before, [source], source.shape, source.dtype, None, source.last)
    options = schema.ReducerOptionsT(keepDims=kept)
    places = graph.numbers(sorted(moves.axis_at(axis, rank, last) for axis in axes))
    last = last and kept
    if not after:
        call.give(name, [source, places], options, last=last)
        return
    shape = turned(call.shape) if last else call.shape
    made = graph.emit(name, [source, places], shape, source.dtype, options, last)
    call.give(after, [made], last=last)


def log_sum_exp(call: Call) -> None:
    """Write the logarithm of a sum of exponentials, none of which is above 1."""
    source = call.operand(0)
    rank, graph = len(source.shape), call.graph
    axes = _axes(call, rank)
    kept = bool(call.node.attributes.get_int("keepdims", 1))
    source = call.operand(0, source.last and (kept or _lie_in_order(axes, rank)))
    last, shape = source.last, source.shape
    places = [moves.axis_at(axis, rank, last) for axis in axes]
    greatest = _over(call, "REDUCE_MAX", source, places)
    below = graph.emit("SUB", [source, greatest], shape, "float32", schema.SubOptionsT(), last)
    total = _over(call, "SUM", graph.emit("EXP", [below], shape, "float32", None, last), places)
    operands = [graph.emit("LOG", [total], total.shape, "float32", None, last), greatest]
    if not kept:
        operands = [graph.reshaped(x, call.shape) for x in operands]
    call.give("ADD", operands, schema.AddOptionsT(), last=last and kept)


def _over(call: Call, name: str, source: Tensor, places: Sequence[int]) -> Tensor:
    """Return a reduction that keeps its axes."""
    options = schema.ReducerOptionsT(keepDims=True)
    shape = [1 if axis in places else length for axis, length in enumerate(source.shape)]
    operands = [source, call.graph.numbers(sorted(places))]
    return call.graph.emit(name, operands, shape, "float32", options, source.last)


def choose(name: str, call: Call) -> None:
    """Write an ArgMax or an ArgMin; of equal values, the first is taken."""
    if call.node.attributes.get_int("select_last_index", 0):
        raise call.refusal("takes the last of equal values, and LiteRT's takes the first")
    source = call.operand(0)
    rank = len(source.shape)
    axis = call.node.attributes.get_int("axis", 0) % rank
    last = source.last and _lie_in_order([axis], rank)
    source = call.operand(0, last)
    options = schema.ArgMaxOptionsT() if name == "ARG_MAX" else schema.ArgMinOptionsT()
    options.outputType = schema.TensorType.INT64
    place = moves.axis_at(axis, rank, last)
    operands = [source, call.graph.stored(np.array(place, np.int32), "axis")]
    if not call.node.attributes.get_int("keepdims", 1):
        call.give(name, operands, options)
        return
    shape = [length for at, length in enumerate(source.shape) if at != place]
    made = call.graph.emit(name, operands, shape, "int64", options)
    call.graph.keep(call.result, call.graph.reshaped(made, call.shape))


def accumulate(call: Call) -> None:
    """Write a CumSum."""
    source = call.operand(0)
    rank, attributes = len(source.shape), call.node.attributes
    given = call.constant(1)
    assert given is not None
    place = moves.axis_at(int(given.reshape(-1)[0]) % rank, rank, source.last)
    options = schema.CumsumOptionsT(
        exclusive=bool(attributes.get_int("exclusive", 0)),
        reverse=bool(attributes.get_int("reverse", 0)),
    )
    axis = call.graph.stored(np.array(place, np.int32), "axis")
    call.give("CUMSUM", [source, axis], options, last=source.last)


def reduce_plane(name: str, call: Call) -> None:
    """Write a reduction of all axes but those of samples and channels."""
    source = call.operand(0, last=True)
    options = schema.ReducerOptionsT(keepDims=True)
    places = call.graph.numbers(range(1, len(source.shape) - 1))
    call.give(name, [source, places], options, last=True)


# Norms


def unit_length(call: Call) -> None:
    """Write an LpNormalization; what is zero throughout stays zero."""
    source = call.operand(0)
    rank, graph = len(source.shape), call.graph
    axis = call.node.attributes.get_int("axis", -1) % rank
    places = [moves.axis_at(axis, rank, source.last)]
    squares = call.node.attributes.get_int("p", 2) != 1
    name, last = "SQUARE" if squares else "ABS", source.last
    norm = _over(
        call, "SUM", graph.emit(name, [source], source.shape, "float32", None, last), places
    )
    if squares:
        norm = graph.emit("SQRT", [norm], norm.shape, "float32", None, last)
    norm = graph.emit(
        "MAXIMUM", [norm, graph.scalar(_LEAST_NORM)], norm.shape, "float32", None, last
    )
    call.give("DIV", [source, norm], schema.DivOptionsT(), last=last)


def batch_norm(call: Call) -> None:
    """Write a BatchNormalization of constant statistics."""
    scale, bias, mean, variance = (call.constant(index) for index in range(1, 5))
    assert scale is not None
    assert bias is not None
    assert mean is not None
    assert variance is not None
    factor = scale / np.sqrt(variance + call.node.attributes.get_float("epsilon", 1e-5))
    _scaled(call, call.operand(0, last=True), factor, bias - mean * factor, last=True)


def layer_norm(call: Call) -> None:
    """Write a LayerNormalization over the last axes."""
    _normed(call, _standardized)


def rms_norm(call: Call) -> None:
    """Write an RMSNormalization over the last axes."""
    _normed(call, _with_unit_variance)


def _normed(call: Call, normalized: Callable[[Call, Tensor, Sequence[int]], Tensor]) -> None:
    """Normalize over the last axes, and multiply with a scale of them."""
    source = call.operand(0, last=False)
    rank = len(source.shape)
    axes = range(call.node.attributes.get_int("axis", -1) % rank, rank)
    scale = call.constant(1)
    assert scale is not None
    _scaled(call, normalized(call, source, axes), scale, call.constant(2))


def instance_norm(call: Call) -> None:
    """Write an InstanceNormalization."""
    source = call.operand(0, last=True)
    scale = call.constant(1)
    assert scale is not None
    axes = range(1, len(source.shape) - 1)
    _scaled(call, _standardized(call, source, axes), scale, call.constant(2), last=True)


def group_norm(call: Call) -> None:
    """Write a GroupNormalization; groups become an axis while their moments are computed."""
    source = call.operand(0, last=True)
    scale, shift = call.constant(1), call.constant(2)
    assert scale is not None
    assert shift is not None
    samples, *plane, channels = source.shape
    groups = call.node.attributes.get_int("num_groups", 1)
    each = channels // groups
    if scale.size == groups != channels:  # up to opset 20
        scale, shift = np.repeat(scale, each), np.repeat(shift, each)
    apart = (samples, int(np.prod(plane, dtype=np.int64)), groups, each)
    made = _standardized(call, call.graph.reshaped(source, apart), (1, 3))
    _scaled(call, call.graph.reshaped(made, source.shape, last=True), scale, shift, last=True)


def _scaled(
    call: Call, values: Tensor, factor: Array, shift: Array | None, *, last: bool = False
) -> None:
    """Multiply, and add, along the last axes of ``values``."""
    graph = call.graph
    operands = [values, graph.stored(factor.astype(np.float32), "affine")]
    options: Any = schema.MulOptionsT()
    if shift is None:
        call.give("MUL", operands, options, last=last)
        return
    made = graph.emit("MUL", operands, values.shape, "float32", options, last)
    shifts = graph.stored(shift.astype(np.float32), "affine")
    call.give("ADD", [made, shifts], schema.AddOptionsT(), last=last)


def _standardized(call: Call, source: Tensor, axes: Sequence[int]) -> Tensor:
    """Return values with mean 0 and variance 1 over some axes."""
    mean = _over(call, "MEAN", source, axes)
    centred = call.graph.emit(
        "SUB", [source, mean], source.shape, "float32", schema.SubOptionsT(), source.last
    )
    return _with_unit_variance(call, centred, axes)


def _with_unit_variance(call: Call, source: Tensor, axes: Sequence[int]) -> Tensor:
    """Return values whose squares have the mean 1 over some axes."""
    graph, shape, last = call.graph, source.shape, source.last
    square = graph.emit("MUL", [source, source], shape, "float32", schema.MulOptionsT(), last)
    variance = _over(call, "MEAN", square, axes)
    small = variance.shape
    epsilon = graph.scalar(call.node.attributes.get_float("epsilon", 1e-5))
    shifted = graph.emit("ADD", [variance, epsilon], small, "float32", schema.AddOptionsT(), last)
    inverse = graph.emit("RSQRT", [shifted], small, "float32", None, last)
    return graph.emit("MUL", [source, inverse], shape, "float32", schema.MulOptionsT(), last)
