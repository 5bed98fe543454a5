"""Operators that compute each element by itself."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.graph.operators import names
from tests.compressor.graph.channels.channel_graphs import (
    Weight,
    checked,
    graph,
    image_net,
    positive,
    row_net,
)

NUMBER = np.asarray(0.5, np.float32)


@pytest.mark.parametrize(
    "name", [n for n in names(lambda row: row.activation) if n not in ("PRelu", "Clip", "Swish")]
)
def test_activations(name: str):
    channels = checked(image_net(f"z = {name}(h)", {}), 8)
    assert {(a.value, a.axis) for a in channels.activations if a.axis == 1} >= {("h", 1), ("z", 1)}


@pytest.mark.parametrize("name", ["Add", "Sub", "Mul", "Min", "Max", "Mean", "Sum", "PRelu"])
@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1, 1), (1,), ()])
def test_constants_for_each_channel(name: str, shape: tuple[int, ...]):
    channels = checked(image_net(f"z = {name}(h, own)", {"own": np.full(shape, NUMBER)}), 8)
    assert ("own" in channels.parameters) == (len(shape) > 1)


def test_two_branches_lose_the_same():
    text = "c = Conv(h, w2) r = Relu(c) a = Add(h, r) s = Sigmoid(a) z = Mul(s, c)"
    checked(image_net(text, {"w2": (8, 8, 1, 1)}), 8)


def test_what_meets_the_input_stays():
    text = "c = Conv(h, w2) z = Add(c, x)"
    reason = "Add 'z' meets 'x', which has no channels"
    checked(image_net(text, {"w2": (4, 8, 1, 1)}, 4), 8, {reason})


def test_one_value_for_all_channels():
    text = "g = Conv(h, w2) z = Mul(h, g)"
    checked(image_net(text, {"w2": (1, 8, 1, 1)}), 8)


def test_slopes_bounds_and_conditions():
    text = "c = Greater(h, low) p = PRelu(h, slope) z = Where(c, p, other)"
    weights: dict[str, Weight] = {"low": (8, 1, 1), "slope": (8, 1, 1), "other": (8, 1, 1)}
    checked(image_net(text, weights), 8)
    checked(image_net("z = Clip(h, low, high)", {"low": -NUMBER, "high": NUMBER}), 8)


def test_what_is_added_is_a_bias_and_is_zeroed():
    """A layer norm that is written out reads what is added, behind whatever moves it."""
    text = """
        s = Squeeze(h, second)
        t = Reshape(own, column)
        u = Add(s, t)
        v = Sub(u, less)
        c = Max(v, most)
        n = ReduceMean(c, first)
        d = Sub(v, n)
        y = MatMul(head, d)
    """
    weights: dict[str, Weight] = {"own": (8,), "less": (8, 1), "most": (8, 1), "second": [-1]}
    weights |= {"column": [8, 1], "first": [-2], "head": (3, 8), "w": (8, 4, 1, 1), "b": (8,)}
    net = f"(float[N,4,6,1] x) => (float[N,3,6] y) {{ h = Conv(x, w, b) {text} }}"
    channels = checked(graph(net, weights), 0, mixed={"ReduceMean"})
    (group,) = [g for g in channels.groups if not g.frozen]
    roles = {m.parameter: m.role for m in group.members}
    assert roles == {
        "own": "bias", "less": "bias", "most": "other", "head": "input", "w": "output", "b": "bias"
    }  # fmt: skip
    checked(
        graph(net.replace("ReduceMean", "ReduceSum").replace("Max(v, most)", "Abs(v)"), weights), 8
    )


def test_a_value_that_repeats_itself_for_all_heads():
    """A scale for each feature of a head stays; so do the features, and heads go."""
    text = "a = Reshape(h, heads) m = Mul(a, own) z = Reshape(m, rows)"
    weights: dict[str, Weight] = {"heads": [0, 5, 4, 3], "own": (3,), "rows": [0, 5, 12]}
    checked(row_net(text, weights), 4)
    weights["own"] = (4, 1)
    checked(row_net(text, weights), 4)


def test_a_divisor_is_not_zeroed():
    checked(image_net("z = Div(h, own)", {"own": positive(8, 1, 1)}), 8)
    text = "g = Conv(h, w2, far) z = Div(h, g)"
    weights: dict[str, Weight] = {"w2": (8, 8, 1, 1), "far": np.full(8, 100, np.float32)}
    checked(image_net(text, weights), 0, mixed={"Div"})  # near zero, order of sums would matter
    text = "e = Exp(h) a = Add(e, one) z = Div(h, a)"
    checked(image_net(text, {"one": NUMBER}), 8)


def test_a_quantized_weight_stays():
    text = "q = DequantizeLinear(codes, scale) z = Conv(h, q)"
    weights: dict[str, Weight] = {"codes": np.ones((8, 8, 1, 1), np.int8), "scale": NUMBER}
    checked(image_net(text, weights), 0, {"DequantizeLinear 'q' holds quantized numbers"})


def test_quantized_activations_stay():
    text = "q = QuantizeLinear(h, scale) z = DequantizeLinear(q, scale)"
    checked(image_net(text, {"scale": NUMBER}), 0, {"QuantizeLinear 'q' holds quantized numbers"})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str):
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    rng = np.random.default_rng(0)
    model = graph(
        f"""({dtype}[N,4] x) => ({dtype}[N,3] y) {{
            h = MatMul(x, w) a = Add(h, b) r = Relu(a) y = MatMul(r, v)
        }}""",
        {
            "w": rng.standard_normal((4, 6)).astype(kind),
            "b": rng.standard_normal(6).astype(kind),
            "v": rng.standard_normal((6, 3)).astype(kind),
        },
    )
    from compressor.graph.channels.analysis import map_channels
    from compressor.graph.channels.slicing import remove_channels

    channels = map_channels(model)
    removed = np.zeros(channels.count, dtype=bool)
    removed[[1, 4]] = True
    smaller, _ = remove_channels(model, channels, removed)
    value = smaller.graph.initializers["w"]
    assert value.dtype == model.graph.initializers["w"].dtype
    assert value.const_value is not None
    whole = model.graph.initializers["w"].const_value
    assert whole is not None
    assert np.array_equal(value.const_value.numpy(), whole.numpy()[:, [0, 2, 3, 5]])
