"""The table of operators: how each ONNX operator is written with LiteRT's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from compressor.exporters.litert import blocks, formulas, moves, reductions
from compressor.exporters.litert.file import Quantization
from compressor.exporters.litert.formulas import formula
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
    options = schema.LeakyReluOptionsT(alpha=call.node.attributes.get_float("alpha", 0.01))
    source = call.operand(0)
    call.give("LEAKY_RELU", [source], options, last=source.last)


def _gelu(call: Call) -> None:
    options = schema.GeluOptionsT(
        approximate=call.node.attributes.get_string("approximate", "none") == "tanh"
    )
    source = call.operand(0)
    call.give("GELU", [source], options, last=source.last)


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


def _softmax(name: str, call: Call) -> None:
    source = call.operand(0)
    rank = len(source.shape)
    axis = call.node.attributes.get_int("axis", -1) % rank
    last = rank >= _TURNED and axis == 1
    options = None
    if name == "SOFTMAX":
        options = schema.SoftmaxOptionsT(beta=1.0)
    if last or axis == rank - 1:
        call.give(name, [call.operand(0, last)], options, last=last, written=_OF_SHARES)
        return
    graph, source = call.graph, call.operand(0, last=False)
    order = list(range(rank))
    order[axis], order[-1] = rank - 1, axis  # and back
    shape = [source.shape[at] for at in order]
    turns, places = schema.TransposeOptionsT(), graph.numbers(order)
    moved = graph.emit(
        "TRANSPOSE", [source, places], shape, source.dtype, turns, False, None, source.quantization
    )
    codes = _OF_SHARES if call.codes else None
    made = graph.emit(name, [moved], shape, source.dtype, options, False, None, codes)
    call.give("TRANSPOSE", [made, places], turns, written=_OF_SHARES)


def _mod(call: Call) -> None:
    if call.node.attributes.get_int("fmod", 0):
        raise call.refusal("its remainder has the sign of what is divided, unlike LiteRT's")
    _by_element("FLOOR_MOD")(call)


RULES: Mapping[str, Rule] = {
    "Conv": Rule(conv, integer=True, fuses=True),
    "ConvTranspose": Rule(conv_transpose, integer=True),
    "Gemm": Rule(dense, integer=True, fuses=True),
    "MatMul": Rule(dense, integer=True, fuses=True),
    "MaxPool": Rule(max_pool, integer=True, fuses=True),
    "AveragePool": Rule(average_pool, integer=True, fuses=True),
    "GlobalAveragePool": Rule(partial(reductions.reduce_plane, "MEAN"), integer=True),
    "GlobalMaxPool": Rule(partial(reductions.reduce_plane, "REDUCE_MAX")),
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
    "Not": Rule(_by_element("LOGICAL_NOT")), "Xor": Rule(_by_element("NOT_EQUAL")),
    "Relu": Rule(_by_element("RELU"), integer=True), "Clip": Rule(_clip),
    "LeakyRelu": Rule(_leaky_relu, integer=True), "PRelu": Rule(_by_element("PRELU")),
    "Elu": Rule(formula(formulas.elu)), "Gelu": Rule(_gelu),
    "Celu": Rule(formula(formulas.celu)), "Selu": Rule(formula(formulas.selu)),
    "Sigmoid": Rule(_by_element("LOGISTIC", written=_OF_SHARES), integer=True),
    "Tanh": Rule(_by_element("TANH", written=_OF_SIGNED_SHARES), integer=True),
    "HardSwish": Rule(_by_element("HARD_SWISH"), integer=True),
    "HardSigmoid": Rule(formula(formulas.hard_sigmoid)), "Swish": Rule(formula(formulas.swish)),
    "Softplus": Rule(formula(formulas.soft_plus)), "Mish": Rule(formula(formulas.mish)),
    "Softsign": Rule(formula(formulas.soft_sign)), "Tan": Rule(formula(formulas.tangent)),
    "Reciprocal": Rule(formula(formulas.reciprocal)), "Sign": Rule(_by_element("SIGN")),
    "IsNaN": Rule(formulas.not_a_number), "IsInf": Rule(formulas.infinite), "Mod": Rule(_mod),
    "Abs": Rule(_by_element("ABS")), "Neg": Rule(_by_element("NEG")),
    "Exp": Rule(_by_element("EXP")), "Log": Rule(_by_element("LOG")),
    "Sqrt": Rule(_by_element("SQRT")), "Sin": Rule(_by_element("SIN")),
    "Cos": Rule(_by_element("COS")), "Floor": Rule(_by_element("FLOOR")),
    "Ceil": Rule(_by_element("CEIL")), "Round": Rule(_by_element("ROUND")),
    "Softmax": Rule(partial(_softmax, "SOFTMAX"), integer=True),
    "LogSoftmax": Rule(partial(_softmax, "LOG_SOFTMAX")),
    "ReduceMean": Rule(partial(reductions.reduce, "MEAN"), integer=True),
    "ReduceSum": Rule(partial(reductions.reduce, "SUM")),
    "ReduceMax": Rule(partial(reductions.reduce, "REDUCE_MAX")),
    "ReduceMin": Rule(partial(reductions.reduce, "REDUCE_MIN")),
    "ReduceProd": Rule(partial(reductions.reduce, "REDUCE_PROD")),
    "ReduceL1": Rule(partial(reductions.reduce, "SUM", before="ABS")),
    "ReduceL2": Rule(partial(reductions.reduce, "SUM", before="SQUARE", after="SQRT")),
    "ReduceSumSquare": Rule(partial(reductions.reduce, "SUM", before="SQUARE")),
    "ReduceLogSum": Rule(partial(reductions.reduce, "SUM", after="LOG")),
    "ReduceLogSumExp": Rule(reductions.log_sum_exp),
    "ArgMax": Rule(partial(reductions.choose, "ARG_MAX")),
    "ArgMin": Rule(partial(reductions.choose, "ARG_MIN")),
    "CumSum": Rule(reductions.accumulate), "LpNormalization": Rule(reductions.unit_length),
    "Reshape": Rule(moves.reshape), "Flatten": Rule(moves.reshape), "Squeeze": Rule(moves.reshape),
    "Unsqueeze": Rule(moves.reshape), "Transpose": Rule(moves.transpose),
    "Concat": Rule(moves.concat, integer=True), "Split": Rule(moves.split),
    "Slice": Rule(moves.cut_out),
    "Pad": Rule(moves.pad), "Gather": Rule(moves.gather), "Expand": Rule(moves.expand),
    "Tile": Rule(moves.tile), "Trilu": Rule(moves.triangle), "GatherND": Rule(moves.gather_each),
    "DepthToSpace": Rule(blocks.depth_to_space), "SpaceToDepth": Rule(blocks.space_to_depth),
    "TopK": Rule(moves.greatest),
    "Cast": Rule(moves.cast),
    "CastLike": Rule(moves.cast),
    "Identity": Rule(_same), "Dropout": Rule(_same),
    "BatchNormalization": Rule(reductions.batch_norm),
    "InstanceNormalization": Rule(reductions.instance_norm),
    "GroupNormalization": Rule(reductions.group_norm),
    "LayerNormalization": Rule(reductions.layer_norm),
    "RMSNormalization": Rule(reductions.rms_norm),
}  # fmt: skip
"""Rules by the name of the operator in ONNX; other operators are refused by name."""
