"""Operators that repeat or choose: subgraphs, and recurrent networks by their equations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.executor.node import Ints, Node, Operator, Read, Table, one_of
from compressor.models.executor.program import Body, Op, Result

# Subgraphs.


def _if(condition: Tensor, *captured: Tensor, then_branch: Body, else_branch: Body) -> Result:
    branch = then_branch if bool(condition.item()) else else_branch
    return tuple(branch((), captured))


_INPUTS: Any = Read(lambda node, _: len(node.inputs))


def _loop(*inputs: Tensor, body: Body, count: int = _INPUTS) -> Result:
    """Repeat a body on its state; ``count`` inputs are the node's, the others are captured."""
    leading = min(count, 2)  # the trip count and the condition, both optional
    limit, condition = (*inputs[:leading], None, None)[:2]
    going = torch.tensor(True) if condition is None else condition
    state, captured = [going, *inputs[leading:count]], inputs[count:]
    most = None if limit is None else int(limit.item())
    rows: list[list[Tensor]] = []
    while (most is None or len(rows) < most) and bool(state[0].item()):
        turn = torch.tensor(len(rows), dtype=torch.int64)
        results = body([turn, *state], captured)
        rows.append(results[len(state) :])
        state = results[: len(state)]
    return (*state[1:], *_stacked(rows, body.blanks[len(state) :]))


def _scan(
    *inputs: Tensor,
    body: Body,
    num_scan_inputs: int,
    scan_input_axes: Ints = None,
    scan_input_directions: Ints = None,
    scan_output_axes: Ints = None,
    scan_output_directions: Ints = None,
    count: int = _INPUTS,
) -> Result:
    """Run a body over the rows of sequences; ``count`` inputs are the node's."""
    carried = count - num_scan_inputs
    state, sequences, captured = list(inputs[:carried]), inputs[carried:count], inputs[count:]
    axes = scan_input_axes or (0,) * num_scan_inputs
    backward = scan_input_directions or (0,) * num_scan_inputs
    slices = [
        x.unbind(axis)[:: -1 if reverse else 1]
        for x, axis, reverse in zip(sequences, axes, backward, strict=True)
    ]
    rows: list[list[Tensor]] = []
    for elements in zip(*slices, strict=True):
        results = body([*state, *elements], captured)
        rows.append(results[carried:])
        state = results[:carried]
    blanks = body.blanks[carried:]
    return (*state, *_stacked(rows, blanks, scan_output_axes, scan_output_directions))


def _stacked(
    rows: Sequence[Sequence[Tensor]],
    blanks: Sequence[Tensor],
    axes: Ints = None,
    backward: Ints = None,
) -> list[Tensor]:
    """Stack what each turn returned: one tensor for each column of the rows.

    Args:
        rows: what each turn returned.
        blanks: what stands for a column of no rows.
        axes: where the rows of each column go, first by default.
        backward: whether the last row comes first.
    """
    places = zip(blanks, axes or (0,) * len(blanks), backward or (0,) * len(blanks), strict=True)
    return [
        torch.stack([row[column] for row in rows[:: -1 if reverse else 1]], axis)
        if rows
        else blank.movedim(0, axis)
        for column, (blank, axis, reverse) in enumerate(places)
    ]


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
    """The weights of one direction, with the gates stacked as rows.

    Attributes:
        recurrent: ``[gates * hidden, hidden]``.
        bias: ``[gates * hidden]``, added with the hidden state.
        peepholes: ``[3 * hidden]``, of the cell state, LSTM only.
        activations: the cell's.
    """

    recurrent: Tensor
    bias: Tensor
    peepholes: Tensor | None
    activations: list[Activation]


def _activations(names: tuple[str, ...], node: Node, _: str) -> list[list[Activation]]:
    """Return the activations of each direction, by default those of these names."""
    directions = len(_DIRECTIONS[_DIRECTION.how(node, "direction")])
    kinds = node.read("activations", "Strings", names * directions)
    alphas = iter(node.read("activation_alpha", "Floats", ()))
    betas = iter(node.read("activation_beta", "Floats", ()))
    clip = node.read("clip", "float", 0.0)
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
    """Reverse each sequence; the padding after it stays where it is."""
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


_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_DIRECTION = one_of(*_DIRECTIONS)


def _recurrent(cell: Op, *names: str) -> Operator:
    """Declare a layer.

    Args:
        cell: one step: weights, the input multiplied by its weights and the state give the next
            state; its keywords are attributes.
        names: the activations of a direction where the node does not say them.
    """
    states = 2 if len(names) == 3 else 1  # an LSTM has a cell state beside the hidden one
    declared = Operator(cell)
    bound: Any = Read(lambda node, _: declared.bound(node))
    functions: Any = Read(partial(_activations, names))

    def run(
        x: Tensor,
        w: Tensor,
        r: Tensor,
        bias: Tensor | None = None,
        lengths: Tensor | None = None,
        *more: Tensor | None,
        step: Callable[..., State] = bound,
        activations: list[list[Activation]] = functions,
        direction: str = _DIRECTION,
        layout: bool = False,
    ) -> Result:
        initial = [*more, *(None,) * (3 - len(more))]
        peepholes = initial[2] if states == 2 else None
        x = x.transpose(0, 1) if layout else x
        size = w.shape[1]
        outputs, finals = [], []
        for index, reverse in enumerate(_DIRECTIONS[direction]):
            both = x.new_zeros(2 * size) if bias is None else bias[index]
            peeps = None if peepholes is None else peepholes[index]
            weights = _Weights(r[index], both[size:], peeps, activations[index])
            state = tuple(
                x.new_zeros(x.shape[1], r.shape[-1])
                if start is None
                else start.select(1 if layout else 0, index)
                for start in initial[:states]
            )
            multiplied = functional.linear(x, w[index], both[:size])
            if reverse:
                multiplied = _reversed(multiplied, lengths)
            output, state = _sequence(partial(step, weights), multiplied, state, lengths)
            outputs.append(_reversed(output, lengths) if reverse else output)
            finals.append(state)
        result = torch.stack(outputs, 1)
        last = [torch.stack(parts, 1 if layout else 0) for parts in zip(*finals, strict=True)]
        return (result.permute(2, 0, 1, 3) if layout else result, *last)

    span = (3, 8 if states == 2 else 6)
    return Operator(run, inputs=span, outputs=states + 1, ignored=("hidden_size",))


def _lstm(weights: _Weights, x: Tensor, state: State, *, input_forget: bool = False) -> State:
    f, g, h = weights.activations
    hidden, memory = state
    gates = x + functional.linear(hidden, weights.recurrent, weights.bias)
    i, o, forget, c = gates.chunk(4, -1)
    peeps = (0.0, 0.0, 0.0) if weights.peepholes is None else weights.peepholes.chunk(3)
    i = f(i + peeps[0] * memory)
    forget = 1 - i if input_forget else f(forget + peeps[2] * memory)
    memory = forget * memory + i * g(c)
    return f(o + peeps[1] * memory) * h(memory), memory


def _gru(weights: _Weights, x: Tensor, state: State, *, linear_before_reset: bool = False) -> State:
    f, g = weights.activations
    (hidden,) = state
    size = 2 * hidden.shape[-1]
    gates = functional.linear(hidden, weights.recurrent[:size], weights.bias[:size])
    z, reset = f(x[..., :size] + gates).chunk(2, -1)
    matrix, bias = weights.recurrent[size:], weights.bias[size:]
    if linear_before_reset:
        inner = reset * functional.linear(hidden, matrix, bias)
    else:
        inner = functional.linear(reset * hidden, matrix, bias)
    return ((1 - z) * g(x[..., size:] + inner) + z * hidden,)


def _rnn(weights: _Weights, x: Tensor, state: State) -> State:
    product = functional.linear(state[0], weights.recurrent, weights.bias)
    return (weights.activations[0](x + product),)


CONTROL: Table = {
    "GRU": _recurrent(_gru, "sigmoid", "tanh"),
    "If": Operator(_if, outputs=None),
    "LSTM": _recurrent(_lstm, "sigmoid", "tanh", "tanh"),
    "Loop": Operator(_loop, outputs=None),
    "RNN": _recurrent(_rnn, "tanh"),
    "Scan": Operator(_scan, outputs=None),
}
