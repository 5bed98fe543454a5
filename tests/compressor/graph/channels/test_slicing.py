"""The smaller graph, and what stays of it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import ModelError
from compressor.graph.channels.analysis import map_channels
from compressor.graph.channels.slicing import kept_positions, remove_channels
from tests.compressor.graph.channels.channel_graphs import (
    checked,
    close,
    graph,
    image_net,
    masked,
    outputs,
)


def flags(count: int, *gone: int) -> np.ndarray:
    found = np.zeros(count, dtype=bool)
    found[list(gone)] = True
    return found


def test_positions_that_remain():
    model = image_net("z = Relu(h)", {})
    channels = map_channels(model)
    smaller, positions = remove_channels(model, channels, flags(channels.count, 1, 6))
    left = [0, 2, 3, 4, 5, 7]
    assert {name: {a: p.tolist() for a, p in own.items()} for name, own in positions.items()} == {
        "w": {0: left},
        "b": {0: left},
        "head": {1: left},
    }
    assert smaller.graph.initializers["w"].shape == ir.Shape((6, 4, 3, 3))
    shapes = {v.name: v.shape for node in smaller.graph for v in node.outputs}
    noted = shapes["h"]
    assert noted is not None
    assert noted[1] == 6


def test_weights_that_stay_whole_are_shared():
    model = image_net("c = Conv(h, w2) z = Relu(c)", {"w2": (6, 8, 1, 1)}, 6)
    channels = map_channels(model)
    last = next(g for g in channels.groups if g.name == "w2")
    smaller, _ = remove_channels(model, channels, flags(channels.count, int(last.units[0])))
    for name in ("w", "b", "shift"):
        own, other = (m.graph.initializers[name].const_value for m in (smaller, model))
        assert own is other


def test_frozen_units_are_refused():
    model = image_net("z = Relu(h)", {})
    channels = map_channels(model)
    frozen = next(g for g in channels.groups if g.frozen)
    with pytest.raises(ValueError, match="cannot be"):
        remove_channels(model, channels, flags(channels.count, int(frozen.units[0])))


def test_a_map_of_another_graph_is_refused():
    channels = map_channels(image_net("z = Relu(h)", {}))
    other = image_net("z = Conv(h, w2)", {"w2": (8, 8, 1, 1)})
    with pytest.raises(ValueError, match="another graph"):
        remove_channels(other, channels, flags(channels.count))


def test_the_last_channel_stays():
    model = image_net("z = Relu(h)", {})
    channels = map_channels(model)
    (group,) = [g for g in channels.groups if not g.frozen]
    with pytest.raises(ModelError, match="would lose all its channels"):
        remove_channels(model, channels, flags(channels.count, *group.units))


def test_positions_of_units_at_several_places():
    units = np.asarray([3, -1, 0, 3])
    found = kept_positions({"w": (None, units)}, flags(4, 3))
    assert {a: p.tolist() for a, p in found["w"].items()} == {1: [1, 2]}


@pytest.mark.parametrize("text", ["k = Shape<start=1, end=2>(h)", "k = Size(h)", "k = Shape(h)"])
def test_lengths_that_are_numbers_stay_what_they_were(text: str):
    """A mean that divides a sum by the number of channels, as the graph writes it out."""
    middle = f"""
        t = ReduceSum<keepdims=1>(h, one) {text} i = Cast<to=1>(k)
        j = ReduceMax<keepdims=0>(i) m = Div(t, j) z = Sub(h, m)
    """
    checked(image_net(middle, {"one": [1]}), 8)


def test_initializers_that_are_inputs_or_outputs_stay():
    for ends in ("(float[N,4] x, float[4,8] w) => (float[N,3] y)",):
        model = graph(f"{ends} {{ h = MatMul(x, w) y = MatMul(h, v) }}", {"w": (4, 8), "v": (8, 3)})
        assert not map_channels(model).removable.any()
    text = "(float[N,4] x) => (float[N,3] y, float[4,8] w) { h = MatMul(x, w) y = MatMul(h, v) }"
    model = graph(text, {"w": (4, 8), "v": (8, 3)})
    checked(model, 0, {"'w' is an output"})


def test_an_output_that_is_read_again_stays():
    text = """(float[N,4] x) => (float[N,3] y, float[N,8] r) {
        h = MatMul(x, w) r = Relu(h) i = MatMul(r, u) y = MatMul(i, v)
    }"""
    checked(graph(text, {"w": (4, 8), "u": (8, 6), "v": (6, 3)}), 6, {"'r' is an output"})


def test_a_smaller_graph_can_be_made_smaller_again():
    model = image_net("c = Conv(h, w2) z = Relu(c)", {"w2": (6, 8, 1, 1)}, 6)
    first = map_channels(model)
    once, _ = remove_channels(model, first, flags(first.count, 0, 9))
    second = map_channels(once)
    assert second.count == first.count - 2
    twice, _ = remove_channels(once, second, flags(second.count, 0))
    both, _ = remove_channels(model, first, flags(first.count, 0, 1, 9))
    for own, other in zip(outputs(twice), outputs(both), strict=True):
        assert np.array_equal(own, other)


def test_channels_that_a_slice_picks_at_uneven_distances():
    """Without channel 3, those that were 0, 2, 4 and 6 are 0, 2, 3 and 5."""
    text = "a = Slice(h, starts, ends, axes, steps) z = Concat<axis=1>(h, a)"
    bounds = {"starts": [0], "ends": [8], "axes": [1], "steps": [2]}
    model = image_net(text, bounds, 12)
    channels = map_channels(model)
    removed = flags(channels.count, 3)
    smaller, _ = remove_channels(model, channels, removed)
    assert "Gather" in {node.op_type for node in smaller.graph}
    close(outputs(smaller), outputs(masked(model, channels, removed)), 1e-6)


def test_channels_without_which_nothing_would_be_left_stay():
    model = graph(
        """(float[N,4,8,8] x) => (float[N,3,16,16] y) {
            h = Conv(x, w) z = DepthToSpace<blocksize=2>(h) y = Conv(z, v)
        }""",
        {"w": (4, 4, 1, 1), "v": (3, 1, 1, 1)},
    )
    checked(model, 0, {"nothing would be left of 'w'"})


@pytest.mark.parametrize("axis", [1, 2])
def test_a_slice_that_picks_nothing(axis: int) -> None:
    """As where a tensor is rolled by 0."""
    text = f"a = Slice(h, starts, ends, axes) z = Concat<axis={axis}>(h, a)"
    model = image_net(text, {"starts": [8], "ends": [8], "axes": [axis]}, 8)
    channels = map_channels(model)
    assert {frozen.reason for frozen in channels.frozen} == {"'y' is an output"}
    removed = flags(channels.count, 3)
    smaller, _ = remove_channels(model, channels, removed)
    close(outputs(smaller), outputs(masked(model, channels, removed)), 1e-6)
