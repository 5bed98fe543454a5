"""Activation functions, and the normalized exponentials."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.executor.node import Builder, NodeView, Table
from compressor.models.executor.program import Op


def _plain(function: Callable[[Tensor], Tensor]) -> Builder:
    def build(_: NodeView) -> Op:
        def run(x: Tensor) -> Tensor:
            return function(x)

        return run

    return build


def _celu(node: NodeView) -> Op:
    alpha = node.number("alpha", 1.0)

    def run(x: Tensor) -> Tensor:
        return functional.celu(x, alpha)

    return run


def _elu(node: NodeView) -> Op:
    alpha = node.number("alpha", 1.0)

    def run(x: Tensor) -> Tensor:
        return functional.elu(x, alpha)

    return run


def _selu(node: NodeView) -> Op:
    alpha = node.number("alpha", 1.67326319217681884765625)
    gamma = node.number("gamma", 1.05070102214813232421875)

    def run(x: Tensor) -> Tensor:
        return gamma * functional.elu(x, alpha)

    return run


def _leaky_relu(node: NodeView) -> Op:
    alpha = node.number("alpha", 0.01)

    def run(x: Tensor) -> Tensor:
        return functional.leaky_relu(x, alpha)

    return run


def _prelu(_: NodeView) -> Op:
    def run(x: Tensor, slope: Tensor) -> Tensor:
        return torch.where(x < 0, slope * x, x)

    return run


def _thresholded_relu(node: NodeView) -> Op:
    alpha = node.number("alpha", 1.0)

    def run(x: Tensor) -> Tensor:
        return torch.where(x > alpha, x, 0)

    return run


def _shrink(node: NodeView) -> Op:
    limit, bias = node.number("lambd", 0.5), node.number("bias", 0.0)

    def run(x: Tensor) -> Tensor:
        low = torch.where(x < -limit, x + bias, 0)
        return torch.where(x > limit, x - bias, low).to(x.dtype)

    return run


def _hard_sigmoid(node: NodeView) -> Op:
    alpha, beta = node.number("alpha", 0.2), node.number("beta", 0.5)

    def run(x: Tensor) -> Tensor:
        return torch.clamp(alpha * x + beta, 0, 1)

    return run


def _gelu(node: NodeView) -> Op:
    form = node.choice("approximate", ("none", "tanh"), "none")

    def run(x: Tensor) -> Tensor:
        return functional.gelu(x, approximate=form)

    return run


def _swish(node: NodeView) -> Op:
    alpha = node.number("alpha", 1.0)

    def run(x: Tensor) -> Tensor:
        return x * torch.sigmoid(alpha * x)

    return run


def _swiglu(node: NodeView) -> Op:
    alpha = node.number("alpha", 1.0)

    def run(gate: Tensor, x: Tensor) -> Tensor:
        return gate * torch.sigmoid(alpha * gate) * x

    return run


def _softmax_like(function: Callable[[Tensor, int], Tensor]) -> Builder:
    """Before opset 13 everything from the axis on is one axis."""

    def build(node: NodeView) -> Op:
        flatten = node.opset < 13
        axis = node.integer("axis", 1 if flatten else -1)

        def run(x: Tensor) -> Tensor:
            if not flatten:
                return function(x, axis)
            first = axis % x.dim() if axis < 0 else axis
            return function(x.reshape(*x.shape[:first], -1), -1).reshape(x.shape)

        return run

    return build


def _softmax(x: Tensor, axis: int) -> Tensor:
    return torch.softmax(x, axis)


def _log_softmax(x: Tensor, axis: int) -> Tensor:
    return torch.log_softmax(x, axis)


def _hardmax(x: Tensor, axis: int) -> Tensor:
    winner = x.argmax(axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, winner, 1)


ACTIVATION: Table = {
    "Celu": _celu,
    "Elu": _elu,
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _plain(functional.hardswish),
    "Hardmax": _softmax_like(_hardmax),
    "LeakyRelu": _leaky_relu,
    "LogSoftmax": _softmax_like(_log_softmax),
    "Mish": _plain(functional.mish),
    "PRelu": _prelu,
    "Relu": _plain(torch.relu),
    "Selu": _selu,
    "Shrink": _shrink,
    "Sigmoid": _plain(torch.sigmoid),
    "Softmax": _softmax_like(_softmax),
    "Softplus": _plain(functional.softplus),
    "Softsign": _plain(functional.softsign),
    "SwiGLU": _swiglu,
    "Swish": _swish,
    "ThresholdedRelu": _thresholded_relu,
}
