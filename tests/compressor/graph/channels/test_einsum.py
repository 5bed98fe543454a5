"""``Einsum``."""

from __future__ import annotations

import pytest

from compressor.graph.channels.products import terms
from tests.compressor.graph.channels.channel_graphs import checked, graph


@pytest.mark.parametrize(
    ("equation", "ranks", "wanted"),
    [
        ("ij,jk->ik", [2, 2], (["ij", "jk"], "ik")),
        ("ij,jk", [2, 2], (["ij", "jk"], "ik")),
        ("b i j -> b j i", [3], (["bij"], "bji")),
        ("...d,ed->...e", [3, 2], (["abd", "ed"], "abe")),
        ("...i,...i->...", [1, 3], (["i", "abi"], "ab")),
        ("ii->i", [2], None),
        ("ij,jk->ik", [2, 3], None),
        ("ij,jk->ik", [2], None),
    ],
)
def test_equations(equation: str, ranks: list[int], wanted: tuple[list[str], str] | None):
    assert terms(equation, ranks) == wanted


def test_heads_and_their_features():
    """Both letters of the weight are channels: four heads, and six features of all heads."""
    model = graph(
        """(float[N,5,4] x) => (float[N,5,3] y) {
            h = Einsum<equation="nsd,hed->nshe">(x, w)
            r = Relu(h)
            y = Einsum<equation="nshe,heo->nso">(r, w2)
        }""",
        {"w": (4, 6, 4), "w2": (4, 6, 3)},
    )
    channels = checked(model, 10)
    roles = {(m.parameter, m.axis): m.role for g in channels.groups for m in g.members}
    assert roles["w", 0] == roles["w", 1] == "output"
    assert roles["w2", 0] == roles["w2", 1] == "input"


def test_sums_of_what_is_not_zero_are_mixed():
    model = graph(
        """(float[N,5,4] x) => (float[N,5,3] y) {
            h = Einsum<equation="...d,ed->...e">(x, w)
            s = Sigmoid(h)
            g = Einsum<equation="nse,nte->nst">(s, s)
            o = Einsum<equation="nst,nte->nse">(g, h)
            i = MatMul(o, w3)
            y = Einsum<equation="nse,eo->nso">(i, w2)
        }""",
        {"w": (6, 4), "w2": (7, 3), "w3": (6, 7)},
    )
    checked(model, 7, mixed={"Einsum"})


def test_a_diagonal_freezes():
    model = graph(
        """(float[N,4] x) => (float[N] y) {
            h = MatMul(x, w) a = Unsqueeze(h, two) s = Mul(a, v)
            y = Einsum<equation="nii->n">(s)
        }""",
        {"w": (4, 8), "two": [2], "v": (1, 8, 8)},
    )
    checked(model, 0, {"Einsum 'y' has an equation that is not understood"})
