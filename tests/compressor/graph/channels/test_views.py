"""Operators that move or repeat elements, and those that are not understood."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from compressor.graph.channels.analysis import map_channels
from tests.compressor.graph.channels.channel_graphs import (
    Weight,
    checked,
    graph,
    image_net,
)

CASES: dict[str, tuple[str, dict[str, Weight], int, int]] = {
    # what computes z, weights, channels of z, units that may go
    "DepthToSpace": ("z = DepthToSpace<blocksize=2>(h)", {}, 2, 2),
    "DepthToSpace, CRD": ('z = DepthToSpace<blocksize=2, mode="CRD">(h)', {}, 2, 2),
    "SpaceToDepth": ("z = SpaceToDepth<blocksize=2>(h)", {}, 32, 8),
    "Resize by scales": (
        "z = Resize(h, , scales)",
        {"scales": np.asarray([1, 1, 2, 2], np.float32)},
        8,
        8,
    ),
    "Resize to sizes that are computed": (
        "s = Shape<start=0, end=2>(h) all = Concat<axis=0>(s, t) z = Resize(h, , , all)",
        {"t": [16, 16]},
        8,
        8,
    ),
    "Resize of two axes": ("z = Resize<axes=[2,3]>(h, , , t)", {"t": [16, 16]}, 8, 8),
    "pools": (
        """a = MaxPool<kernel_shape=[2,2]>(h) c = AveragePool<kernel_shape=[2,2]>(a)
           z = LpPool<kernel_shape=[2,2]>(c)""",
        {},
        8,
        8,
    ),
    "Squeeze without axes": (
        "p = GlobalAveragePool(h) c = Concat<axis=0>(p, p) q = GlobalMaxPool(c) "
        "s = Squeeze(q) u = Unsqueeze(s, ends) g = ReduceMean<keepdims=1>(u, zero) z = Mul(h, g)",
        {"ends": [2, 3], "zero": [0]},
        8,
        8,
    ),
    "Reshape there and back": (
        "a = Reshape(h, three) r = Relu(a) z = Reshape(r, image)",
        {"three": [0, 0, -1], "image": [0, 8, 8, 8]},
        8,
        8,
    ),
    "a channel shuffle": (
        "a = Reshape(h, five) t = Transpose<perm=[0,2,1,3,4]>(a) z = Reshape(t, image)",
        {"five": [0, 2, 4, 8, 8], "image": [0, -1, 8, 8]},
        8,
        2,
    ),
    "Tile": ("z = Tile(h, times)", {"times": [1, 2, 1, 1]}, 16, 8),
    "Tile of one value": (
        "m = ReduceMean<keepdims=1>(x, one) t = Tile(m, times) z = Mul(h, t)",
        {"one": [1], "times": [1, 8, 1, 1]},
        8,
        8,
    ),
    "Expand of one value": (
        "m = ReduceMean<keepdims=1>(x, one) s = Shape(h) t = Expand(m, s) z = Mul(h, t)",
        {"one": [1]},
        8,
        8,
    ),
    "ConstantOfShape": ("s = Shape(h) t = ConstantOfShape(s) z = Add(h, t)", {}, 8, 8),
    "a Constant": (
        "a = Constant<value_floats=[1.0,2.0,3.0,4.0,5.0,6.0,7.0,8.0]>() "
        "c = Reshape(a, three) z = Mul(h, c)",
        {"three": [8, 1, 1]},
        8,
        8,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_channels_that_are_moved(name: str):
    text, weights, read, wanted = CASES[name]
    checked(image_net(text, weights, read), wanted)


@pytest.mark.parametrize("operator", ["Flatten(r)", "Reshape(r, rows)"])
def test_flattening_an_image(operator: str):
    model = graph(
        f"""(float[N,4,8,8] x) => (float[N,3] y) {{
            h = Conv(x, w, b) r = Relu(h) f = {operator} y = Gemm(f, head)
        }}""",
        {"w": (8, 4, 3, 3), "b": (8,), "head": (288, 3), "rows": [-1, 288]},
    )
    checked(model, 8)


def test_sampling_a_grid():
    model = graph(
        """(float[N,4,8,8] x, float[N,5,5,2] g) => (float[N,3,5,5] y) {
            h = Conv(x, w) s = GridSample(h, g) y = Conv(s, v)
        }""",
        {"w": (8, 4, 1, 1), "v": (3, 8, 1, 1)},
    )
    checked(model, 8)


def test_heads_that_each_sample_at_their_own_places():
    """Deformable attention: heads lie on the axis of samples, of features and of places alike."""
    model = graph(
        """(float[N,16,4] x) => (float[N,16,3] y) {
            h = MatMul(x, w) t = Transpose<perm=[0,2,1]>(h) maps = Reshape(t, image)
            p = MatMul(x, v) each = Reshape(p, heads) turned = Transpose<perm=[0,2,1,3]>(each)
            places = Reshape(turned, grid) s = GridSample(maps, places)
            rows = Reshape(s, joined) z = Transpose<perm=[0,2,1]>(rows) y = MatMul(z, head)
        }""",
        {
            "w": (4, 12),
            "v": (4, 6),
            "head": (12, 3),
            "image": [-1, 4, 4, 4],
            "heads": [0, 16, 3, 2],
            "grid": [-1, 16, 1, 2],
            "joined": [-1, 12, 16],
        },
    )
    checked(model, 4, {"GridSample 's' is told by them what to do"})


def test_positions_of_a_pool_number_all_channels():
    text = """
        a, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(h) c = Conv(a, w2)
        z = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(c, i)
    """
    reasons = {"MaxPool 'a' numbers their elements", "MaxUnpool 'z' is not understood"}
    checked(image_net(text, {"w2": (8, 8, 1, 1)}), 0, reasons)


UNKNOWN: dict[str, tuple[str, dict[str, Weight], int]] = {
    "Trilu": ("z = Trilu(h)", {}, 8),
    "LRN": ("z = LRN<size=3>(h)", {}, 8),
    "TopK": ("z, i = TopK<axis=1>(h, k)", {"k": [4]}, 4),
    "ScatterElements": (
        "z = ScatterElements<axis=1>(h, at, more)",
        {"at": np.zeros((1, 1, 1, 1), np.int64), "more": (1, 1, 1, 1)},
        8,
    ),
    "ScatterND": ("z = ScatterND(h, at, more)", {"at": [[0, 1]], "more": (1, 8, 8)}, 8),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_understood_freezes(name: str):
    text, weights, read = UNKNOWN[name]
    node = f"{name} 'z'"
    arrays = {n: np.asarray(w) if isinstance(w, list) else w for n, w in weights.items()}
    channels = checked(image_net(text, arrays, read), 0, {f"{node} is not understood"})
    found = [(f.node, f.op_type, f.reason) for f in channels.frozen if f.op_type == name]
    assert found == [("z", name, "is not understood")]


def _over_time(middle: str) -> ir.Model:
    """A filter bank of 16 samples a window, and a product of what ``middle`` makes of it."""
    return graph(
        f"""(float[N,1,T] x) => (float[N,3] y) {{
            h = Conv<strides=[8]>(x, w)
            {middle}
            m = ReduceMean<keepdims=0>(z, last)
            y = MatMul(m, v)
        }}""",
        {
            "w": (4, 1, 16),
            "v": (4, 3),
            "last": [2],
            "row": [0, 1, -1],
            "rows": [0, 4, -1],
            "far": [1000],
            "end": [1 << 40],
        },
    )


def test_channels_are_followed_over_windows_that_short_sequences_do_not_fill():
    merged = "a = Reshape(h, row) b = Relu(a) z = Reshape(b, rows)"
    frozen = [group.frozen for group in map_channels(_over_time(merged)).groups]
    assert frozen == ["", "'y' is an output"]


def test_a_reshape_of_an_axis_without_elements_freezes():
    channels = map_channels(
        _over_time("s = Slice(h, far, end, last) a = Reshape(s, row) z = Reshape(a, rows)")
    )
    assert ("Reshape", "a") in {(f.op_type, f.node) for f in channels.frozen}


def test_a_parameter_of_what_is_not_understood_stays():
    text = "c = Conv(h, w2) d = Det(square) s = Reshape(square, four) e = Conv(c, s) z = Mul(e, d)"
    weights: dict[str, Weight] = {
        "w2": (8, 8, 1, 1),
        "square": (8, 8),
        "four": [8, 8, 1, 1],
    }
    checked(image_net(text, weights), 8, {"Det 'd' is not understood"})


def test_attention_as_one_operator_freezes():
    model = graph(
        """(float[N,5,4] x) => (float[N,5,3] y) {
            h = MatMul(x, w) a = Attention<q_num_heads=4, kv_num_heads=4>(h, h, h)
            y = MatMul(a, v)
        }""",
        {"w": (4, 12), "v": (12, 3)},
        opset=23,
    )
    checked(model, 0, {"Attention 'a' is not understood"})


def test_other_domains_freeze():
    text = "z = com.microsoft.QuickGelu(h)"
    channels = checked(image_net(text, {}), 0, {"com.microsoft::QuickGelu 'z' is not understood"})
    assert "com.microsoft::QuickGelu" in {f.op_type for f in channels.frozen}


@pytest.mark.parametrize("inner", ["Relu(h)", "Add(h, own)"])
def test_branches_freeze_what_they_read(inner: str):
    text = f"""
        m = ReduceMean<keepdims=0>(x, all) c = Greater(m, zero) d = Conv(h, w2)
        z0 = If(c) <
            then_branch = left () => (float[N,8,8,8] l) {{ l = {inner} }},
            else_branch = right () => (float[N,8,8,8] r) {{ r = Neg(h) }}
        >
        z = Concat<axis=1>(z0, d)
    """
    weights: dict[str, Weight] = {
        "all": [0, 1, 2, 3],
        "zero": np.zeros((), np.float32),
        "own": (8, 1, 1),
        "w2": (6, 8, 1, 1),
    }
    checked(image_net(text, weights, 14), 6, {"If 'z0' has a subgraph that reads them"})


def test_a_loop_freezes_what_it_reads():
    text = """
        z = Loop(count, , h) <
            body = g (int64 i, bool go, float[N,8,8,8] before)
                => (bool on, float[N,8,8,8] after) {
                on = Identity(go) after = Add(before, h)
            }
        >
    """
    reason = "Loop 'z' has a subgraph that reads them"
    checked(image_net(text, {"count": np.asarray(2, np.int64)}), 0, {reason})


@pytest.mark.parametrize(
    ("reader", "w"),
    [
        ("y = MatMul(f, w)", (48, 3)),
        ("y = Gemm<transB=1>(f, w)", (3, 48)),
        ('e = Einsum<equation="ab,b->ab">(f, w) h = Reshape(e, rows) y = MatMul(h, v)', (48,)),
        ("y = PRelu(f, w)", (48,)),
        ("y = LayerNormalization(f, w)", (48,)),
        ("g = Reshape(f, image) y = InstanceNormalization(g, w, w)", (48,)),
        ("g = Reshape(f, image) y = GroupNormalization<num_groups=4>(g, w, w)", (48,)),
        ("g = Reshape(f, image) y = Conv(g, w)", (5, 48, 1, 1)),
        ("g = Reshape(f, image) y = Conv<group=48>(g, w)", (48, 1, 1, 1)),
    ],
)
def test_what_fits_one_batch_only_keeps_the_channels_it_reads(reader: str, w: tuple[int, ...]):
    """A batch among the features has another length in the analysis: that was a ``ValueError``."""
    text = f"""(float[N,2,4,4] x) => (float[a,b] y) {{
        q = Conv(x, k) t = Transpose<perm=[2,0,1,3]>(q) f = Flatten(t) {reader}
    }}"""
    weights: dict[str, Weight] = {"k": (6, 2, 1, 1), "w": w, "v": (8, 3)}
    weights |= {"rows": [4, -1, 8], "image": [4, -1, 1, 1]}
    read = {"k": 0, "w": 1 if reader.endswith("Conv(g, w)") or "transB" in reader else 0}
    for group in map_channels(graph(text, weights)).groups:
        assert group.frozen or not any(read.get(m.parameter) == m.axis for m in group.members)


def test_a_reshape_that_fits_one_batch_only_keeps_its_channels():
    text = """(float[N,2,4,4] x) => (float[16,3] y) {
        a = MatMul(x, w) q = Reshape(a, rows) b = MatMul(q, v) c = Relu(b) y = MatMul(c, u)
    }"""
    weights: dict[str, Weight] = {"w": (4, 4), "rows": [16, 4], "v": (4, 8), "u": (8, 3)}
    groups = map_channels(graph(text, weights)).groups
    free = {m.parameter for group in groups if not group.frozen for m in group.members}
    assert free == {"v", "u"}
