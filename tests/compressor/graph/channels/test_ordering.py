"""Channels that may change places, and what looks at their places."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from compressor.graph.channels.analysis import analyse
from compressor.graph.channels.slicing import ordering
from tests.compressor.graph.channels.channel_graphs import (
    Weight,
    graph,
    image_net,
    reordered,
    row_net,
)

ALIKE: dict[str, tuple[str, dict[str, Weight]]] = {
    "MatMul": (
        "s = Sigmoid(h) t = Transpose<perm=[0,2,1]>(s) g = MatMul(s, t) z = MatMul(g, h)",
        {},
    ),
    "Einsum": (
        'g = Sigmoid(h) s = Einsum<equation="nse,nte->nst">(g, g) z = MatMul(s, h)',
        {},
    ),
    "ReduceSum": (
        "s = Sigmoid(h) r = ReduceSum<keepdims=1>(s, last) z = Mul(h, r)",
        {"last": [-1]},
    ),
    "Div": ("s = Sigmoid(h) z = Div(s, h)", {}),
    "Reciprocal": ("s = Sigmoid(h) r = Reciprocal(h) z = Mul(s, r)", {}),
    "LayerNormalization": ("z = LayerNormalization(h, own)", {"own": (12,)}),
    "Softmax": ("z = Softmax(h)", {}),
}


def obstacles(model: ir.Model) -> dict[str, str]:
    found = analyse(model)
    order = ordering(found)
    return {group.name: order.obstacle(group) for group in found.channels.groups}


@pytest.mark.parametrize("operator", ALIKE)
def test_operators_that_mix_channels_treat_them_alike(operator: str):
    model = row_net(*ALIKE[operator])
    assert {g.mixed for g in analyse(model).channels.groups if not g.frozen} == {operator}
    assert reordered(model) == {"w"}


def test_a_convolution_by_computed_numbers_treats_channels_alike():
    text = """
        s = Sigmoid(h)
        e = Exp(own)
        g = Conv(s, e)
        z = Mul(h, g)
    """
    model = image_net(text, {"own": (1, 8, 1, 1)})
    assert {g.mixed for g in analyse(model).channels.groups if not g.frozen} == {"Conv"}
    assert reordered(model) == {"w"}


def test_of_equal_values_the_first_is_the_largest():
    """Behind ``Relu`` many channels are zero, so that another order gives another function."""
    text = "a = Neg(h) r = Relu(a) m = Neg(r) z = Hardmax<axis={axis}>(m)"
    among, along = (image_net(text.replace("{axis}", axis), {}) for axis in ("1", "3"))
    assert obstacles(among)["w"] == "Hardmax looks at their places"
    assert reordered(among) == set()
    assert reordered(along) == {"w"}


def test_what_moves_picks_or_repeats_channels_keeps_them_where_they_are():
    moved = "they are divided, joined with others, or turned round on their way"
    crowded = "they lie on an axis with others, or at several places of it"
    turned = image_net("z = Slice(h, start, end, axis, step)", BOUNDS)
    assert obstacles(turned)["w"] == moved
    half: dict[str, Weight] = {"sizes": [4, 4]}
    divided = image_net("p, q = Split<axis=1>(h, sizes) z = Concat<axis=1>(q, p)", half)
    assert obstacles(divided)["w"] == crowded
    repeated = image_net("z = Tile(h, often)", {"often": [1, 2, 1, 1]}, read=16)
    assert obstacles(repeated)["w"] == moved
    for model in (turned, divided, repeated):
        assert reordered(model) == set()


BOUNDS: dict[str, Weight] = {"start": [-1], "end": [-9], "axis": [1], "step": [-1]}


def test_a_constant_inside_a_node_is_no_parameter():
    model = graph(
        """(float[N,4] x) => (float[N,3] y) {
            h = MatMul(x, w)
            c = Constant<value = float[2] {1.0, 3.0}>()
            m = Mul(h, c)
            y = MatMul(m, head)
        }""",
        {"w": (4, 2), "head": (2, 3)},
    )
    assert obstacles(model)["w"] == "a constant inside a node holds values for them"
    assert reordered(model) == set()
