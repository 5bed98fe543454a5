"""Shapes without data, against those that ONNX Runtime computes."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.graph.lengths import Lengths
from compressor.models.onnx.ort_runner import graph_runner
from tests.compressor.graph.channels.channel_graphs import Weight, graph, positive

GRAPHS: dict[str, tuple[str, dict[str, Weight]]] = {
    "shapes that are computed": (
        """(float[N,3,H,W] x) => (float[N,M,L] y) {
            h = Conv<pads=[1,1,1,1]>(x, w)
            s = Shape(h)
            batch = Shape<start=0, end=1>(h)
            tail = Slice(s, two, four)
            area = ReduceProd<keepdims=1>(tail)
            rows = Concat<axis=0>(batch, six, area)
            y = Reshape(h, rows)
        }""",
        {"w": (6, 3, 3, 3), "two": [2], "four": [4], "six": [6]},
    ),
    "a group norm, of which ONNX infers nothing": (
        """(float[N,4,H,W] x) => (float[N,4,M,L] y) {
            g = GroupNormalization<num_groups=2>(x, s, t)
            r = Relu(g)
            y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)
        }""",
        {"s": positive(4), "t": (4,)},
    ),
    "lengths that follow from each other": (
        """(float[N,4,H,W] x) => (float[N,8,M,L] y) {
            a = Resize(x, , scales)
            d = SpaceToDepth<blocksize=2>(a)
            e, f = Split<axis=1, num_outputs=2>(d)
            y = Pad(f, pads)
        }""",
        {"scales": np.asarray([1, 1, 2, 2], np.float32), "pads": [0, 0, 1, 0, 0, 0, 0, 2]},
    ),
    "constants that are written into nodes": (
        """(float[N,6] x) => (float[N,M,L] y) {
            a = Constant<value_ints=[0, 2, 3]>()
            y = Reshape(x, a)
        }""",
        {},
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("other", [False, True])
def test_shapes_are_those_of_the_runtime(name: str, other: bool):
    text, weights = GRAPHS[name]
    model = graph(text, weights, noted=False)
    found = Lengths(model)
    found = found.other if other else found
    names = [v.name for node in model.graph for v in node.outputs if v.name]
    (given,) = model.graph.inputs
    feed = {given.name or "": np.ones(found.shapes[given.name or ""], np.float32)}
    wanted = graph_runner(model, names).run(feed)
    assert {n: found.shapes[n] for n in names} == {n: wanted[n].shape for n in names}


def test_what_follows_from_a_dynamic_length_is_not_taken_for_a_number():
    model = graph(
        """(float[N,3,8,8] x) => (float[N,K,8,8] y) {
            batch = Shape<start=0, end=1>(x)
            whole = Shape<start=1, end=2>(x)
            both = Concat<axis=0>(batch, whole)
            y = Expand(x, s)
        }""",
        {"s": [1, 1, 1, 1]},
    )
    lengths = Lengths(model)
    both = {v.name: v for node in model.graph for v in node.outputs}["both"]
    assert lengths.integers(both) == [None, 3]
    assert lengths.moving(model.graph.inputs[0]) == (True, False, False, False)


def test_inputs_that_share_a_name_share_a_length():
    model = graph("(float[N,S] x, float[N,S] z) => (float[N,S] y) { y = Add(x, z) }", {})
    lengths = Lengths(model)
    assert lengths.shapes["x"] == lengths.shapes["z"] == lengths.shapes["y"]
    assert len(set(lengths.shapes["x"])) == 2


def test_unknown_operators_end_what_is_known():
    model = graph(
        "(float[N,4] x) => (float[N,4] y) { a = com.microsoft.Made(x) y = Relu(a) }",
        {},
        noted=False,
    )
    for node in model.graph:
        node.outputs[0].shape = None
    lengths = Lengths(model)
    assert lengths.shape(model.graph.outputs[0]) is None
    assert lengths.constant(None) is None


def test_example_lengths_grow_until_no_window_is_longer():
    model = graph(
        """(float[N,1,T] x) => (float[N,4,L] y) {
            a = Conv<strides=[8]>(x, w)
            y = MaxPool<kernel_shape=[40], strides=[20]>(a)
        }""",
        {"w": (4, 1, 16)},
    )
    lengths = Lengths(model)
    assert lengths.shapes["x"][0] == 3
    assert min(lengths.shapes["y"]) > 0
    assert lengths.moving(model.graph.outputs[0]) == (True, False, True)
