"""Layers in two: at full rank the same function, of every kind of layer and attribute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.graph.costs import macs, node_macs
from compressor.graph.layers import layers_with_nodes
from compressor.graph.stored_weights import sole_path
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.factor.decomposition import decompose
from compressor.passes.factor.factored_graph import (
    Factors,
    factor_names,
    factored,
    full_rank,
    most_saving,
)
from compressor.types.tensors import Array
from tests.compressor.passes.factor.factor_graphs import WEIGHT, normal, one_layer, output

FEW = settings(max_examples=25)


def split(carrier: OnnxCarrier, rank: int | None = None) -> OnnxCarrier:
    """Return the same model with its layer in two, at full rank unless another is given."""
    (layer,) = carrier.layers()
    rank = rank or full_rank(layer)
    up, down = decompose(layer.canonical(carrier.weight(layer)), rank).factors(rank)
    graph, names = factored(carrier.graph(), [Factors(layer, down, up)])
    assert set(names) <= graph.graph.initializers.keys()
    return OnnxCarrier(graph)


def check(carrier: OnnxCarrier, x: Array, kind: str) -> None:
    """Compare a layer with its product, and count what they cost at every rank."""
    want = output(carrier, x)
    after = split(carrier)
    found = output(after, x)
    assert found.shape == want.shape
    np.testing.assert_allclose(found, want, atol=1e-4 * max(float(np.abs(want).max()), 1.0))
    assert [layer.name for layer in after.layers()] == ["layer.down", "layer.up"]
    assert {layer.kind for layer in after.layers()} == {kind}
    assert WEIGHT not in after.graph().graph.initializers
    (layer,) = carrier.layers()
    for rank in range(1, full_rank(layer) + 1):
        small = split(carrier, rank)
        saved = macs(small.graph()) < macs(carrier.graph())
        assert saved == (rank <= most_saving(layer))
        assert sum(x.parameters for x in small.layers()) == rank * (layer.rows + layer.columns)
        for one in small.layers():
            assert rank in (one.rows, one.columns)


LENGTHS = st.integers(1, 6)


@FEW
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([{}, {"auto_pad": "SAME_UPPER"}, {"pads": 1}, {"dilations": 2}]),
    st.integers(1, 2),
    st.booleans(),
    st.integers(1, 3),
)
def test_convolutions(
    axes: int,
    inputs: int,
    outputs: int,
    extra: dict[str, Any],
    stride: int,
    has_bias: bool,
    side: int,
):
    kernel = [side, *[2] * (axes - 1)]
    options = {
        key: value if isinstance(value, str) else [value] * (axes * (2 if key == "pads" else 1))
        for key, value in extra.items()
    }
    carrier = one_layer(
        "Conv",
        [2, inputs, *[7] * axes],
        normal(1, outputs, inputs, *kernel),
        normal(2, outputs) if has_bias else None,
        strides=[stride] * axes,
        **options,
    )
    check(carrier, normal(3, 2, inputs, *[7] * axes), "Conv")


@FEW
@given(LENGTHS, LENGTHS, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_gemm(columns: int, rows: int, has_bias: bool, trans_a: bool, trans_b: bool, turned: bool):
    weight = normal(1, rows, columns) if trans_b else normal(1, columns, rows)
    shape = (columns, 3) if trans_a else (3, columns)
    carrier = one_layer(
        "Gemm",
        shape,
        weight,
        normal(2, rows) if has_bias else None,
        turned=turned,
        transA=int(trans_a),
        transB=int(trans_b),
        alpha=0.5,
        beta=2.0,
    )
    check(carrier, normal(3, *shape), "Gemm")


@FEW
@given(LENGTHS, LENGTHS, st.lists(st.integers(1, 3), max_size=2), st.booleans())
def test_matrix_products(columns: int, rows: int, batch: list[int], turned: bool):
    carrier = one_layer("MatMul", [*batch, columns], normal(1, columns, rows), turned=turned)
    check(carrier, normal(3, *batch, columns), "MatMul")


def test_the_second_layer_is_the_old_node():
    carrier = one_layer("Conv", [1, 4, 5, 5], normal(1, 6, 4, 3, 3), normal(2, 6))
    nodes = {layer.name: node for layer, node in layers_with_nodes(split(carrier, 2).graph())}
    assert nodes["layer.up"].name == "node"
    assert nodes["layer.up"].outputs[0].name == "y"
    assert nodes["layer.up"].inputs[2].name == "layer.bias"
    assert len(nodes["layer.down"].inputs) == 2
    between = nodes["layer.down"].outputs[0]
    assert list(between.shape) == [1, 2, 3, 3]
    assert between.dtype == nodes["layer.up"].outputs[0].dtype
    assert node_macs(nodes["layer.down"]) == 9 * 2 * 36
    assert node_macs(nodes["layer.up"]) == 9 * 2 * 6


def test_a_layer_can_be_split_again():
    carrier = one_layer("MatMul", [3, 8], normal(1, 8, 9))
    once = split(carrier, 4)
    layer = next(x for x in once.layers() if x.name == "layer.up")
    up, down = decompose(layer.canonical(once.weight(layer)), 4).factors(4)
    graph, _ = factored(once.graph(), [Factors(layer, down, up)])
    assert [x.name for x in OnnxCarrier(graph).layers()] == [
        "layer.down",
        "layer.up.down",
        "layer.up.up",
    ]
    x = normal(3, 3, 8)
    np.testing.assert_allclose(output(OnnxCarrier(graph), x), output(once, x), atol=1e-4)


def test_names_that_are_taken_get_a_number():
    assert factor_names("fc", ()) == ("fc.down", "fc.up")
    assert factor_names("fc", {"fc.up.weight"}) == ("fc.down_1", "fc.up_1")
    assert factor_names("fc", {"fc.up.weight", "fc.down_1.weight"}) == ("fc.down_2", "fc.up_2")


def test_the_graph_that_is_given_stays_as_it_is():
    carrier = one_layer("Gemm", [3, 8], normal(1, 8, 9), normal(2, 9))
    x = normal(3, 3, 8)
    before = output(carrier, x)
    split(carrier, 2)
    assert [n.op_type for n in carrier.graph().graph] == ["Gemm"]
    assert np.array_equal(output(carrier, x), before)


@pytest.mark.parametrize("shared", [False, True])
def test_a_weight_with_other_readers_has_no_path_of_its_own(shared: bool):
    carrier = one_layer("MatMul", [3, 6], normal(1, 6, 6), turned=True)
    graph = carrier.graph().graph
    (node,) = (n for n in graph if n.op_type == "MatMul")
    if shared:
        graph.outputs.append(node.inputs[1])
    path = sole_path(node)
    assert path is None if shared else [n.op_type for n in path or ()] == ["Transpose"]
