"""Convolutions and matrix products."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compressor.graph.channels.channel_graphs import (
    Weight,
    checked,
    graph,
    image_net,
    row_net,
)

CONVOLUTIONS: dict[str, tuple[str, dict[str, Weight], int, int]] = {
    # what computes z, weights, channels of z, units that may go
    "plain": ("z = Conv(h, w2, b2)", {"w2": (6, 8, 3, 3), "b2": (6,)}, 6, 14),
    "grouped": ("z = Conv<group=4>(h, w2, b2)", {"w2": (12, 2, 1, 1), "b2": (12,)}, 12, 4),
    "depthwise": ("z = Conv<group=8>(h, w2, b2)", {"w2": (8, 1, 3, 3), "b2": (8,)}, 8, 8),
    "depthwise, two of each": (
        "z = Conv<group=8>(h, w2, b2)",
        {"w2": (16, 1, 3, 3), "b2": (16,)},
        16,
        8,
    ),
    "transposed": ("z = ConvTranspose(h, w2, b2)", {"w2": (8, 6, 3, 3), "b2": (6,)}, 6, 14),
    "transposed and grouped": (
        "z = ConvTranspose<group=4>(h, w2, b2)",
        {"w2": (8, 3, 3, 3), "b2": (12,)},
        12,
        4,
    ),
    "transposed and depthwise": (
        "z = ConvTranspose<group=8>(h, w2, b2)",
        {"w2": (8, 1, 3, 3), "b2": (8,)},
        8,
        8,
    ),
    "of a transposed weight": (
        "wt = Transpose<perm=[1,0,2,3]>(w2) z = Conv(h, wt)",
        {"w2": (8, 6, 1, 1)},
        6,
        14,
    ),
    "of a reshaped weight": (
        "wt = Reshape(w2, four) z = Conv(h, wt)",
        {"w2": (6, 8), "four": [6, 8, 1, 1]},
        6,
        14,
    ),
    "of a weight of two factors": (
        "wt = Mul(w2, chosen) z = Conv(h, wt)",
        {"w2": (6, 8, 1, 1), "chosen": (6, 8, 1, 1)},
        6,
        14,
    ),
    "two of one weight": (
        "a = Conv(h, w2) r = Relu(a) c = Conv(r, w2) z = Add(a, c)",
        {"w2": (8, 8, 1, 1)},
        8,
        8,
    ),
    "two of one bias": (
        "a = Conv(h, w2, b2) z = Conv(a, w3, b2)",
        {"w2": (8, 8, 1, 1), "w3": (8, 8, 1, 1), "b2": (8,)},
        8,
        16,
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str):
    text, weights, read, wanted = CONVOLUTIONS[name]
    checked(image_net(text, weights, read), wanted)


def test_a_grouped_convolution_of_the_input_stays():
    model = graph(
        """(float[N,4,8,8] x) => (float[N,3,8,8] y) {
            h = Conv<group=2>(x, w) y = Conv(h, v)
        }""",
        {"w": (6, 2, 1, 1), "v": (3, 6, 1, 1)},
    )
    checked(model, 0, {"Conv 'h' reads channels that nothing computes"})


def test_a_weight_of_a_plain_and_a_grouped_convolution_stays():
    """Its second axis is all the channels of one, and those of a group of the other."""
    text = "a = Conv(h, w2) xx = Concat<axis=1>(h, h) c = Conv<group=2>(xx, w2) z = Add(a, c)"
    channels = checked(
        image_net(text, {"w2": (8, 8, 1, 1)}),
        0,
        {"Conv 'c' slides over them"},
    )
    assert channels.removable.sum() == 0


def test_a_weight_that_is_computed_from_the_input_freezes():
    text = "k = ReduceMean<keepdims=1>(h, first) z = Conv(h, k)"
    checked(
        image_net(text, {"first": [0]}, 1),
        0,
        {"Conv 'z' has a weight that is computed"},
    )


def test_a_weight_stored_as_one_line_loses_rows():
    text = "wt = Reshape(w2, four) z = Conv(h, wt)"
    model = image_net(text, {"w2": (48,), "four": [6, 8, 1, 1]}, 6)
    channels = checked(model, 6, {"Conv 'z' meets channels that nothing computes"})
    (line,) = channels.parameters["w2"]
    assert line is not None
    assert [len(np.unique(line[row : row + 8])) for row in range(0, 48, 8)] == [1] * 6


def test_gemm_in_all_orders():
    model = graph(
        """(float[N,4] x) => (float[N,3] y) {
            h = Gemm<transB=1, alpha=0.5>(x, w, b)
            i = Gemm<beta=2.0>(h, w2, b2)
            j = Transpose(i)
            y = Gemm<transA=1>(j, w3)
        }""",
        {"w": (8, 4), "b": (1, 8), "w2": (8, 6), "b2": (6,), "w3": (6, 3)},
    )
    channels = checked(model, 14)
    roles = {(m.parameter, m.axis): m.role for g in channels.groups for m in g.members}
    assert roles["w", 0] == roles["w2", 1] == "output"
    assert roles["w2", 0] == roles["w3", 0] == "input"


def test_a_weight_that_is_also_added():
    """Its rows are then the channels that it computes, and those of what it is added to."""
    model = graph(
        """(float[N,4] x) => (float[N,3] y) {
            a = MatMul(x, w) s = MatMul(square, w2) c = MatMul(x, w3) e = MatMul(a, w2)
            d = Add(c, e) f = ReduceSum<keepdims=0>(w2, first) g = Mul(d, f) y = MatMul(g, head)
        }""",
        {
            "w": (4, 6),
            "w2": (6, 8),
            "w3": (4, 8),
            "square": (6, 6),
            "head": (8, 3),
            "first": [0],
        },
    )
    checked(model, 14)


ATTENTION = """
    {projections}
    weights = Softmax(scores)
    own = MatMul(weights, value)
    merged = Transpose<perm=[0,2,1,3]>(own)
    z = Reshape(merged, whole)
"""


def attention(few: int) -> str:
    """Write attention of 4 heads of 3 features; keys and values of ``few`` of them."""
    lines = []
    for name, order, count in (
        ("query", "0,2,1,3", 4),
        ("key", "0,2,3,1", few),
        ("value", "0,2,1,3", few),
    ):
        lines += [
            f"{name}_flat = MatMul(h, w_{name})",
            f"{name}_heads = Reshape({name}_flat, heads{count})",
            f"{name}_few = Transpose<perm=[{order}]>({name}_heads)",
        ]
        if count < 4:
            lines += [
                f"{name}_one = Unsqueeze({name}_few, two)",
                f"{name}_more = Expand({name}_one, {name}_times)",
                f"{name} = Reshape({name}_more, {name}_all)",
            ]
        else:
            lines.append(f"{name} = Identity({name}_few)")
    lines.append("scores = MatMul(query, key)")
    return ATTENTION.replace("{projections}", "\n".join(lines))


def attention_weights(few: int) -> dict[str, Weight]:
    return {
        "w_query": (12, 12),
        "w_key": (12, 3 * few),
        "w_value": (12, 3 * few),
        f"heads{few}": [0, 5, few, 3],
        "heads4": [0, 5, 4, 3],
        "two": [2],
        "key_times": [1, few, 4 // few, 3, 5],
        "value_times": [1, few, 4 // few, 5, 3],
        "key_all": [0, 4, 3, 5],
        "value_all": [0, 4, 5, 3],
        "whole": [0, 5, 12],
    }


@pytest.mark.parametrize("few", [4, 2, 1])
def test_whole_heads_go_and_whole_groups_of_queries(few: int):
    """Where all queries share one key, each of them may go, and the key stays."""
    model = row_net(attention(few), attention_weights(few))
    heads = 4 if few == 1 else few
    frozen = {
        "MatMul 'scores' holds the same for every head or group",
        "Reshape 'z' merges their axis with that of other channels",
    }
    channels = checked(model, 12 + heads, frozen if few == 1 else set())
    (query,) = [own for own in channels.parameters["w_query"][1:] if own is not None]
    assert [len(np.unique(part)) for part in query.reshape(4, 3)] == [1] * 4
    assert len(np.unique(query)) == heads


BATCHED = """
    a = Reshape(h, heads)
    t = Transpose<perm=[0,2,1,3]>(a)
    {lengths}
    q = Reshape(t, flat)
    s = Sigmoid(q)
    k = Transpose<perm=[0,2,1]>(s)
    scores = MatMul(q, k)
    weights = Softmax(scores)
    own = MatMul(weights, q)
    batch = Shape<start=0, end=1>(x)
    back = Concat<axis=0>(batch, last)
    o = Reshape(own, back)
    u = Transpose<perm=[0,2,1,3]>(o)
    z = Reshape(u, rows)
"""


@pytest.mark.parametrize("computed", [False, True])
def test_heads_that_are_merged_with_the_batch(computed: bool):
    weights: dict[str, Weight] = {"heads": [0, 5, 4, 3], "last": [4, 5, 3], "rows": [0, 5, -1]}
    if computed:
        own = "n = Shape<start=0, end=1>(t) m = Mul(n, four) flat = Concat<axis=0>(m, rest, three)"
        weights |= {"four": [4], "rest": [-1], "three": [3]}
    else:
        own = ""
        weights |= {"flat": [-1, 5, 3]}
    checked(row_net(BATCHED.replace("{lengths}", own), weights), 4)


def test_a_product_with_what_all_heads_share():
    """Heads go from what is multiplied; features stay, since the weight has them for all heads."""
    text = """
        a = Reshape(h, heads)
        t = Transpose<perm=[0,2,1,3]>(a)
        m = MatMul(t, shared)
        u = Transpose<perm=[0,2,1,3]>(m)
        z = Reshape(u, rows)
    """
    weights: dict[str, Weight] = {"heads": [0, 5, 4, 3], "shared": (3, 2), "rows": [0, 5, 8]}
    channels = checked(
        row_net(text, weights, 8),
        4,
        {"Reshape 'z' merges their axis with that of other channels"},
    )
    assert {g.name for g in channels.groups if not g.frozen} == {"w"}


def test_a_product_with_a_vector_freezes():
    model = graph(
        "(float[N,4] x) => (float[N] y) { h = MatMul(x, w) y = MatMul(h, v) }",
        {"w": (4, 8), "v": (8,)},
    )
    checked(model, 0, {"MatMul 'y' multiplies a vector, or a value of unknown shape"})


def test_tied_embeddings():
    model = graph(
        """(int64[N,5] i) => (float[N,5,20] y) {
            e = Gather(table, i) h = MatMul(e, w) g = Gelu(h) o = MatMul(g, w2) r = Add(e, o)
            turned = Transpose<perm=[1,0]>(table) y = MatMul(r, turned)
        }""",
        {"table": (20, 12), "w": (12, 16), "w2": (16, 12)},
    )
    channels = checked(model, 28, {"Gather 'e' looks them up by a computed index"})
    features = next(g for g in channels.groups if g.name == "table" and not g.frozen)
    members = {(m.parameter, m.axis, m.role) for m in features.members}
    assert members == {("table", 1, "output"), ("w", 0, "input"), ("w2", 1, "output")}


def test_gated_layers_lose_what_both_compute():
    text = "g = MatMul(h, w2) s = Sigmoid(g) u = MatMul(h, w3) z = Mul(s, u)"
    checked(row_net(text, {"w2": (12, 8), "w3": (12, 8)}, 8), 20)


def test_an_outer_product_of_positions_is_no_layer():
    model = graph(
        """(float[N,5,4] x, float[N,5,1] p) => (float[N,5,3] y) {
            h = MatMul(x, w) angles = MatMul(p, frequencies) c = Cos(angles) m = Mul(h, c)
            y = MatMul(m, head)
        }""",
        {"w": (4, 6), "frequencies": (1, 6), "head": (6, 3)},
    )
    channels = checked(model, 6)
    assert {g.name for g in channels.groups} == {"w", "head"}


def test_a_product_of_values_that_are_not_zero_is_mixed():
    """Two features of zero add a quarter, as sigmoids; those that are gone add nothing."""
    text = "s = Sigmoid(h) t = Transpose<perm=[0,2,1]>(s) g = MatMul(s, t) z = MatMul(g, h)"
    checked(row_net(text, {}), 0, mixed={"MatMul"})
    checked(row_net(text.replace("Sigmoid", "Tanh"), {}), 12)
