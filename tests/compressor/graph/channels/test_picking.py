"""Operators that pick elements, or put values behind each other."""

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

FAR = 2**31
CASES: dict[str, tuple[str, dict[str, Weight], int, int]] = {
    # what computes z, weights, channels of z, units that may go
    "Split by sizes": (
        "a, c = Split<axis=1>(h, sizes) r = Relu(a) z = Concat<axis=1>(c, r)",
        {"sizes": [3, 5]},
        8,
        8,
    ),
    "Split into equal parts": (
        "a, c = Split<axis=-3, num_outputs=2>(h) s = Sigmoid(a) z = Mul(c, s)",
        {},
        4,
        4,
    ),
    "Split along another axis": ("z, c = Split<axis=2, num_outputs=2>(h)", {}, 8, 8),
    "Slice up to the end but one": (
        "a = Slice(h, starts, ends, axes) z = Concat<axis=1>(h, a)",
        {"starts": [2], "ends": [-1], "axes": [1]},
        13,
        8,
    ),
    "Slice backwards": (
        "a = Slice(h, starts, ends, axes, steps) z = Concat<axis=1>(h, a)",
        {"starts": [-1], "ends": [-9], "axes": [-3], "steps": [-1]},
        16,
        8,
    ),
    "Slice backwards in steps": (
        "a = Slice(h, starts, ends, axes, steps) z = Concat<axis=1>(h, a)",
        {"starts": [FAR], "ends": [0], "axes": [1], "steps": [-3]},
        11,
        8,
    ),
    "Slice of every other": (
        "a = Slice(h, starts, ends, axes, steps) z = Concat<axis=1>(h, a)",
        {"starts": [0], "ends": [FAR], "axes": [1], "steps": [2]},
        12,
        8,
    ),
    "Slice of several axes": (
        "z = Slice(h, starts, ends, axes, steps)",
        {"starts": [1, 0], "ends": [6, FAR], "axes": [2, 1], "steps": [1, 3]},
        3,
        8,
    ),
    "Slice without axes": (
        "z = Slice(h, starts, ends)",
        {"starts": [0, 2], "ends": [FAR, 7]},
        5,
        8,
    ),
    "Gather of several": (
        "a = Gather<axis=1>(h, places) z = Concat<axis=1>(h, a)",
        {"places": [-1, 3, 3, 0]},
        12,
        8,
    ),
    "Gather along another axis": (
        "z = Gather<axis=3>(h, places)",
        {"places": [-1, 3]},
        8,
        8,
    ),
    "Pad around the image": ("z = Pad(h, pads)", {"pads": [0, 0, 1, 0, 0, 0, 0, 2]}, 8, 8),
    "Pad channels": ("z = Pad(h, pads)", {"pads": [0, 2, 1, 0, 0, 3, 0, 1]}, 13, 8),
    "Pad one axis": ("z = Pad(h, pads, , axes)", {"pads": [1, 2], "axes": [1]}, 11, 8),
    "Pad a shortcut": (
        "a = Pad(h, pads) c = Conv<pads=[1,1,1,1]>(x, w2) z = Add(a, c)",
        {"pads": [0, 2, 0, 0, 0, 3, 0, 0], "w2": (13, 4, 3, 3)},
        13,
        13,
    ),
    "Concat with the input": ("z = Concat<axis=1>(x, h)", {}, 12, 8),
    "Concat along another axis": ("r = Relu(h) z = Concat<axis=2>(r, h)", {}, 8, 8),
}


@pytest.mark.parametrize("name", CASES)
def test_channels_that_are_picked(name: str):
    text, weights, read, wanted = CASES[name]
    checked(image_net(text, weights, read), wanted)


def test_units_of_one_part_are_a_group():
    """Groups lose some of their units only, so something is left of each part."""
    text = "a, c = Split<axis=1>(h, sizes) r = Relu(a) z = Concat<axis=1>(c, r)"
    channels = checked(image_net(text, {"sizes": [3, 5]}), 8)
    assert sorted(len(g.units) for g in channels.groups if not g.frozen) == [3, 5]


@pytest.mark.parametrize(
    ("text", "weights", "node"),
    [
        (
            "a, c = Split<axis=1>(h, sizes) z = Concat<axis=1>(c, a)",
            {"sizes": [1, 7]},
            "Split 'a'",
        ),
        (
            "a = Slice(h, starts, ends, axes) m = Mul(a, h) z = Relu(m)",
            {"starts": [2], "ends": [3], "axes": [1]},
            "Slice 'a'",
        ),
        (
            "g = Gather<axis=1>(h, at) a = Unsqueeze(g, axes) m = Mul(a, h) z = Relu(m)",
            {"at": np.asarray(-2, np.int64), "axes": [1]},
            "Gather 'g'",
        ),
    ],
)
def test_a_single_channel_that_is_picked_stays(text: str, weights: dict[str, Weight], node: str):
    checked(image_net(text, weights), 7, {f"{node} picks a single one of them"})


def test_places_in_a_table_of_two_axes():
    text = "a = Gather<axis=1>(h, places) r = Reshape(a, four) z = Concat<axis=1>(h, r)"
    weights: dict[str, Weight] = {
        "places": np.asarray([[1, 2], [3, -4]], np.int64),
        "four": [0, 4, 8, 8],
    }
    # Rows of two places stay or go: channels 1 and 2 in one, 3 and 4 in the other.
    checked(image_net(text, weights, 12), 6)


def test_bounds_that_follow_from_a_dynamic_length():
    model = graph(
        """(float[N,T,4] x) => (float[N,T,3] y) {
            h = MatMul(x, w)
            time = Shape<start=1, end=2>(x)
            bounds = Concat<axis=0>(time, five)
            a = Slice(h, starts, bounds, axes)
            y = MatMul(a, head)
        }""",
        {"w": (4, 8), "five": [5], "starts": [0, 1], "axes": [1, 2], "head": (4, 3)},
    )
    checked(model, 8)


def test_widths_that_follow_from_a_dynamic_length():
    model = graph(
        """(float[N,T,4] x) => (float[N,U,3] y) {
            h = MatMul(x, w)
            time = Shape<start=1, end=2>(x)
            pads = Concat<axis=0>(none, time, one, none, none, two)
            a = Pad(h, pads)
            y = MatMul(a, head)
        }""",
        {"w": (4, 8), "none": [0], "one": [1], "two": [2], "head": (11, 3)},
    )
    checked(model, 8)


def test_channels_that_are_looked_up_stay():
    text = """
        m = ReduceMean<keepdims=0>(x, rest) c = Cast<to=7>(m)
        a = Gather<axis=1>(h, c) z = ReduceMean<keepdims=0>(a, one)
    """
    reason = "Gather 'a' looks them up by a computed index"
    checked(image_net(text, {"rest": [1, 2, 3], "one": [1]}), 0, {reason})


def test_an_index_that_holds_channels_stays_whole():
    text = """
        a = ArgMax<axis=3, keepdims=0>(h) g = Gather(table, a)
        z = ReduceMean<keepdims=0>(g, last)
    """
    model = graph(
        f"""(float[N,4,8,8] x) => (float[N,8,8] y) {{
            h = Conv(x, w) {text} y = Relu(z) }}""",
        {"w": (8, 4, 1, 1), "table": (8, 5), "last": [3]},
    )
    reason = "Gather 'g' is told by them what to do"
    checked(model, 0, {reason}, mixed={"ReduceMean"})


def test_mirrored_channels_stay():
    text = 'z = Pad<mode="reflect">(h, pads)'
    weights: dict[str, Weight] = {"pads": [0, 2, 1, 0, 0, 3, 0, 1]}
    checked(image_net(text, weights, 13), 0, {"Pad 'z' repeats or drops channels"})


def test_heads_beside_values_without():
    """A row of a head beside numbers that are no channels: its heads stay."""
    text = """
        a = Reshape(h, heads) k = Reshape(x, fours) c = Concat<axis=3>(a, k)
        z = Reshape(c, rows)
    """
    weights: dict[str, Weight] = {"heads": [0, 5, 2, 6], "fours": [0, 5, 2, 2], "rows": [0, 5, 16]}
    model = row_net(text, weights, 16)
    channels = checked(model, 0, {"Concat 'c' puts them beside values without channels"})
    assert not channels.removable.any()


def test_relative_positions():
    text = "a = GatherND(table, places) b0 = Transpose(a) m = MatMul(h, w2) z = Add(m, b0)"
    weights: dict[str, Weight] = {
        "table": (9, 8),
        "places": np.asarray([[3], [1], [4], [1], [5]], np.int64),
        "w2": (12, 8),
    }
    checked(row_net(text.replace("b0 = Transpose(a)", "b0 = Identity(a)"), weights, 8), 20)


def test_a_whole_slice_of_an_axis_that_samples_and_heads_share():
    """As in ``bias[:, :, None]``: its bounds hold for any number of samples."""
    model = row_net(
        """a = Reshape(h, four) t = Transpose<perm=[0,2,1,3]>(a) m = Reshape(t, rows)
           s = Slice(m, zero, most, zero, one) r = Relu(s) b = Reshape(r, heads)
           u = Transpose<perm=[0,2,1,3]>(b) z = Reshape(u, three)""",
        {
            "four": [0, 5, 3, 4],
            "rows": [-1, 5, 4],
            "heads": [-1, 3, 5, 4],
            "three": [0, 5, 12],
            "zero": [0],
            "most": [2**63 - 1],
            "one": [1],
        },
    )
    checked(model, 3)
