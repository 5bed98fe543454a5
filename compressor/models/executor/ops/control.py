"""Operators that repeat or choose: subgraphs, and recurrent networks by their equations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import onnx_ir as ir
import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.executor.node import Builder, NodeView, Table, one_of
from compressor.models.executor.program import Op, Result

# Subgraphs.


def _if(node: NodeView) -> Op:
    outputs = node.output_count
    then, otherwise = node.body("then_branch"), node.body("else_branch")

    def run(condition: Tensor, *captured: Tensor) -> Result:
        branch = then if bool(condition.item()) else otherwise
        return tuple(branch((), captured))[:outputs]

    return run


def _loop(node: NodeView) -> Op:
    body = node.body("body")
    leading = min(node.input_count, 2)  # the trip count and the condition, both optional
    carried = node.input_count - leading
    collected = node.output_count - carried

    def run(*inputs: Tensor) -> Result:
        limit, condition = (*inputs[:leading], None, None)[:2]
        state, captured = list(inputs[leading:][:carried]), inputs[leading + carried :]
        most = None if limit is None else int(limit.item())
        going = torch.tensor(True) if condition is None else condition
        rows: list[list[Tensor]] = [[] for _ in range(collected)]
        turn = 0
        while (most is None or turn < most) and bool(going.item()):
            results = body([torch.tensor(turn, dtype=torch.int64), going, *state], captured)
            going, state = results[0], results[1 : carried + 1]
            for row, element in zip(rows, results[carried + 1 :], strict=True):
                row.append(element)
            turn += 1
        blanks = body.blanks[carried + 1 :]
        return (
            *state,
            *(torch.stack(row) if row else none for row, none in zip(rows, blanks, strict=True)),
        )

    return run


def _scan(node: NodeView) -> Op:
    scanned = node.integer("num_scan_inputs")
    body = node.body("body")
    carried = node.input_count - scanned
    collected = node.output_count - carried
    in_axes = node.integers("scan_input_axes") or (0,) * scanned
    in_backward = node.integers("scan_input_directions") or (0,) * scanned
    out_axes = node.integers("scan_output_axes") or (0,) * collected
    out_backward = node.integers("scan_output_directions") or (0,) * collected

    def run(*inputs: Tensor) -> Result:
        state = list(inputs[:carried])
        sequences = inputs[carried : carried + scanned]
        captured = inputs[carried + scanned :]
        slices = [
            _reversed_if(backward, x.unbind(axis))
            for x, axis, backward in zip(sequences, in_axes, in_backward, strict=True)
        ]
        rows: list[list[Tensor]] = [[] for _ in range(collected)]
        for elements in zip(*slices, strict=True):
            results = body([*state, *elements], captured)
            state = results[:carried]
            for row, element in zip(rows, results[carried:], strict=True):
                row.append(element)
        outputs = zip(rows, body.blanks[carried:], out_axes, out_backward, strict=True)
        stacked = (
            torch.stack(list(_reversed_if(backward, row)), axis) if row else none.movedim(0, axis)
            for row, none, axis, backward in outputs
        )
        return (*state, *stacked)

    return run


def _reversed_if(backward: int, rows: Sequence[Tensor]) -> Sequence[Tensor]:
    return rows[::-1] if backward else rows


# Recurrent networks.

Activation: TypeAlias = Callable[[Tensor], Tensor]
State: TypeAlias = "tuple[Tensor, ...]"

_ACTIVATIONS: dict[str, tuple[Callable[[Tensor, float, float], Tensor], tuple[float, ...]]] = {
    "affine": (lambda x, alpha, beta: alpha * x + beta, (1.0, 0.0)),
    "elu": (lambda x, alpha, _: functional.elu(x, alpha), (1.0, 0.0)),
    "hardsigmoid": (lambda x, alpha, beta: torch.clamp(alpha * x + beta, 0, 1), (0.2, 0.5)),
    "leakyrelu": (lambda x, alpha, _: functional.leaky_relu(x, alpha), (0.01, 0.0)),
    "relu": (lambda x, _alpha, _beta: torch.relu(x), ()),
    "scaledtanh": (lambda x, alpha, beta: alpha * torch.tanh(beta * x), (1.0, 1.0)),
    "sigmoid": (lambda x, _alpha, _beta: torch.sigmoid(x), ()),
    "softplus": (lambda x, _alpha, _beta: functional.softplus(x), ()),
    "softsign": (lambda x, _alpha, _beta: functional.softsign(x), ()),
    "tanh": (lambda x, _alpha, _beta: torch.tanh(x), ()),
    "thresholdedrelu": (lambda x, alpha, _: torch.where(x >= alpha, x, 0), (1.0, 0.0)),
}
"""Functions of x, alpha and beta, and the default alpha and beta of those that have them."""


@dataclass(frozen=True)
class _Weights:
    """What multiplies the states of one direction; the gates lie below each other.

    Attributes:
        recurrent: ``[gates * hidden, hidden]``.
        bias: ``[gates * hidden]``, added with the hidden state.
        peepholes: ``[3 * hidden]``, of the cell state, LSTM only.
    """

    recurrent: Tensor
    bias: Tensor
    peepholes: Tensor | None


Cell: TypeAlias = Callable[[_Weights, "list[Activation]", Tensor, State], State]
"""One step: weights, activations, the input multiplied by its weights, state -> state."""


def _activations(node: NodeView, names: tuple[str, ...], directions: int) -> list[list[Activation]]:
    """Return the activations of each direction."""
    kinds = node.attribute("activations", ir.AttributeType.STRINGS) or names * directions
    alphas, betas = (
        iter(node.attribute(f"activation_{name}", ir.AttributeType.FLOATS) or ())
        for name in ("alpha", "beta")
    )
    clip = node.number("clip", 0.0)
    functions: list[Activation] = []
    for name in kinds:
        if name.lower() not in _ACTIVATIONS:
            raise node.refuse(f"activation '{name}' is not supported")
        function, defaults = _ACTIVATIONS[name.lower()]
        alpha, beta = defaults or (0.0, 0.0)
        if defaults:
            alpha, beta = next(alphas, alpha), next(betas, beta)
        functions.append(_bound(function, alpha, beta, clip))
    width = len(names)
    return [functions[width * i : width * (i + 1)] for i in range(directions)]


def _bound(
    function: Callable[[Tensor, float, float], Tensor], alpha: float, beta: float, clip: float
) -> Activation:
    return lambda x: function(torch.clamp(x, -clip, clip) if clip else x, alpha, beta)


def _reversed(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse each sequence, the padding behind it left where it is."""
    if lengths is None:
        return x.flip(0)
    time = torch.arange(x.shape[0], device=x.device)[:, None]
    source = torch.where(time < lengths, lengths - 1 - time, time).to(torch.int64)
    return torch.gather(x, 0, source[:, :, None].expand(x.shape))


def _sequence(
    step: Callable[[Tensor, State], State], x: Tensor, state: State, lengths: Tensor | None
) -> tuple[Tensor, State]:
    """Run a cell over the rows of a sequence; return the hidden states and the last state."""
    rows = []
    for turn, row in enumerate(x.unbind(0)):
        following = step(row, state)
        hidden = following[0]
        if lengths is not None:
            going = (turn < lengths)[:, None]
            hidden = torch.where(going, hidden, 0)
            following = tuple(
                torch.where(going, new, old) for new, old in zip(following, state, strict=True)
            )
        rows.append(hidden)
        state = following
    return torch.stack(rows), state


def _layer(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    *more: Tensor | None,
    cell: Cell,
    backward: Sequence[bool],
    activations: Sequence[list[Activation]],
    batch_first: bool,
    states: int,
) -> Result:
    initial = [*more, *(None,) * (3 - len(more))]
    peepholes = initial[2] if states == 2 else None
    x = x.transpose(0, 1) if batch_first else x
    size = w.shape[1]
    outputs, finals = [], []
    for index, reverse in enumerate(backward):
        both = x.new_zeros(2 * size) if bias is None else bias[index]
        peeps = None if peepholes is None else peepholes[index]
        weights = _Weights(r[index], both[size:], peeps)
        state = tuple(
            x.new_zeros(x.shape[1], r.shape[-1])
            if start is None
            else (start[:, index] if batch_first else start[index])
            for start in initial[:states]
        )
        multiplied = functional.linear(x, w[index], both[:size])
        if reverse:
            multiplied = _reversed(multiplied, lengths)
        step = partial(cell, weights, activations[index])
        output, state = _sequence(step, multiplied, state, lengths)
        outputs.append(_reversed(output, lengths) if reverse else output)
        finals.append(state)
    result = torch.stack(outputs, 1)
    axis = 1 if batch_first else 0
    last = [torch.stack(parts, axis) for parts in zip(*finals, strict=True)]
    return (result.permute(2, 0, 1, 3) if batch_first else result, *last)


_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def _recurrent(prepare: Callable[[NodeView], Cell], *names: str) -> Builder:
    """Return what prepares a layer, of its cell and the default activations of a direction."""
    states = 2 if len(names) == 3 else 1  # an LSTM has a cell state beside the hidden one

    def build(node: NodeView) -> Op:
        backward = _DIRECTIONS[one_of(*_DIRECTIONS).how(node, "direction")]
        node.ignore("hidden_size")
        node.takes = 3, 8 if states == 2 else 6
        for output in range(1, states + 1):
            node.wants(output)
        return partial(
            _layer,
            cell=prepare(node),
            backward=backward,
            activations=_activations(node, names, len(backward)),
            batch_first=node.flag("layout"),
            states=states,
        )

    return build


def _lstm(node: NodeView) -> Cell:
    coupled = node.flag("input_forget")

    def cell(weights: _Weights, functions: list[Activation], x: Tensor, state: State) -> State:
        f, g, h = functions
        hidden, memory = state
        gates = x + functional.linear(hidden, weights.recurrent, weights.bias)
        i, o, forget, c = gates.chunk(4, -1)
        peep = weights.peepholes
        peeps = (0.0, 0.0, 0.0) if peep is None else peep.chunk(3)
        i = f(i + peeps[0] * memory)
        forget = 1 - i if coupled else f(forget + peeps[2] * memory)
        memory = forget * memory + i * g(c)
        return f(o + peeps[1] * memory) * h(memory), memory

    return cell


def _gru(node: NodeView) -> Cell:
    linear_first = node.flag("linear_before_reset")

    def cell(weights: _Weights, functions: list[Activation], x: Tensor, state: State) -> State:
        f, g = functions
        (hidden,) = state
        size = 2 * hidden.shape[-1]
        gates = functional.linear(hidden, weights.recurrent[:size], weights.bias[:size])
        z, reset = f(x[..., :size] + gates).chunk(2, -1)
        matrix, bias = weights.recurrent[size:], weights.bias[size:]
        if linear_first:
            inner = reset * functional.linear(hidden, matrix, bias)
        else:
            inner = functional.linear(reset * hidden, matrix, bias)
        return ((1 - z) * g(x[..., size:] + inner) + z * hidden,)

    return cell


def _rnn(_: NodeView) -> Cell:
    def cell(weights: _Weights, functions: list[Activation], x: Tensor, state: State) -> State:
        product = functional.linear(state[0], weights.recurrent, weights.bias)
        return (functions[0](x + product),)

    return cell


CONTROL: Table = {
    "GRU": _recurrent(_gru, "sigmoid", "tanh"),
    "If": _if,
    "LSTM": _recurrent(_lstm, "sigmoid", "tanh", "tanh"),
    "Loop": _loop,
    "RNN": _recurrent(_rnn, "tanh"),
    "Scan": _scan,
}
