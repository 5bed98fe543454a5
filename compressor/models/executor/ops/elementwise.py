"""Arithmetic, comparison and logic, element by element with broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from compressor.models.executor.dtypes import widened
from compressor.models.executor.node import Builder, NodeView, Table
from compressor.models.executor.program import Op

_BITS = {
    torch.int8: 8,
    torch.uint8: 8,
    torch.int16: 16,
    torch.uint16: 16,
    torch.int32: 32,
    torch.uint32: 32,
    torch.int64: 64,
    torch.uint64: 64,
}


def _unary(function: Callable[[Tensor], Tensor]) -> Builder:
    function = widened(function)

    def build(_: NodeView) -> Op:
        def run(x: Tensor) -> Tensor:
            return function(x)

        return run

    return build


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Builder:
    function = widened(function)

    def build(_: NodeView) -> Op:
        def run(a: Tensor, b: Tensor) -> Tensor:
            return function(a, b)

        return run

    return build


def _variadic(function: Callable[[Tensor, Tensor], Tensor]) -> Builder:
    function = widened(function)

    def build(_: NodeView) -> Op:
        def run(first: Tensor, *others: Tensor) -> Tensor:
            return reduce(function, others, first)

        return run

    return build


def _mean(_: NodeView) -> Op:
    def run(first: Tensor, *others: Tensor) -> Tensor:
        return reduce(torch.add, others, first) / (1 + len(others))

    return run


def _divide(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point() or a.is_complex():
        return torch.div(a, b)
    return torch.div(a, b, rounding_mode="trunc")


def _power(_: NodeView) -> Op:
    """Powers have the type of the base, whatever that of the exponent is."""

    def run(base: Tensor, exponent: Tensor) -> Tensor:
        if exponent.dtype in (torch.uint16, torch.uint32, torch.uint64):
            exponent = exponent.to(torch.int64)
        return torch.pow(base, exponent).to(base.dtype)

    return run


def _modulo(node: NodeView) -> Op:
    function = widened(torch.fmod if node.flag("fmod") else torch.remainder)

    def run(a: Tensor, b: Tensor) -> Tensor:
        return function(a, b)

    return run


def _shift(node: NodeView) -> Op:
    left = node.choice("direction", ("LEFT", "RIGHT")) == "LEFT"

    def run(x: Tensor, amount: Tensor) -> Tensor:
        bits = _BITS[x.dtype]
        value, by = x.to(torch.int64), amount.to(torch.int64)
        inside = (by >= 0) & (by < bits)
        by = torch.where(inside, by, 0)
        if left:
            result = torch.where(inside, torch.bitwise_left_shift(value, by), 0)
        elif x.dtype == torch.uint64:
            # The sign bit that the arithmetic shift copied in is masked out again.
            kept = torch.where(by > 0, (1 << (bits - by)) - 1, -1)
            result = torch.where(inside, torch.bitwise_right_shift(value, by) & kept, 0)
        else:
            result = torch.bitwise_right_shift(value, torch.where(inside, by, bits - 1))
            if not x.dtype.is_signed:
                result = torch.where(inside, result, 0)
        return result.to(x.dtype)

    return run


def _is_infinite(node: NodeView) -> Op:
    negative = node.flag("detect_negative", default=True)
    positive = node.flag("detect_positive", default=True)

    def run(x: Tensor) -> Tensor:
        if negative and positive:
            return torch.isinf(x)
        if positive:
            return torch.isposinf(x)
        return torch.isneginf(x) if negative else torch.zeros_like(x, dtype=torch.bool)

    return run


def _where(_: NodeView) -> Op:
    def run(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(condition, a, b)

    return run


def _clip(node: NodeView) -> Op:
    """Limits are attributes before opset 11 and inputs since; above the upper one wins."""
    if node.opset < 11:
        least = node.number("min", float("-inf"))
        greatest = node.number("max", float("inf"))

        def run_old(x: Tensor) -> Tensor:
            return torch.clamp(x, least, greatest)

        return run_old

    clamp = widened(_clamp)

    def run(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
        return clamp(x, low, high)

    return run


def _clamp(x: Tensor, low: Tensor | None, high: Tensor | None) -> Tensor:
    if low is None and high is None:
        return x
    return torch.clamp(x, low, high)


def _identity(_: NodeView) -> Op:
    def run(x: Tensor) -> Tensor:
        return x

    return run


ELEMENTWISE: Table = {
    "Abs": _unary(torch.abs),
    "Acos": _unary(torch.acos),
    "Acosh": _unary(torch.acosh),
    "Add": _binary(torch.add),
    "And": _binary(torch.logical_and),
    "Asin": _unary(torch.asin),
    "Asinh": _unary(torch.asinh),
    "Atan": _unary(torch.atan),
    "Atanh": _unary(torch.atanh),
    "BitShift": _shift,
    "BitwiseAnd": _binary(torch.bitwise_and),
    "BitwiseNot": _unary(torch.bitwise_not),
    "BitwiseOr": _binary(torch.bitwise_or),
    "BitwiseXor": _binary(torch.bitwise_xor),
    "Ceil": _unary(torch.ceil),
    "Clip": _clip,
    "Cos": _unary(torch.cos),
    "Cosh": _unary(torch.cosh),
    "Det": _unary(torch.det),
    "Div": _binary(_divide),
    "Equal": _binary(torch.eq),
    "Erf": _unary(torch.erf),
    "Exp": _unary(torch.exp),
    "Floor": _unary(torch.floor),
    "Greater": _binary(torch.gt),
    "GreaterOrEqual": _binary(torch.ge),
    "Identity": _identity,
    "IsInf": _is_infinite,
    "IsNaN": _unary(torch.isnan),
    "Less": _binary(torch.lt),
    "LessOrEqual": _binary(torch.le),
    "Log": _unary(torch.log),
    "Max": _variadic(torch.maximum),
    "Mean": _mean,
    "Min": _variadic(torch.minimum),
    "Mod": _modulo,
    "Mul": _binary(torch.mul),
    "Neg": _unary(torch.neg),
    "Not": _unary(torch.logical_not),
    "Or": _binary(torch.logical_or),
    "Pow": _power,
    "Reciprocal": _unary(torch.reciprocal),
    "Round": _unary(torch.round),
    "Sign": _unary(torch.sign),
    "Sin": _unary(torch.sin),
    "Sinh": _unary(torch.sinh),
    "Sqrt": _unary(torch.sqrt),
    "Sub": _binary(torch.sub),
    "Sum": _variadic(torch.add),
    "Tan": _unary(torch.tan),
    "Tanh": _unary(torch.tanh),
    "Where": _where,
    "Xor": _binary(torch.logical_xor),
}
