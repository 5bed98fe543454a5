"""Arithmetic, logic, activations, casts and reductions."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.element_types import TORCH_DTYPES, convert, natural_type, widened
from compressor.models.executor.node import (
    Host,
    Ints,
    Node,
    Operator,
    Read,
    Table,
    integers,
    one_of,
    positive,
)
from compressor.models.executor.ops.reference import BY_REFERENCE

# Element by element.


def _plain(function: Callable[[Tensor], Tensor]) -> Operator:
    return Operator(function, inputs=(1, 1))


def _unary(function: Callable[[Tensor], Tensor], otherwise: Operator | None = None) -> Operator:
    return Operator(widened(function), inputs=(1, 1), otherwise=otherwise)


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    return Operator(widened(function), inputs=(2, 2))


def _variadic(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    function = widened(function)
    return Operator(lambda first, *others: reduce(function, others, first))


def _divide(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point() or a.is_complex():
        return torch.div(a, b)
    return torch.div(a, b, rounding_mode="trunc")


_fmod, _remainder = widened(torch.fmod), widened(torch.remainder)


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    """Powers have the type of the base, whatever that of the exponent is."""
    if exponent.dtype in (torch.uint16, torch.uint32, torch.uint64):
        exponent = exponent.to(torch.int64)
    single = exponent.dim() == 0 and exponent.is_cpu and not exponent.requires_grad
    if single and base.is_floating_point() and not torch.compiler.is_exporting():
        return torch.pow(base, float(exponent))  # squares, as in norms, are products then
    return torch.pow(base, exponent).to(base.dtype)


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """Limit elements; where the lower limit is above the upper one, that wins."""
    return x if low is None and high is None else _clamp(x, low, high)


_clamp = widened(torch.clamp)


# Activations.


_ALPHA, _GAMMA = 1.67326319217681884765625, 1.05070102214813232421875  # of Selu


def _gelu(x: Tensor, *, approximate: str = one_of("none", "tanh")) -> Tensor:
    return functional.gelu(x, approximate=approximate)


def _bias_gelu(form: str) -> Operator:
    def run(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.gelu(x if bias is None else x + bias, approximate=form)

    return Operator(run)


# Changes of the element type.


def _target(node: Node, _: str) -> ir.DataType | None:
    """Return the type asked for; ``None`` where that of the second input decides at run time."""
    if node.input(1) is None:
        dtype = ir.DataType(node.read("to", "ir.DataType"))
        if node.input_type(0) == ir.DataType.STRING:
            raise node.refuse("its input holds strings")
        return dtype
    like = node.input_type(1)
    if like is not None and like not in TORCH_DTYPES:
        raise node.refuse(f"it asks for elements of type {like.name}")
    return like


_TARGET: Any = Read(_target)


def _cast(
    x: Tensor,
    like: Tensor | None = None,
    *,
    target: ir.DataType | None = _TARGET,
    saturate: bool = True,
    round_mode: str = one_of("up", "down", "nearest"),
) -> Tensor:
    if target is None:
        assert like is not None
        target = natural_type(like.dtype)
    return convert(x, target, saturate, round_mode)


# Reductions.


_AXES: Any = Read(lambda node, _: node.read("axes", "Ints", None))


def _reduction(function: Callable[[Tensor, list[int], bool], Tensor]) -> Operator:
    """Axes are an attribute before opset 18 (``ReduceSum``: 13) and an input since."""

    def run(
        x: Tensor,
        axes: Host | None = None,
        *,
        keepdims: bool = True,
        fixed: Ints = _AXES,
        noop_with_empty_axes: bool = False,
    ) -> Tensor:
        over = list(fixed or ()) if axes is None else integers(axes)
        if not over and not noop_with_empty_axes:
            over = list(range(x.dim()))
        over = positive(over, x.dim())
        return widened(lambda value: function(value, over, keepdims))(x)

    return Operator(run)


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    # An empty list of axes means every axis to torch.
    return x.sum(axes, keepdim=keep, dtype=x.dtype) if axes else x


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if not axes:
        return x
    if x.is_floating_point() or x.is_complex():
        return x.mean(axes, keepdim=keep)
    total = x.sum(axes, keepdim=keep)
    count = x.numel() // max(total.numel(), 1)
    return torch.div(total, count, rounding_mode="trunc").to(x.dtype)


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keep, dtype=x.dtype)
    return x


def _extreme(function: Callable[..., Tensor], sign: int) -> Operator:
    def run(x: Tensor, axes: list[int], keep: bool) -> Tensor:
        if not axes:
            return x
        if all(x.shape[axis] for axis in axes):
            return function(x, axes, keepdim=keep)
        shape = x.sum(axes, keepdim=keep).shape
        return torch.full(shape, _extreme_of_nothing(x.dtype, sign), dtype=x.dtype, device=x.device)

    return _reduction(run)


def _extreme_of_nothing(dtype: torch.dtype, sign: int) -> float:
    """Return the opposite end of the type's range."""
    if dtype.is_floating_point:
        return -sign * float("inf")
    if dtype == torch.bool:
        return float(sign < 0)
    limits = torch.iinfo(dtype)
    return limits.min if sign > 0 else limits.max


def _log_sum_exp(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if not axes:
        return torch.log(torch.exp(x)).to(x.dtype)
    wide = x if x.is_floating_point() else x.to(torch.float64)
    return torch.logsumexp(wide, axes, keepdim=keep).to(x.dtype)


def _place(function: Callable[..., Tensor]) -> Operator:
    """Prepare the first place of the extreme along an axis."""
    return Operator(
        lambda x, *, axis=0, keepdims=True: function(x, axis, keepdim=keepdims),
        otherwise=BY_REFERENCE,
    )


def _running_sum(x: Tensor, axis: Host) -> Tensor:
    return torch.cumsum(x, int(axis.item()), dtype=x.dtype)


def _by_name(names: str) -> Table:
    """Declare functions of one tensor that torch has under the same names."""
    return {name: _unary(getattr(torch, name.lower())) for name in names.split()}


ELEMENTWISE: Table = {
    **_by_name("Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Det Erf Exp Floor IsNaN Log"),
    **_by_name("Neg Reciprocal Round Sign Sin Sinh Sqrt Tan Tanh"),
    "Add": _binary(torch.add),
    "And": _binary(torch.logical_and),
    "ArgMax": _place(torch.argmax),
    "ArgMin": _place(torch.argmin),
    "BitwiseAnd": _binary(torch.bitwise_and),
    "BitwiseNot": _unary(torch.bitwise_not),
    "BitwiseOr": _binary(torch.bitwise_or),
    "BitwiseXor": _binary(torch.bitwise_xor),
    "Cast": Operator(_cast, inputs=(1, 1)),
    "CastLike": Operator(_cast, inputs=(2, 2)),
    "Celu": Operator(lambda x, *, alpha=1.0: functional.celu(x, alpha)),
    "Clip": Operator(_clip),
    "CumSum": Operator(_running_sum, otherwise=BY_REFERENCE),
    "Div": _binary(_divide),
    "Elu": Operator(lambda x, *, alpha=1.0: functional.elu(x, alpha)),
    "Equal": _binary(torch.eq),
    "Gelu": Operator(_gelu),
    "Greater": _binary(torch.gt),
    "GreaterOrEqual": _binary(torch.ge),
    "HardSigmoid": Operator(lambda x, *, alpha=0.2, beta=0.5: torch.clamp(alpha * x + beta, 0, 1)),
    "HardSwish": _plain(functional.hardswish),
    "Identity": Operator(lambda x: x),
    "IsInf": _unary(torch.isinf, BY_REFERENCE),
    "LeakyRelu": Operator(lambda x, *, alpha=0.01: functional.leaky_relu(x, alpha)),
    "Less": _binary(torch.lt),
    "LessOrEqual": _binary(torch.le),
    "LogSoftmax": Operator(lambda x, *, axis=-1: torch.log_softmax(x, axis)),
    "Max": _variadic(torch.maximum),
    "Mean": Operator(lambda x, *others: reduce(torch.add, others, x) / (1 + len(others))),
    "Min": _variadic(torch.minimum),
    "Mish": _plain(functional.mish),
    "Mod": Operator(lambda a, b, *, fmod=False: (_fmod if fmod else _remainder)(a, b)),
    "Mul": _binary(torch.mul),
    "Not": _unary(torch.logical_not),
    "Or": _binary(torch.logical_or),
    "PRelu": Operator(lambda x, slope: torch.where(x < 0, slope * x, x)),
    "Pow": Operator(_power),
    "ReduceL1": _reduction(lambda x, axes, keep: _sum(x.abs(), axes, keep)),
    "ReduceL2": _reduction(lambda x, axes, keep: torch.sqrt(_sum(x * x, axes, keep)).to(x.dtype)),
    "ReduceLogSum": _reduction(lambda x, axes, keep: torch.log(_sum(x, axes, keep)).to(x.dtype)),
    "ReduceLogSumExp": _reduction(_log_sum_exp),
    "ReduceMax": _extreme(torch.amax, 1),
    "ReduceMean": _reduction(_mean),
    "ReduceMin": _extreme(torch.amin, -1),
    "ReduceProd": _reduction(_product),
    "ReduceSum": _reduction(_sum),
    "ReduceSumSquare": _reduction(lambda x, axes, keep: _sum(x * x, axes, keep)),
    "Relu": _plain(torch.relu),
    "Selu": Operator(lambda x, *, alpha=_ALPHA, gamma=_GAMMA: gamma * functional.elu(x, alpha)),
    "Sigmoid": _plain(torch.sigmoid),
    "Softmax": Operator(lambda x, *, axis=-1: torch.softmax(x, axis)),
    "Softplus": _plain(functional.softplus),
    "Softsign": _plain(functional.softsign),
    "Sub": _binary(torch.sub),
    "Sum": _variadic(torch.add),
    "SwiGLU": Operator(lambda gate, x, *, alpha=1.0: gate * torch.sigmoid(alpha * gate) * x),
    "Swish": Operator(lambda x, *, alpha=1.0: x * torch.sigmoid(alpha * x)),
    "ThresholdedRelu": Operator(lambda x, *, alpha=1.0: torch.where(x > alpha, x, 0)),
    "Where": Operator(torch.where, inputs=(3, 3)),
    "Xor": _binary(torch.logical_xor),
}

CONTRIB: Table = {
    "BiasGelu": _bias_gelu("none"),
    "FastGelu": _bias_gelu("tanh"),
    "Gelu": _bias_gelu("none"),
    "QuickGelu": Operator(lambda x, *, alpha=1.702: x * torch.sigmoid(alpha * x)),
}
"""Activations of the domain ``com.microsoft``."""
