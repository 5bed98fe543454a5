"""LSTM, GRU and RNN, by their equations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.program import Op, Result

Activation: TypeAlias = Callable[[Tensor], Tensor]
State: TypeAlias = "tuple[Tensor, ...]"

_ACTIVATIONS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "affine": lambda x, alpha, beta: alpha * x + beta,
    "elu": lambda x, alpha, _: functional.elu(x, alpha),
    "hardsigmoid": lambda x, alpha, beta: torch.clamp(alpha * x + beta, 0, 1),
    "leakyrelu": lambda x, alpha, _: functional.leaky_relu(x, alpha),
    "relu": lambda x, _alpha, _beta: torch.relu(x),
    "scaledtanh": lambda x, alpha, beta: alpha * torch.tanh(beta * x),
    "sigmoid": lambda x, _alpha, _beta: torch.sigmoid(x),
    "softplus": lambda x, _alpha, _beta: functional.softplus(x),
    "softsign": lambda x, _alpha, _beta: functional.softsign(x),
    "tanh": lambda x, _alpha, _beta: torch.tanh(x),
    "thresholdedrelu": lambda x, alpha, _: torch.where(x >= alpha, x, 0),
}
_DEFAULTS = {
    "affine": (1.0, 0.0),
    "elu": (1.0, 0.0),
    "hardsigmoid": (0.2, 0.5),
    "leakyrelu": (0.01, 0.0),
    "scaledtanh": (1.0, 1.0),
    "thresholdedrelu": (1.0, 0.0),
}


@dataclass(frozen=True)
class _Weights:
    """The weights of one direction.

    Attributes:
        inputs: of the input, gates x hidden rows.
        recurrent: of the hidden state.
        input_bias: added with the input.
        recurrent_bias: added with the hidden state.
        peepholes: of the cell state, LSTM only.
    """

    inputs: Tensor
    recurrent: Tensor
    input_bias: Tensor
    recurrent_bias: Tensor
    peepholes: Tensor | None


Cell: TypeAlias = Callable[[Tensor, State, _Weights, "list[Activation]"], State]
"""One step: input already multiplied by its weights, state, weights, activations -> state."""


@dataclass(frozen=True)
class _Layer:
    """What the attributes say.

    Attributes:
        cell: the step.
        backward: whether each direction runs from the end.
        activations: those of each direction.
        batch_first: whether the batch is the first axis.
        states: 2 where there is a cell state beside the hidden one.
    """

    cell: Cell
    backward: tuple[bool, ...]
    activations: list[list[Activation]]
    batch_first: bool
    states: int


def _activations(node: NodeView, names: tuple[str, ...], directions: int) -> list[list[Activation]]:
    chosen = node.texts("activations") or names * directions
    alphas, betas = (iter(node.numbers(f"activation_{kind}") or ()) for kind in ("alpha", "beta"))
    functions: list[Activation] = []
    clip = node.number("clip", 0.0)
    for name in chosen:
        key = name.lower()
        if key not in _ACTIVATIONS:
            raise node.refuse(f"activation '{name}' is not supported")
        alpha, beta = _DEFAULTS.get(key, (0.0, 0.0))
        if key in _DEFAULTS:
            alpha, beta = next(alphas, alpha), next(betas, beta)
        functions.append(_bound(_ACTIVATIONS[key], alpha, beta, clip))
    width = len(names)
    return [functions[width * i : width * (i + 1)] for i in range(directions)]


def _bound(
    function: Callable[[Tensor, float, float], Tensor], alpha: float, beta: float, clip: float
) -> Activation:
    def run(x: Tensor) -> Tensor:
        return function(torch.clamp(x, -clip, clip) if clip else x, alpha, beta)

    return run


def _layer(node: NodeView, cell: Cell, names: tuple[str, ...]) -> _Layer:
    direction = node.choice("direction", ("forward", "reverse", "bidirectional"), "forward")
    backward = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
    node.ignore("hidden_size", "output_sequence")
    for output in (1, 2):
        node.wants(output)
    activations = _activations(node, names, len(backward))
    states = 2 if len(names) == 3 else 1
    return _Layer(cell, backward, activations, node.flag("layout"), states)


def _by_length(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Turn each sequence round, the padding behind it left where it is."""
    if lengths is None:
        return x.flip(0)
    time = torch.arange(x.shape[0], device=x.device)[:, None]
    source = torch.where(time < lengths, lengths - 1 - time, time).to(torch.int64)
    return torch.gather(x, 0, source[:, :, None].expand(x.shape))


def _one_direction(
    layer: _Layer, index: int, x: Tensor, state: State, weights: _Weights, lengths: Tensor | None
) -> tuple[Tensor, State]:
    backward = layer.backward[index]
    multiplied = functional.linear(x, weights.inputs, weights.input_bias)
    if backward:
        multiplied = _by_length(multiplied, lengths)
    rows = []
    for turn, row in enumerate(multiplied.unbind(0)):
        following = layer.cell(row, state, weights, layer.activations[index])
        shown = following[0]
        if lengths is not None:
            going = (turn < lengths)[:, None]
            shown = torch.where(going, shown, 0)
            following = tuple(
                torch.where(going, new, old) for new, old in zip(following, state, strict=True)
            )
        rows.append(shown)
        state = following
    output = torch.stack(rows)
    return (_by_length(output, lengths) if backward else output), state


def _run(layer: _Layer, inputs: tuple[Tensor | None, ...]) -> Result:
    given: list[Tensor | None] = [*inputs, *(None,) * (8 - len(inputs))]
    x, w, r, bias, lengths, *initial = given
    assert x is not None
    assert w is not None
    assert r is not None
    peepholes = initial.pop(2) if layer.states == 2 else None
    x = x.transpose(0, 1) if layer.batch_first else x
    hidden = r.shape[-1]
    outputs, finals = [], []
    for index in range(len(layer.backward)):
        size = w.shape[1]
        both = (
            torch.zeros(2 * size, dtype=x.dtype, device=x.device) if bias is None else bias[index]
        )
        weights = _Weights(
            w[index],
            r[index],
            both[:size],
            both[size:],
            None if peepholes is None else peepholes[index],
        )
        state = tuple(
            x.new_zeros(x.shape[1], hidden)
            if start is None
            else (start[:, index] if layer.batch_first else start[index])
            for start in initial[: layer.states]
        )
        output, state = _one_direction(layer, index, x, state, weights, lengths)
        outputs.append(output)
        finals.append(state)
    axis = 1 if layer.batch_first else 0
    result = torch.stack(outputs, 1)
    last = [torch.stack(parts, axis) for parts in zip(*finals, strict=True)]
    if layer.batch_first:
        result = result.permute(2, 0, 1, 3)
    return (result, *last)


def _lstm(node: NodeView) -> Op:
    coupled = node.flag("input_forget")

    def cell(x: Tensor, state: State, weights: _Weights, functions: list[Activation]) -> State:
        f, g, h = functions
        hidden, memory = state
        gates = x + functional.linear(hidden, weights.recurrent, weights.recurrent_bias)
        i, o, forget, c = gates.chunk(4, -1)
        peep = weights.peepholes
        peeps = (0.0, 0.0, 0.0) if peep is None else peep.chunk(3)
        i = f(i + peeps[0] * memory)
        forget = 1 - i if coupled else f(forget + peeps[2] * memory)
        memory = forget * memory + i * g(c)
        return f(o + peeps[1] * memory) * h(memory), memory

    layer = _layer(node, cell, ("sigmoid", "tanh", "tanh"))

    def run(*inputs: Tensor | None) -> Result:
        return _run(layer, inputs)

    return run


def _gru(node: NodeView) -> Op:
    linear_first = node.flag("linear_before_reset")

    def cell(x: Tensor, state: State, weights: _Weights, functions: list[Activation]) -> State:
        f, g = functions
        (hidden,) = state
        size = hidden.shape[-1]
        gates = functional.linear(
            hidden, weights.recurrent[: 2 * size], weights.recurrent_bias[: 2 * size]
        )
        z, reset = f(x[..., : 2 * size] + gates).chunk(2, -1)
        matrix, bias = weights.recurrent[2 * size :], weights.recurrent_bias[2 * size :]
        if linear_first:
            inner = reset * functional.linear(hidden, matrix, bias)
        else:
            inner = functional.linear(reset * hidden, matrix, bias)
        return ((1 - z) * g(x[..., 2 * size :] + inner) + z * hidden,)

    layer = _layer(node, cell, ("sigmoid", "tanh"))

    def run(*inputs: Tensor | None) -> Result:
        return _run(layer, inputs)

    return run


def _rnn(node: NodeView) -> Op:
    def cell(x: Tensor, state: State, weights: _Weights, functions: list[Activation]) -> State:
        (hidden,) = state
        product = functional.linear(hidden, weights.recurrent, weights.recurrent_bias)
        return (functions[0](x + product),)

    layer = _layer(node, cell, ("tanh",))

    def run(*inputs: Tensor | None) -> Result:
        return _run(layer, inputs)

    return run


RECURRENT: Table = {"GRU": _gru, "LSTM": _lstm, "RNN": _rnn}
