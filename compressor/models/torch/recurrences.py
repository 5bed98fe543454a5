"""Recurrent layers of PyTorch that the exporter unrolls, or writes wrongly.

``nn.RNN`` becomes ONNX's ``RNN``, for sequences of any length. An LSTM with projections
(``proj_size``) becomes an ONNX ``LSTM`` without them: its recurrent weights ``U`` are applied to
the projected state ``P h`` (Sak et al. 2014, arXiv:1402.1128), so the inner state ``h`` has the
recurrent weights ``U P``, and the outputs are projected afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compressor.graph.operators import operator
from compressor.graph.values import constant_array, origin

Value: TypeAlias = Any
"""A tensor of the graph that is being written."""

_GATES = (0, 3, 1, 2)  # input, output, forget and cell gate, in the order that PyTorch has them
_PLAIN = {"rnn_tanh": "Tanh", "rnn_relu": "Relu"}


def recurrences() -> Mapping[Callable[..., Any], Callable[..., Value]]:
    """Return translations by operator, as :mod:`compressor.models.torch.translations` has them."""
    made = {getattr(torch.ops.aten, name).input: _plain(kind) for name, kind in _PLAIN.items()}
    return {**made, torch.ops.aten.lstm.input: _lstm}


@contextmanager
def whole_recurrences() -> Iterator[None]:
    """Make tracing record each recurrent layer as one operator, for sequences of any length.

    The exporter does so for LSTM and GRU for as long as it traces; what PyTorch remembers of its
    usual rules would unroll the second layer that is lowered.
    """
    from torch.export._patches import _register_rnn_while_loop_decomposition

    aten = torch.ops.aten
    plain = [getattr(aten, name).input for name in _PLAIN]
    for layer in (aten.lstm.input, aten.gru.input, *plain):
        layer._dispatch_cache.clear()
    with ExitStack() as stack:
        for layer in plain:
            stack.enter_context(_register_rnn_while_loop_decomposition(layer, _shapes))
        yield
    for layer in plain:
        layer._dispatch_cache.clear()


def _shapes(
    input: Tensor, hx: Tensor, params: Sequence[Tensor], *options: bool | float
) -> tuple[Tensor, Tensor]:
    """Return zeros in the shapes of a plain layer's results: tracing looks at nothing else."""
    _biases, _layers, _dropout, _train, bidirectional, _batch_first = options
    features = params[1].shape[1] * (2 if bidirectional else 1)
    return input.new_zeros(*input.shape[:-1], features), hx.clone()


def _plain(activation: str) -> Callable[..., tuple[Value, Value]]:
    """Return the translation of layers with one activation and no gates."""

    def translated(
        input: Value,
        hx: Value,
        params: Sequence[Value],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Value, Value]:
        import onnxscript

        del dropout, train  # of evaluation
        op: Any = onnxscript.opset18
        directions = 2 if bidirectional else 1
        x, finals = op.Transpose(input, perm=[1, 0, 2]) if batch_first else input, []
        for layer in range(num_layers):
            weights = _of_layer(params, layer, directions, 4 if has_biases else 2)
            first = layer * directions
            y, final = op.RNN(
                x,
                _stacked(op, [w[0] for w in weights]),
                _stacked(op, [w[1] for w in weights]),
                _stacked(op, [op.Concat(*w[2:], axis=0) for w in weights]) if has_biases else None,
                None,
                op.Slice(hx, [first], [first + directions], [0]),
                activations=[activation] * directions,
                direction="bidirectional" if bidirectional else "forward",
                hidden_size=weights[0][1].shape[1],
            )
            x = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1])
            finals.append(final)
        output = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
        return output, op.Concat(*finals, axis=0)

    return translated


def _lstm(
    input: Value,
    hx: Sequence[Value],
    params: Sequence[Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Value, Value, Value]:
    """Return the exporter's translation, or that of layers with projections."""
    import onnxscript
    from onnxscript.function_libs.torch_lib.ops.core import aten_lstm

    op: Any = onnxscript.opset18
    directions, usual = (2 if bidirectional else 1), (4 if has_biases else 2)
    if len(params) == num_layers * directions * usual:
        usual_way: Callable[..., tuple[Value, Value, Value]] = aten_lstm
        return usual_way(
            input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
    if not _is_zero(hx[0]):
        raise NotImplementedError("an LSTM with projections that starts with a state of its own")
    x = op.Transpose(input, perm=[1, 0, 2]) if batch_first else input
    hidden, cells = [], []
    for layer in range(num_layers):
        first = layer * directions
        cell = op.Slice(hx[1], [first], [first + directions], [0])
        y, cell = _projected(op, x, _of_layer(params, layer, directions, usual + 1), cell)
        ends = [op.Slice(y, [-1], [2**31 - 1], [0]), op.Slice(y, [0], [1], [0])][:directions]
        hidden += [op.Squeeze(op.Slice(e, [d], [d + 1], [1]), [0]) for d, e in enumerate(ends)]
        cells.append(cell)
        x = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1])
    output = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
    return output, op.Concat(*hidden, axis=0), op.Concat(*cells, axis=0)


def _projected(
    op: Any, x: Value, weights: Sequence[Sequence[Value]], cell: Value
) -> tuple[Value, Value]:
    """Return a layer's outputs, ``[steps, directions, batch, projected]``, and its last cells.

    Args:
        weights: for each direction those of the input, of the state, two biases if there are
            any, and the projection.
    """
    width = weights[0][1].shape[0] // len(_GATES)
    biases = [op.Concat(*(_gates(op, b, width) for b in w[2:-1]), axis=0) for w in weights if w[3:]]
    y, _, last = op.LSTM(
        x,
        _stacked(op, [_gates(op, w[0], width) for w in weights]),
        _stacked(op, [op.MatMul(_gates(op, w[1], width), w[-1]) for w in weights]),
        _stacked(op, biases) if biases else None,
        None,
        None,
        cell,
        direction="bidirectional" if len(weights) > 1 else "forward",
        hidden_size=width,
    )
    projections = op.Unsqueeze(_stacked(op, [op.Transpose(w[-1]) for w in weights]), [0])
    return op.MatMul(y, projections), last


def _of_layer(
    params: Sequence[Value], layer: int, directions: int, count: int
) -> list[Sequence[Value]]:
    """Return the weights of a layer for each of its directions."""
    starts = [(layer * directions + d) * count for d in range(directions)]
    return [params[start : start + count] for start in starts]


def _stacked(op: Any, weights: Sequence[Value]) -> Value:
    """Return the weights of each direction with the directions as first axis."""
    single = [op.Unsqueeze(weight, [0]) for weight in weights]
    return op.Concat(*single, axis=0) if len(single) > 1 else single[0]


def _gates(op: Any, weight: Value, width: int) -> Value:
    """Return the rows of a weight or bias in the order of gates that ONNX has."""
    return op.Concat(
        *(op.Slice(weight, [g * width], [(g + 1) * width], [0]) for g in _GATES), axis=0
    )


def _is_zero(value: Value) -> bool:
    """Whether a value is zeros, as layers make them that are called without a state."""
    start = constant_array(origin(value, lambda node: operator(node).zeros == "repeated"))
    return start is not None and not start.any()
