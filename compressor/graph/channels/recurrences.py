"""Hidden units through recurrent networks: they are computed, and read again at the next step.

A unit is one position of the state: a row of each gate in all weights and biases, and the column of
the recurrent weight that reads it. The directions of a node share a length, so a position goes
from both. ONNX operators, version 14: ``W[directions, gates * hidden, input]``,
``R[directions, gates * hidden, hidden]``, ``B[directions, 2 * gates * hidden]``.
"""

from __future__ import annotations

import onnx_ir as ir

from compressor.graph.channels.flow import UNKNOWN, Flow
from compressor.graph.channels.labels import along, depends_on, placed
from compressor.graph.channels.products import (
    axis_units,
    note_moved,
    stored_parts,
    unite_read,
)
from compressor.graph.costs import recurrent_macs
from compressor.graph.values import input_of
from compressor.types.channels import Role, Units

LENGTHS = 4
"""The input that holds the lengths of sequences."""
_STATES, _PEEPHOLES = (5, 6), 7


def recurrent(flow: Flow, node: ir.Node) -> None:
    """``LSTM``, ``GRU`` and ``RNN``."""
    entry, weight, matrix = node.inputs[:3]
    read, states = flow.shape(weight), flow.shape(matrix)
    if read is None or states is None or flow.shape(entry) is None:
        flow.freeze_node(node, UNKNOWN)
        return
    if not (flow.is_constant(weight) and flow.is_constant(matrix)):
        flow.freeze_node(node, "has a weight that is computed")
        return
    hidden = axis_units(flow, matrix, 2, states[2])
    unite_read(flow, node, _entering(flow, node), axis_units(flow, weight, 2, read[2]))
    for value, axis in (
        (weight, 1),
        (matrix, 1),
        (input_of(node, 3), 1),
        (input_of(node, _PEEPHOLES), 1),
    ):
        shape = flow.shape(value)
        if value is not None and shape is not None:
            rows = axis_units(flow, value, axis, shape[axis]).reshape(-1, states[2])
            hidden = flow.unify(hidden, flow.couple(rows, 0)[0], node)
    for index in _STATES:
        _start(flow, node, input_of(node, index), hidden)
    _note(flow, node, hidden)
    inner, outer = recurrent_macs(node)
    flow.count(node, (weight, 1), (weight, 2), work=inner)
    flow.count(node, (matrix, 1), (matrix, 2), work=outer)


def _entering(flow: Flow, node: ir.Node) -> Units | None:
    """Return the channels of a sequence; those on its other axes are frozen."""
    channels = None
    for family in flow.labels(node.inputs[0]):
        if depends_on(family, 2) and family.size == family.shape[2]:
            channels = along(family, 2)
        else:
            flow.freeze([family], node, "repeats over them")
    return channels


def _start(flow: Flow, node: ir.Node, state: ir.Value | None, hidden: Units) -> None:
    """Unite the state that a sequence begins with."""
    if state is None:
        return
    units = axis_units(flow, state, 2, len(hidden))
    if (units < 0).all():
        flow.freeze([hidden], node, f"meets {state.name!r}, which has no channels")
    else:
        flow.unify(hidden, units, node)


def _note(flow: Flow, node: ir.Node, hidden: Units) -> None:
    """Record the units as computed here, and what their places in parameters are."""
    first = next(stored_parts(node.inputs[1]), None)
    flow.source(node, first, hidden)
    roles: tuple[tuple[int, int, Role], ...] = (
        *((index, 1, "output") for index in (1, 2)),
        *((index, 2, "input") for index in (1, 2)),
        *((index, 1, "bias") for index in (3, _PEEPHOLES)),
    )
    for index, axis, role in roles:
        value = input_of(node, index)
        if value is not None:
            note_moved(flow, value, axis, role)
    for output in node.outputs:
        rank = len(flow.shape(output) or ())
        flow.put(output, [placed(hidden, rank - 1, rank)] if rank and len(hidden) > 1 else [])
        if rank:
            flow.observe(output, rank - 1)
