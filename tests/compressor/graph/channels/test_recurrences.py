"""Hidden units of LSTM, GRU and RNN go with their gates, their columns, and what reads them."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.graph.channels.analysis import map_channels
from compressor.graph.channels.slicing import remove_channels
from compressor.graph.costs import macs
from tests.compressor.graph.channels.channel_graphs import Weight, checked, graph

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
HIDDEN, ENTRY = 6, 5


def weights(
    kind: str, directions: int = 1, entry: int = ENTRY, name: str = ""
) -> dict[str, Weight]:
    rows = GATES[kind] * HIDDEN
    return {
        f"w{name}": (directions, rows, entry),
        f"r{name}": (directions, rows, HIDDEN),
        f"b{name}": (directions, 2 * rows),
    }


@pytest.mark.parametrize("kind", GATES)
def test_hidden_units_go(kind: str) -> None:
    model = graph(
        f"""(float[T,N,4] x) => (float[T,1,N,3] y) {{
            entry = MatMul(x, first)
            h, last = {kind}<hidden_size = {HIDDEN}>(entry, w, r, b)
            y = MatMul(h, head)
        }}""",
        {"first": (4, ENTRY), **weights(kind), "head": (HIDDEN, 3)},
    )
    channels = checked(model, ENTRY + HIDDEN)
    roles = {m.parameter: (m.axis, m.role) for g in channels.groups for m in g.members}
    assert roles["b"] == (1, "bias")
    assert {g.name for g in channels.groups if not g.frozen} == {"first", "w"}
    work = {p.macs for p in channels.products if p.node}
    assert {GATES[kind] * HIDDEN * ENTRY, GATES[kind] * HIDDEN * HIDDEN} <= work


@pytest.mark.parametrize("kind", GATES)
def test_both_directions_and_stacked(kind: str) -> None:
    """The last state of the second is read; lengths say where each sequence ends."""
    model = graph(
        f"""(float[T,N,{ENTRY}] x, int32[N] lengths) => (float[2,N,3] y) {{
            h, a = {kind}<hidden_size = {HIDDEN}, direction = "bidirectional">(x, w, r, b, lengths)
            turned = Transpose<perm = [0, 2, 1, 3]>(h)
            line = Reshape(turned, shape)
            i, last = {kind}<hidden_size = {HIDDEN}, direction = "bidirectional">(line, w2, r2, b2)
            y = MatMul(last, head)
        }}""",
        {
            **weights(kind, 2),
            **weights(kind, 2, 2 * HIDDEN, "2"),
            "shape": [0, 0, 2 * HIDDEN],
            "head": (HIDDEN, 3),
        },
    )
    checked(model, 2 * HIDDEN)


def test_states_and_peepholes_that_are_stored() -> None:
    model = graph(
        f"""(float[T,2,{ENTRY}] x) => (float[T,1,2,3] y) {{
            h, a, c = LSTM<hidden_size = {HIDDEN}>(x, w, r, b, , h0, c0, p)
            y = MatMul(h, head)
        }}""",
        {
            **weights("LSTM"),
            "h0": (1, 2, HIDDEN),
            "c0": (1, 2, HIDDEN),
            "p": (1, 3 * HIDDEN),
            "head": (HIDDEN, 3),
        },
    )
    checked(model, HIDDEN)


def test_a_batch_first_layout() -> None:
    model = graph(
        f"""(float[N,T,{ENTRY}] x) => (float[N,T,1,3] y) {{
            h, a = GRU<hidden_size = {HIDDEN}, layout = 1, linear_before_reset = 1>(x, w, r, b)
            y = MatMul(h, head)
        }}""",
        {**weights("GRU"), "head": (HIDDEN, 3)},
    )
    channels = map_channels(model)
    assert channels.removable.sum() == HIDDEN
    removed = np.zeros(channels.count, dtype=bool)
    removed[:2] = channels.removable[:2]
    smaller, _ = remove_channels(model, channels, removed)
    (node,) = (n for n in smaller.graph if n.op_type == "GRU")
    assert node.attributes.get_int("hidden_size") == HIDDEN - int(removed.sum())
    assert macs(smaller) == round(channels.macs(removed)) < macs(model)


def test_what_keeps_hidden_units() -> None:
    """A state that goes in, and a weight that depends on the input."""
    model = graph(
        f"""(float[T,1,{ENTRY}] x, float[1,1,{HIDDEN}] h0) => (float[T,1,1,3] y) {{
            h, h1 = GRU<hidden_size = {HIDDEN}>(x, w, r, b, , h0)
            y = MatMul(h, head)
        }}""",
        {**weights("GRU"), "head": (HIDDEN, 3)},
    )
    checked(model, 0, {"GRU 'h' meets 'h0', which has no channels"})
    rows = 3 * HIDDEN
    computed = graph(
        f"""(float[T,1,{ENTRY}] x, float[1,{rows},{ENTRY}] w) => (float[T,1,1,3] y) {{
            h, last = GRU<hidden_size = {HIDDEN}>(x, w, r)
            y = MatMul(h, head)
        }}""",
        {"r": (1, rows, HIDDEN), "head": (HIDDEN, 3)},
    )
    assert not map_channels(computed).removable.any()
