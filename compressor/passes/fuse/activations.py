"""Recognise activation functions that were written out."""

from __future__ import annotations

from math import isclose, pi, sqrt

import numpy as np
import onnx_ir as ir

from compressor.graph.values import constant_array, is_op
from compressor.passes.fuse.draft import Draft
from compressor.passes.fuse.edit import input_of, maker, private_maker, replace, scalar, sole_reader

_CUBE = 0.044715


def gelu(node: ir.Node, draft: Draft) -> bool:
    """Replace GELU written out, ``x/2 (1 + erf(x/sqrt 2))`` or its tanh form, by Gelu.

    The factors may come in any order. D. Hendrycks, K. Gimpel, Gaussian Error Linear Units, 2016.
    """
    if draft.opset < 20 or not is_op(node, "Mul", "Div"):
        return False
    factor, values = _factors(node.outputs[0])
    if not _near(factor, 0.5) or len(values) != 2:
        return False
    for gate, source in (values, reversed(values)):
        form = _gate(gate, source)
        if form is not None:
            replace(node, "Gelu", [source], {"approximate": form})
            return True
    return False


def _gate(gate: ir.Value, source: ir.Value) -> str | None:
    """Tell which form of GELU ``1 + f(source)`` belongs to."""
    add = maker(gate, "Add")
    if add is None or sole_reader(gate) is None:
        return None
    inner = [v for v in add.inputs if scalar(v) is None]
    ones = [v for v in add.inputs if scalar(v) == 1]
    if len(inner) != 1 or len(ones) != 1:
        return None
    curve = private_maker(inner[0], add, "Erf", "Tanh")
    if curve is None or curve.inputs[0] is None:
        return None
    factor, values = _factors(curve.inputs[0])
    if is_op(curve, "Erf"):
        return "none" if _near(factor, sqrt(0.5)) and values == [source] else None
    if not _near(factor, sqrt(2 / pi)) or len(values) != 1:
        return None
    return "tanh" if _is_cubic(values[0], source) else None


def _is_cubic(value: ir.Value, source: ir.Value) -> bool:
    """Tell whether a value is ``source + 0.044715 source^3``."""
    add = maker(value, "Add")
    if add is None or source not in add.inputs:
        return False
    others = [v for v in add.inputs if v is not source and v is not None]
    if len(others) != 1:
        return False
    factor, values = _factors(others[0])
    if not _near(factor, _CUBE):
        return False
    if len(values) == 1:
        power = maker(values[0], "Pow")
        return power is not None and power.inputs[0] is source and scalar(power.inputs[1]) == 3
    return values == [source] * 3


def _factors(value: ir.Value) -> tuple[float, list[ir.Value]]:
    """Split a product into its constant factor and the other factors."""
    node = maker(value, "Mul", "Div")
    if node is None:
        return 1.0, [value]
    first, second = node.inputs
    if first is None or second is None:
        return 1.0, [value]
    divisor = scalar(second)
    if is_op(node, "Div"):
        if not divisor:
            return 1.0, [value]
        factor, values = _factors(first)
        return factor / divisor, values
    total, found = 1.0, []
    for part in (first, second):
        number = scalar(part)
        factor, values = (number, []) if number is not None else _factors(part)
        total *= factor
        found += values
    return total, found


def _near(first: float, second: float) -> bool:
    return isclose(first, second, rel_tol=1e-6)


def merge_clips(node: ir.Node, draft: Draft) -> bool:
    """Replace two of Clip and Relu in a row by one."""
    if draft.opset < 11 or not is_op(node, "Clip", "Relu"):
        return False
    inner = private_maker(node.inputs[0], node, "Clip", "Relu")
    dtype = node.outputs[0].dtype
    if inner is None or dtype is None or not dtype.is_floating_point():
        return False
    first, second = _bounds(inner), _bounds(node)
    if first is None or second is None:
        return False
    # the outer bounds win where the two intervals do not meet
    low = float(np.clip(first[0], *second))
    high = float(np.clip(first[1], *second))
    if (low, high) == (0.0, np.inf):
        replace(node, "Relu", [inner.inputs[0]])
        return True
    name = node.outputs[0].name
    inputs = [inner.inputs[0]]
    inputs.append(None if low == -np.inf else draft.constant(low, dtype, f"{name}/min"))
    inputs.append(None if high == np.inf else draft.constant(high, dtype, f"{name}/max"))
    replace(node, "Clip", inputs)
    return True


def _bounds(node: ir.Node) -> tuple[float, float] | None:
    if is_op(node, "Relu"):
        return 0.0, np.inf
    bounds = [-np.inf, np.inf]
    for index in (0, 1):
        given = input_of(node, index + 1)
        if given is not None:
            number = scalar(given)
            if number is None:
                return None
            bounds[index] = number
    return (bounds[0], bounds[1]) if bounds[0] <= bounds[1] else None


def drop_neutral(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Remove ``x * 1``, ``x / 1``, ``x + 0`` and ``x - 0``; the numbers are compared exactly."""
    neutral = {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}.get(node.op_type)
    if neutral is None or not is_op(node, node.op_type) or len(node.inputs) != 2:
        return False
    for index in (1, 0) if node.op_type in ("Mul", "Add") else (1,):
        number, other = node.inputs[index], node.inputs[1 - index]
        if scalar(number) != neutral or other is None or other.shape is None:
            continue
        array = constant_array(number)
        if array is not None and array.ndim <= len(other.shape) and _is_computed(other):
            replace(node, "Identity", [other])
            return True
    return False


def _is_computed(value: ir.Value) -> bool:
    return constant_array(value) is None
