"""Functions of single elements as several of LiteRT's operators."""

from __future__ import annotations

from collections.abc import Callable

from compressor.exporters.litert.file import Tensor
from compressor.exporters.litert.lowering import Call

_SELU = 1.67326319217681884765625, 1.05070102214813232421875
_INFINITY = float("inf")


class Floats:
    """Emits operators of single floats, all in one shape."""

    def __init__(self, call: Call, like: Tensor):
        self.call = call
        self._like = like

    def __call__(self, name: str, *operands: Tensor | float) -> Tensor:
        """Emit one; numbers become constants."""
        graph, like = self.call.graph, self._like
        tensors = [x if isinstance(x, Tensor) else graph.scalar(x) for x in operands]
        return graph.emit(name, tensors, like.shape, "float32", None, like.last)

    def number(self, value: float) -> Tensor:
        """Return a constant."""
        return self.call.graph.scalar(value)

    def setting(self, name: str, default: float) -> float:
        """Return an attribute of the operator."""
        return self.call.node.attributes.get_float(name, default)


Formula = Callable[[Floats, Tensor], tuple[str, list[Tensor]]]
"""Emits all but the last operator; returns that one's name and its operands."""


def formula(build: Formula) -> Callable[[Call], None]:
    """Return what writes an activation as several operators."""

    def lower(call: Call) -> None:
        source = call.operand(0)
        name, operands = build(Floats(call, source), source)
        call.give(name, operands, last=source.last)

    return lower


def infinite(call: Call) -> None:
    """Write an IsInf."""
    attributes = call.node.attributes
    if not all(attributes.get_int(f"detect_{sign}", 1) for sign in ("negative", "positive")):
        raise call.refusal("looks for one sign only")
    source = call.operand(0)
    floats = Floats(call, source)
    operands = [floats("ABS", source), floats.number(_INFINITY)]
    call.give("EQUAL", operands, last=source.last)


def not_a_number(call: Call) -> None:
    """Write an IsNaN: such a value differs from itself."""
    source = call.operand(0)
    call.give("NOT_EQUAL", [source, source], last=source.last)


def hard_sigmoid(floats: Floats, x: Tensor) -> tuple[str, list[Tensor]]:
    """Write a line between 0 and 1."""
    line = floats(
        "ADD", floats("MUL", x, floats.setting("alpha", 0.2)), floats.setting("beta", 0.5)
    )
    return "MINIMUM", [floats("MAXIMUM", line, 0.0), floats.number(1.0)]


def swish(floats: Floats, x: Tensor) -> tuple[str, list[Tensor]]:
    """Write x times its sigmoid."""
    factor = floats.setting("alpha", 1.0)
    return "MUL", [x, floats("LOGISTIC", x if factor == 1.0 else floats("MUL", x, factor))]


def soft_plus(floats: Floats, x: Tensor) -> tuple[str, list[Tensor]]:
    """Write log(1 + exp(x)) so that it does not overflow."""
    tail = floats("LOG", floats("ADD", floats("EXP", floats("NEG", floats("ABS", x))), 1.0))
    return "ADD", [floats("RELU", x), tail]


def mish(floats: Floats, x: Tensor) -> tuple[str, list[Tensor]]:
    """Write x times the tanh of its softplus."""
    name, operands = soft_plus(floats, x)
    return "MUL", [x, floats("TANH", floats(name, *operands))]


def reciprocal(floats: Floats, x: Tensor) -> tuple[str, list[Tensor]]:
    """Write 1 / x."""
    return "DIV", [floats.number(1.0), x]


def elu(floats: Floats, x: Tensor) -> tuple[str, list[Tensor]]:
    """Write an Elu of any alpha."""
    alpha = floats.setting("alpha", 1.0)
    return ("ELU", [x]) if alpha == 1.0 else ("ADD", _exponential(floats, x, alpha, 1.0))


def celu(floats: Floats, x: Tensor) -> tuple[str, list[Tensor]]:
    """Write a Celu, an Elu whose slope at zero is 1 for any alpha."""
    alpha = floats.setting("alpha", 1.0)
    return "ADD", _exponential(floats, x, alpha, 1 / alpha)


def selu(floats: Floats, x: Tensor) -> tuple[str, list[Tensor]]:
    """Write a Selu, a scaled Elu."""
    alpha, gamma = floats.setting("alpha", _SELU[0]), floats.setting("gamma", _SELU[1])
    return "MUL", [floats("ADD", *_exponential(floats, x, alpha, 1.0)), floats.number(gamma)]


def _exponential(floats: Floats, x: Tensor, alpha: float, slope: float) -> list[Tensor]:
    """Return max(x, 0) and alpha (exp(slope x) - 1) where x is below zero."""
    below = floats("MINIMUM", x, 0.0)
    below = floats("ELU", below if slope == 1.0 else floats("MUL", below, slope))
    return [floats("RELU", x), floats("MUL", below, alpha)]


def soft_sign(floats: Floats, x: Tensor) -> tuple[str, list[Tensor]]:
    """Write x / (1 + |x|)."""
    return "DIV", [x, floats("ADD", floats("ABS", x), 1.0)]


def tangent(floats: Floats, x: Tensor) -> tuple[str, list[Tensor]]:
    """Write sine over cosine."""
    return "DIV", [floats("SIN", x), floats("COS", x)]
