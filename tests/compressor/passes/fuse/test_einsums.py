"""``Einsum`` of a value and a weight becomes a layer; others stay."""

import numpy as np
import pytest

from compressor.graph.layers import graph_layers

LENGTHS = {"h": 6, "n": 2, "d": 3, "e": 5}


def model(parse, rng, equation, value, weight):
    """Return a graph whose ``x`` has lengths from outside where they are none of the weight's."""
    axes = ", ".join(str(LENGTHS.get(c, c.upper())) for c in value)
    held = rng.standard_normal([LENGTHS[c] for c in weight]).astype(np.float32)
    outputs = ", ".join("?" * len(equation.partition(">")[2].replace("...", "ib")))
    inputs = ("w", "x") if equation.startswith(weight) else ("x", "w")
    return parse(
        f"g (float[{axes}] x) => (float[{outputs}] y) "
        f'{{ y = Einsum<equation = "{equation}">({", ".join(inputs)}) }}',
        {"w": held},
    )


@pytest.mark.parametrize(
    ("equation", "value", "weight", "operators"),
    [
        ("ibh,hnd->ibnd", "ibh", "hnd", {"MatMul": 1, "Reshape": 1}),
        ("ibnd,hnd->ibh", "ibnd", "hnd", {"Reshape": 1, "MatMul": 1}),
        ("ibnd,hdn->hib", "ibnd", "hdn", {"Reshape": 1, "MatMul": 1, "Transpose": 1}),
        ("nhd,ibh->nbid", "ibh", "nhd", {"Transpose": 2, "MatMul": 1, "Reshape": 1}),
        ("...h,hnd->...nd", "ibh", "hnd", {"MatMul": 1, "Reshape": 1}),
        ("ibh,eh->ibe", "ibh", "eh", {"MatMul": 1}),
    ],
)
def test_a_weight_becomes_that_of_a_layer(
    parse, fuse, ops, agree, rng, equation, value, weight, operators
):
    before = model(parse, rng, equation, value, weight)
    after = fuse(before).carrier.model
    assert ops(after) == operators
    (layer,) = graph_layers(after)
    assert (layer.weight, len(layer.shape)) == ("w", 2)
    shape = [LENGTHS.get(c, 4 + i) for i, c in enumerate(value)]
    agree(before, after, {"x": rng.standard_normal(shape).astype(np.float32)}, 1e-5)


@pytest.mark.parametrize(
    ("equation", "value", "weight"),
    [
        pytest.param("ihn,hn->ihn", "ihn", "hn", id="nothing is summed"),
        pytest.param("ihn,hne->ine", "ihn", "hne", id="an axis of both is left"),
        pytest.param("ibh,h->ib", "ibh", "h", id="no axis of the weight is left"),
        pytest.param("ibh,hn->in", "ibh", "hn", id="an axis of the value alone is summed"),
    ],
)
def test_what_is_no_product_of_matrices_stays(parse, fuse, ops, rng, equation, value, weight):
    before = model(parse, rng, equation, value, weight)
    assert ops(fuse(before).carrier.model) == {"Einsum": 1}


@pytest.mark.parametrize(("columns", "rows"), [(1, 4), (4, 1)])
def test_an_axis_that_is_repeated_stays(columns, rows, parse, fuse, ops, agree, rng):
    before = parse(
        f"g (float[2, 3, {columns}] x) => (float[?, ?, ?] y) "
        '{ y = Einsum<equation = "abc,cd->abd">(x, w) }',
        {"w": rng.standard_normal((rows, 5)).astype(np.float32)},
    )
    after = fuse(before).carrier.model
    assert ops(after) == {"Einsum": 1}
    agree(before, after, {"x": rng.standard_normal((2, 3, columns)).astype(np.float32)}, 1e-6)
