"""What 16-bit floats do to single ONNX operators, and float16 to constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import isfinite

import numpy as np
import onnx

from compressor.types.tensors import Array

HALF_MAX = float(np.finfo(np.float16).max)

_SUM = "adds up many terms"
_WIDE = "its values span more than float16 does"
_ANGLE = "reduces its argument by a period"
PLACE = "computes places, not signals"
_CHOICE = "equal values would choose another index"
CODES = "works with integer codes"
_TYPED = "an attribute sets its type"
_LIST = "works with a sequence of tensors"

ISLANDS: Mapping[str, str] = {
    "AffineGrid": PLACE,
    "ArgMax": _CHOICE,
    "ArgMin": _CHOICE,
    "Bernoulli": _TYPED,
    "CastLike": _TYPED,
    "ConcatFromSequence": _LIST,
    "Cos": _ANGLE,
    "Cosh": _WIDE,
    "CumSum": _SUM,
    "DFT": _SUM,
    "DequantizeLinear": CODES,
    "Det": _SUM,
    "DynamicQuantizeLinear": CODES,
    "Exp": _WIDE,
    "EyeLike": _TYPED,
    "GlobalAveragePool": _SUM,
    "GlobalLpPool": _SUM,
    "GridSample": PLACE,
    "InstanceNormalization": _SUM,
    "LRN": _SUM,
    "Log": _WIDE,
    "LogSoftmax": _SUM,
    "LpNormalization": _SUM,
    "MaxRoiPool": PLACE,
    "MeanVarianceNormalization": _SUM,
    "MelWeightMatrix": PLACE,
    "Multinomial": _TYPED,
    "NegativeLogLikelihoodLoss": _SUM,
    "NonMaxSuppression": PLACE,
    "Optional": _LIST,
    "OptionalGetElement": _LIST,
    "Pow": _WIDE,
    "QuantizeLinear": CODES,
    "RandomNormal": _TYPED,
    "RandomNormalLike": _TYPED,
    "RandomUniform": _TYPED,
    "RandomUniformLike": _TYPED,
    "Range": PLACE,
    "Reciprocal": _WIDE,
    "ReduceL1": _SUM,
    "ReduceL2": _SUM,
    "ReduceLogSum": _SUM,
    "ReduceLogSumExp": _SUM,
    "ReduceMean": _SUM,
    "ReduceProd": _WIDE,
    "ReduceSum": _SUM,
    "ReduceSumSquare": _SUM,
    "Resize": PLACE,
    "RoiAlign": PLACE,
    "STFT": _SUM,
    "SequenceAt": _LIST,
    "SequenceConstruct": _LIST,
    "SequenceEmpty": _LIST,
    "SequenceErase": _LIST,
    "SequenceInsert": _LIST,
    "Sin": _ANGLE,
    "Sinh": _WIDE,
    "Softmax": _SUM,
    "SoftmaxCrossEntropyLoss": _SUM,
    "SplitToSequence": _LIST,
    "Sqrt": _WIDE,
    "Tan": _ANGLE,
    "TopK": _CHOICE,
    "Upsample": PLACE,
}
"""Operators that stay in float32 wherever they are.

Normalizations that compute their statistics in float32 whatever their inputs are, such as
LayerNormalization by its ``stash_type``, are not among them.
"""

FOLLOWERS = frozenset(
    {
        *("Abs", "Add", "Cast", "Clip", "Compress", "Concat", "DepthToSpace", "Div", "Dropout"),
        *("Equal", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Greater"),
        *("GreaterOrEqual", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual"),
        *("Max", "Min", "Mul", "Neg", "Pad", "Relu", "Reshape", "ScatterElements", "ScatterND"),
        *("Sigmoid", "Sign", "Slice", "SpaceToDepth", "Split", "Squeeze", "Sub", "Sum", "Tanh"),
        *("Tile", "Transpose", "Trilu", "Unsqueeze", "Where"),
    }
)
"""Cheap operators: among float32 neighbours they stay float32, so that nothing is cast twice."""

BOUNDED = frozenset({"Clip", "Sigmoid", "Sign", "Tanh"})
"""Followers whose output is moderate whatever they read."""

INTEGER_PRODUCTS = ("MatMulInteger", "ConvInteger", "DynamicQuantizeLinear")
"""Operators whose results must be scaled before float16 can hold them."""


def admits(dtype: str, op_type: str, opset: int, positions: Sequence[int]) -> bool:
    """Whether an operator of the default domain takes an element type at these inputs."""
    schema = _schema(op_type, opset)
    if schema is None:
        return False
    kinds = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    types = (_formal(schema.inputs, position).type_str for position in positions)
    return all(f"tensor({dtype})" in kinds.get(kind, {kind}) for kind in types)


def bound_outputs(op_type: str, opset: int, positions: Sequence[int], count: int) -> list[int]:
    """Return which of ``count`` outputs have the type of an input at one of these positions."""
    schema = _schema(op_type, opset)
    if schema is None:
        return []
    bound = {_formal(schema.inputs, position).type_str for position in positions}
    return [i for i in range(count) if _formal(schema.outputs, i).type_str in bound]


def extreme(array: Array) -> str:
    """Return what float16 cannot hold of a constant; empty if nothing matters.

    Values that vanish matter only in a constant of one element, such as an epsilon.
    """
    if not array.size:
        return ""
    low, high = float(array.min()), float(array.max())
    if not (isfinite(low) and isfinite(high)):
        array = array[np.isfinite(array)]
        return extreme(array)
    largest = max(-low, high)
    if largest > HALF_MAX:
        return f"reaches {largest:.3g}, above {HALF_MAX:.0f}"
    if array.size == 1 and largest != 0 and np.float16(largest) == 0:
        return f"is {largest:.3g}, 0 in float16"
    return ""


@cache
def _schema(op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


def _formal(
    parameters: Sequence[onnx.defs.OpSchema.FormalParameter], index: int
) -> onnx.defs.OpSchema.FormalParameter:
    """Return the parameter at a position; the last one may stand for any number."""
    return parameters[min(index, len(parameters) - 1)]
