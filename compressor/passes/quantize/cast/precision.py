"""What 16-bit floats do to single ONNX operators, and float16 to constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import isfinite

import numpy as np
import onnx

from compressor.graph.operators import Float16, operator_named
from compressor.types.tensors import Array

HALF_MAX = float(np.finfo(np.float16).max)

PLACE = "computes places, not signals"
CODES = "works with integer codes"
_REASONS: Mapping[Float16, str] = {
    "sum": "adds up many terms",
    "range": "its values span more than float16 does",
    "angle": "reduces its argument by a period",
    "place": PLACE,
    "choice": "equal values would choose another index",
    "codes": CODES,
    "typed": "an attribute sets its type",
    "list": "works with a sequence of tensors",
}


def float32_reason(op_type: str) -> str:
    """Return why an operator stays in float32 wherever it is; empty if it need not.

    Normalizations that compute their statistics in float32 whatever their inputs are, such as
    LayerNormalization by its ``stash_type``, need not.
    """
    return _REASONS.get(operator_named(op_type).float16, "")


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
