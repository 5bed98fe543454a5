"""The table of operators: how each ONNX operator is written with LiteRT's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from compressor.exporters.litert import moves
from compressor.exporters.litert.file import Quantization, Tensor
from compressor.exporters.litert.lowering import Call, Rule, bounds
from compressor.exporters.litert.store import turned, type_of
from compressor.exporters.litert.windows import (
    average_pool,
    conv,
    conv_transpose,
    dense,
    max_pool,
    resize,
)
from compressor.types.tensors import Array

_TURNED = 3
_OF_SHARES = Quantization(np.array([1 / 256], np.float32), -128)  # results from 0 to 1
_OF_SIGNED_SHARES = Quantization(np.array([1 / 128], np.float32))  # results from -1 to 1


def _by_element(
    name: str, options: str = "", written: Quantization | None = None
) -> Callable[[Call], None]:
    """Return what writes an operator of single elements, sums and the like included."""

    def lower(call: Call) -> None:
        last = moves.is_last(call)
        made: Any = getattr(schema, options)() if options else None
        if made is not None and hasattr(made, "fusedActivationFunction"):
            made.fusedActivationFunction = call.fused
        operands = moves.elements(call, last)
        call.give(name, operands, made, last=last, written=written)

    return lower


def _of_many(name: str) -> Callable[[Call], None]:
    """Return what writes an operator of any number of inputs as one of pairs."""

    def lower(call: Call) -> None:
        last = moves.is_last(call)
        first, *others = moves.elements(call, last)
        if not others:
            _same(call)
            return
        shape = turned(call.shape) if last else call.shape
        for other in others[:-1]:
            first = call.graph.emit(name, [first, other], shape, type_of(call.result), None, last)
        call.give(name, [first, others[-1]], last=last)

    return lower


def _same(call: Call) -> None:
    """Let the result be the first input."""
    call.graph.keep(call.result, call.operand(0))


def _leaky_relu(call: Call) -> None:
    options = schema.LeakyReluOptionsT()
    options.alpha = call.node.attributes.get_float("alpha", 0.01)
    source = call.operand(0)
    call.give("LEAKY_RELU", [source], options, last=source.last)


def _gelu(call: Call) -> None:
    options = schema.GeluOptionsT()
    options.approximate = call.node.attributes.get_string("approximate", "none") == "tanh"
    source = call.operand(0)
    call.give("GELU", [source], options, last=source.last)


def _elu(call: Call) -> None:
    if call.node.attributes.get_float("alpha", 1.0) != 1.0:
        raise call.refusal("its alpha is not 1, as LiteRT's is")
    _by_element("ELU")(call)


def _clip(call: Call) -> None:
    low, high = bounds(call.graph, call.node)
    source = call.operand(0)
    shape = source.shape
    if low == 0 and high == np.inf:
        call.give("RELU", [source], last=source.last)
        return
    if np.isfinite(low) and np.isfinite(high):
        least = call.graph.scalar(low)
        source = call.graph.emit("MAXIMUM", [source, least], shape, "float32", None, source.last)
        low = -np.inf
    bound, name = (high, "MINIMUM") if np.isfinite(high) else (low, "MAXIMUM")
    if not np.isfinite(bound):
        _same(call)
        return
    call.give(name, [source, call.graph.scalar(bound)], last=source.last)


def _formula(
    build: Callable[[_Floats, Tensor], tuple[str, list[Tensor]]],
) -> Callable[[Call], None]:
    """Return what writes an activation as several operators."""

    def lower(call: Call) -> None:
        source = call.operand(0)
        name, operands = build(_Floats(call, source), source)
        call.give(name, operands, last=source.last)

    return lower


class _Floats:
    """Emits operators of single floats, all in one shape."""

    def __init__(self, call: Call, like: Tensor):
        self.call = call
        self._like = like

    def __call__(self, name: str, *operands: Tensor | float) -> Tensor:
        graph, like = self.call.graph, self._like
        tensors = [x if isinstance(x, Tensor) else graph.scalar(x) for x in operands]
        return graph.emit(name, tensors, like.shape, "float32", None, like.last)

    def number(self, value: float) -> Tensor:
        return self.call.graph.scalar(value)


def _hard_sigmoid(floats: _Floats, x: Tensor) -> tuple[str, list[Tensor]]:
    attributes = floats.call.node.attributes
    slope, shift = attributes.get_float("alpha", 0.2), attributes.get_float("beta", 0.5)
    line = floats("ADD", floats("MUL", x, slope), shift)
    return "MINIMUM", [floats("MAXIMUM", line, 0.0), floats.number(1.0)]


def _swish(floats: _Floats, x: Tensor) -> tuple[str, list[Tensor]]:
    factor = floats.call.node.attributes.get_float("alpha", 1.0)
    return "MUL", [x, floats("LOGISTIC", x if factor == 1.0 else floats("MUL", x, factor))]


def _soft(floats: _Floats, x: Tensor) -> tuple[str, list[Tensor]]:
    """Write log(1 + exp(x)) so that it does not overflow."""
    tail = floats("LOG", floats("ADD", floats("EXP", floats("NEG", floats("ABS", x))), 1.0))
    return "ADD", [floats("RELU", x), tail]


def _mish(floats: _Floats, x: Tensor) -> tuple[str, list[Tensor]]:
    name, operands = _soft(floats, x)
    return "MUL", [x, floats("TANH", floats(name, *operands))]


def _reciprocal(floats: _Floats, x: Tensor) -> tuple[str, list[Tensor]]:
    return "DIV", [floats.number(1.0), x]


def _softmax(name: str, call: Call) -> None:
    source = call.operand(0)
    rank = len(source.shape)
    axis = call.node.attributes.get_int("axis", -1) % rank
    last = rank >= _TURNED and axis == 1
    if not last and axis != rank - 1:
        raise call.refusal(f"is over axis {axis}, which is neither the channels' nor the last")
    options = None
    if name == "SOFTMAX":
        options = schema.SoftmaxOptionsT()
        options.beta = 1.0
    call.give(name, [call.operand(0, last)], options, last=last, written=_OF_SHARES)


def _axes(call: Call, rank: int) -> list[int]:
    """Return the axes of a reduction, from its second input or its attribute."""
    given = call.constant(1)
    axes = call.ints("axes") if given is None else [int(x) for x in given.reshape(-1)]
    return sorted(axis % rank for axis in axes) or list(range(rank))


def _reduce(name: str, call: Call) -> None:
    source = call.operand(0)
    rank = len(source.shape)
    axes = _axes(call, rank)
    kept = bool(call.node.attributes.get_int("keepdims", 1))
    last = source.last and (kept or len(call.shape) < _TURNED)
    source = call.operand(0, last)
    options = schema.ReducerOptionsT()
    options.keepDims = kept
    places = call.graph.numbers(sorted(moves.axis_at(axis, rank, last) for axis in axes))
    call.give(name, [source, places], options, last=last and kept)


def _global(name: str, call: Call) -> None:
    source = call.operand(0, last=True)
    options = schema.ReducerOptionsT()
    options.keepDims = True
    places = call.graph.numbers(range(1, len(source.shape) - 1))
    call.give(name, [source, places], options, last=True)


def _scaled(call: Call, values: Tensor, factor: Array, shift: Array) -> None:
    """Multiply and add along the channels, which are the last axis of ``values``."""
    graph = call.graph
    factors, shifts = (graph.stored(x.astype(np.float32), "affine") for x in (factor, shift))
    made = graph.emit("MUL", [values, factors], values.shape, "float32", schema.MulOptionsT(), True)
    call.give("ADD", [made, shifts], schema.AddOptionsT(), last=True)


def _batch_norm(call: Call) -> None:
    scale, bias, mean, variance = (call.constant(index) for index in range(1, 5))
    assert scale is not None
    assert bias is not None
    assert mean is not None
    assert variance is not None
    factor = scale / np.sqrt(variance + call.node.attributes.get_float("epsilon", 1e-5))
    _scaled(call, call.operand(0, last=True), factor, bias - mean * factor)


def _layer_norm(call: Call) -> None:
    source = call.operand(0, last=False)
    rank, graph = len(source.shape), call.graph
    if call.node.attributes.get_int("axis", -1) % rank != rank - 1:
        raise call.refusal("is over more than the last axis")
    centred = _standardized(call, source, [rank - 1])
    scale, bias = call.constant(1), call.constant(2)
    assert scale is not None
    factors = graph.stored(scale.astype(np.float32), "affine")
    if bias is None:
        call.give("MUL", [centred, factors], schema.MulOptionsT())
        return
    made = graph.emit("MUL", [centred, factors], source.shape, "float32", schema.MulOptionsT())
    call.give("ADD", [made, graph.stored(bias.astype(np.float32), "affine")], schema.AddOptionsT())


def _instance_norm(call: Call) -> None:
    source = call.operand(0, last=True)
    scale, bias = call.constant(1), call.constant(2)
    assert scale is not None
    assert bias is not None
    axes = list(range(1, len(source.shape) - 1))
    _scaled(call, _standardized(call, source, axes), scale, bias)


def _standardized(call: Call, source: Tensor, axes: Sequence[int]) -> Tensor:
    """Return values with mean 0 and variance 1 over some axes."""
    graph, shape, last = call.graph, source.shape, source.last
    options = schema.ReducerOptionsT()
    options.keepDims = True
    small = tuple(1 if axis in axes else length for axis, length in enumerate(shape))
    places = graph.numbers(axes)
    mean = graph.emit("MEAN", [source, places], small, "float32", options, last)
    centred = graph.emit("SUB", [source, mean], shape, "float32", schema.SubOptionsT(), last)
    square = graph.emit("MUL", [centred, centred], shape, "float32", schema.MulOptionsT(), last)
    variance = graph.emit("MEAN", [square, places], small, "float32", options, last)
    epsilon = graph.scalar(call.node.attributes.get_float("epsilon", 1e-5))
    shifted = graph.emit("ADD", [variance, epsilon], small, "float32", schema.AddOptionsT(), last)
    inverse = graph.emit("RSQRT", [shifted], small, "float32", None, last)
    return graph.emit("MUL", [centred, inverse], shape, "float32", schema.MulOptionsT(), last)


RULES: Mapping[str, Rule] = {
    "Conv": Rule(conv, integer=True, fuses=True),
    "ConvTranspose": Rule(conv_transpose, integer=True),
    "Gemm": Rule(dense, integer=True, fuses=True),
    "MatMul": Rule(dense, integer=True, fuses=True),
    "MaxPool": Rule(max_pool, integer=True, fuses=True),
    "AveragePool": Rule(average_pool, integer=True, fuses=True),
    "GlobalAveragePool": Rule(partial(_global, "MEAN"), integer=True),
    "GlobalMaxPool": Rule(partial(_global, "REDUCE_MAX")),
    "Resize": Rule(resize, integer=True),
    "Add": Rule(_by_element("ADD", "AddOptionsT"), integer=True, fuses=True),
    "Sub": Rule(_by_element("SUB", "SubOptionsT"), integer=True, fuses=True),
    "Mul": Rule(_by_element("MUL", "MulOptionsT"), integer=True, fuses=True),
    "Div": Rule(_by_element("DIV", "DivOptionsT"), fuses=True),
    "Pow": Rule(_by_element("POW")),
    "Min": Rule(_of_many("MINIMUM")), "Max": Rule(_of_many("MAXIMUM")),
    "Sum": Rule(_of_many("ADD")),
    "Where": Rule(_by_element("SELECT_V2")), "Equal": Rule(_by_element("EQUAL")),
    "Greater": Rule(_by_element("GREATER")), "Less": Rule(_by_element("LESS")),
    "GreaterOrEqual": Rule(_by_element("GREATER_EQUAL")),
    "LessOrEqual": Rule(_by_element("LESS_EQUAL")),
    "And": Rule(_by_element("LOGICAL_AND")), "Or": Rule(_by_element("LOGICAL_OR")),
    "Not": Rule(_by_element("LOGICAL_NOT")),
    "Relu": Rule(_by_element("RELU"), integer=True), "Clip": Rule(_clip),
    "LeakyRelu": Rule(_leaky_relu, integer=True), "PRelu": Rule(_by_element("PRELU")),
    "Elu": Rule(_elu), "Gelu": Rule(_gelu),
    "Sigmoid": Rule(_by_element("LOGISTIC", written=_OF_SHARES), integer=True),
    "Tanh": Rule(_by_element("TANH", written=_OF_SIGNED_SHARES), integer=True),
    "HardSwish": Rule(_by_element("HARD_SWISH"), integer=True),
    "HardSigmoid": Rule(_formula(_hard_sigmoid)), "Swish": Rule(_formula(_swish)),
    "Softplus": Rule(_formula(_soft)), "Mish": Rule(_formula(_mish)),
    "Reciprocal": Rule(_formula(_reciprocal)),
    "Abs": Rule(_by_element("ABS")), "Neg": Rule(_by_element("NEG")),
    "Exp": Rule(_by_element("EXP")), "Log": Rule(_by_element("LOG")),
    "Sqrt": Rule(_by_element("SQRT")), "Sin": Rule(_by_element("SIN")),
    "Cos": Rule(_by_element("COS")), "Floor": Rule(_by_element("FLOOR")),
    "Ceil": Rule(_by_element("CEIL")), "Round": Rule(_by_element("ROUND")),
    "Softmax": Rule(partial(_softmax, "SOFTMAX"), integer=True),
    "LogSoftmax": Rule(partial(_softmax, "LOG_SOFTMAX")),
    "ReduceMean": Rule(partial(_reduce, "MEAN"), integer=True),
    "ReduceSum": Rule(partial(_reduce, "SUM")), "ReduceMax": Rule(partial(_reduce, "REDUCE_MAX")),
    "ReduceMin": Rule(partial(_reduce, "REDUCE_MIN")),
    "ReduceProd": Rule(partial(_reduce, "REDUCE_PROD")),
    "Reshape": Rule(moves.reshape), "Flatten": Rule(moves.reshape), "Squeeze": Rule(moves.reshape),
    "Unsqueeze": Rule(moves.reshape), "Transpose": Rule(moves.transpose),
    "Concat": Rule(moves.concat, integer=True), "Split": Rule(moves.split),
    "Slice": Rule(moves.cut_out),
    "Pad": Rule(moves.pad), "Gather": Rule(moves.gather), "Expand": Rule(moves.expand),
    "Cast": Rule(moves.cast),
    "CastLike": Rule(moves.cast),
    "Identity": Rule(_same), "Dropout": Rule(_same),
    "BatchNormalization": Rule(_batch_norm), "LayerNormalization": Rule(_layer_norm),
    "InstanceNormalization": Rule(_instance_norm),
}  # fmt: skip
"""By the name of the operator in ONNX; what is not here is refused by name."""
