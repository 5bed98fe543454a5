"""Nothing is put together, transposed or given an axis only to be taken apart again."""

import re

import numpy as np
import pytest


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def ints(**numbers):
    return " ".join(f"{k} = Constant<value_ints = {v}>()" for k, v in numbers.items())


def test_averages_are_taken_before_channels_are_joined(parse, fuse, agree, ops, rng):
    model = parse(
        "g (float[N, 2, 6, 4] x, float[N, 3, 6, 4] z) => (float[N, 5, 1, 1] y) "
        "{ a = Relu(x) c = Concat<axis=-3>(a, z) y = GlobalAveragePool(c) }"
    )
    outcome = fuse(model)
    fused = outcome.carrier.model
    assert outcome.notes == ("3 operators became 4, which take less time",)
    assert [node.op_type for node in fused.graph][-1] == "Concat"
    assert ops(fused) == {"Relu": 1, "GlobalAveragePool": 2, "Concat": 1}
    agree(model, fused, {"x": normal(rng, 2, 2, 6, 4), "z": normal(rng, 2, 3, 6, 4)}, 1e-6)


@pytest.mark.parametrize("change", ["axis=2", "axis=1"])
def test_other_joins_stay_before_the_average(change, parse, fuse, ops):
    """Along another axis, or where the whole is wanted too."""
    out = "" if change == "axis=2" else ", float[N, 4, 6, 4] c"
    model = parse(
        f"g (float[N, 2, 6, 4] x) => (float[N, C, 1, 1] y{out}) "
        f"{{ a = Relu(x) c = Concat<{change}>(a, x) y = GlobalAveragePool(c) }}"
    )
    assert ops(fuse(model).carrier.model) == {"Relu": 1, "GlobalAveragePool": 1, "Concat": 1}


def resized(attributes):
    return (
        "g (float[N, 2, 6, 4] x) => (float[N, 2, 1, 1] y) {"
        f"a = Relu(x) r = Resize<{attributes}>(a, , factors) y = GlobalAveragePool(r) }}"
    )


FLOOR = 'mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"'
HALF = 'mode="nearest"'


@pytest.mark.parametrize("attributes", [FLOOR, HALF])
@pytest.mark.parametrize("factors", [[1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 3.0, 4.0]])
def test_repeated_pixels_are_averaged_once(attributes, factors, parse, fuse, agree, ops, rng):
    model = parse(resized(attributes), {"factors": np.float32(factors)})
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Relu": 1, "GlobalAveragePool": 1}
    agree(model, fused, {"x": normal(rng, 2, 2, 6, 4)}, 1e-6)


@pytest.mark.parametrize(
    ("attributes", "factors"),
    [
        ('mode="linear"', [1.0, 1.0, 2.0, 2.0]),
        (FLOOR, [1.0, 1.0, 1.5, 1.5]),
        (FLOOR, [1.0, 1.0, 0.5, 0.5]),
        ('mode="nearest", coordinate_transformation_mode="asymmetric"', [1.0, 1.0, 3.0, 3.0]),
    ],
)
def test_pixels_that_are_not_repeated_equally_often_stay(attributes, factors, parse, fuse, ops):
    model = parse(resized(attributes), {"factors": np.float32(factors)})
    assert "Resize" in ops(fuse(model).carrier.model)


def packed(perm, middle):
    shape = ints(shape=middle)
    takes = " ".join(f"i{i} = Constant<value_int = {i}>() g{i} = Gather(t, i{i})" for i in range(3))
    return (
        f"g (float[N, 5, 24] x) => (float[A, B, C, D] y) {{ {shape} "
        f"r = Reshape(x, shape) t = Transpose<perm={perm}>(r) {takes} "
        "a = Mul(g0, g1) y = Sub(a, g2) }"
    )


@pytest.mark.parametrize("opset", [11, 21])
def test_packed_projections_are_split_where_they_lie(opset, parse, fuse, agree, ops, rng):
    text = packed([2, 0, 1, 3], [0, 5, 3, 8]).replace("float[A, B, C, D] y", "float[A, B, C] y")
    model = parse(text, opset=opset) if opset > 12 else parse(old(text), opset=opset)
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Split": 1, "Mul": 1, "Sub": 1}
    agree(model, fused, {"x": normal(rng, 2, 5, 24)}, 0)


def old(text):
    """Write constants as opsets before 12 have them."""
    text = re.sub(r"value_int = (\d)", r"value = int64 {\1}", text)
    return re.sub(
        r"value_ints = \[([^\]]*)\]",
        lambda m: f"value = int64[{len(m[1].split(','))}] {{{m[1]}}}",
        text,
    )


def test_packed_heads_stay(parse, fuse, ops):
    """Each third would be transposed by itself, which takes as long as one for all."""
    model = parse(packed([2, 0, 3, 1, 4], [0, 5, 3, 2, 4]))
    assert "Split" not in ops(fuse(model).carrier.model)


def test_a_packed_value_that_is_read_as_a_whole_stays(parse, fuse, ops):
    text = packed([2, 0, 1, 3], [0, 5, 3, 8]).replace("float[A, B, C, D] y", "float[A, B, C] y")
    model = parse(text.replace(" y) {", " y, float[3, N, 5, 8] t) {"))
    assert "Split" not in ops(fuse(model).carrier.model)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("s = Squeeze(r, one) y = Unsqueeze(s, one)", {}),
        ("s = ReduceMean<keepdims=0>(r, two) y = Unsqueeze(s, two)", {"ReduceMean": 1}),
        ("s = Gather<axis=1>(r, zero) y = Unsqueeze(s, one)", {"Gather": 1}),
        ("s = Squeeze(r, one) y = Unsqueeze(s, two)", {"Reshape": 1}),
        ("y = ReduceMax<keepdims=1>(r, one)", {}),
        ("y = ReduceSum<keepdims=1>(r, two)", {"ReduceSum": 1}),
    ],
)  # fmt: skip
def test_an_axis_that_comes_back_is_not_dropped(body, left, parse, fuse, agree, ops, rng):
    model = parse(
        "g (float[N, 1, 6] x) => (float[A, B, C] y) {"
        f"{ints(one=[1], two=[2])} zero = Constant<value_int = 0>() r = Relu(x) {body} }}"
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Relu": 1, **left}
    agree(model, fused, {"x": normal(rng, 2, 1, 6)}, 1e-6)


@pytest.mark.parametrize(("kind", "left"), [("int64", False), ("float", True)])
def test_an_integer_times_zero_is_zero(kind, left, parse, fuse, agree, ops, rng):
    model = parse(
        f"""g (float[N, 6] x, {kind} rate) => (float[N, 6] y) {{
            none = Constant<value_int = 0>() zero = Cast<to = {7 if kind == "int64" else 1}>(none)
            p = Mul(rate, zero) c = Cast<to = 1>(p) r = Relu(x) y = Add(r, c) }}"""
    )
    fused = fuse(model).carrier.model
    assert [v.name for v in fused.graph.inputs] == ["x", "rate"]
    assert ops(fused) == {"Relu": 1} | ({"Mul": 1, "Add": 1} if left else {})
    rate = np.array(16, np.int64 if kind == "int64" else np.float32)
    agree(model, fused, {"x": normal(rng, 2, 6), "rate": rate}, 0)


def test_what_read_a_branch_that_is_never_taken_hinders_no_rule(parse, fuse, ops):
    model = parse(
        f"""g (float[N, 6, 1] x) => (float[1, N, 6] y) {{ {ints(two=[2], zero=[0])}
            yes = Constant<value_int = 1>() taken = Cast<to = 9>(yes) s = Squeeze(x, two)
            i = If(taken) <then_branch = a () => (float[N, 6] p) {{ p = Identity(s) }},
                else_branch = b () => (float[N, 6] q) {{ q = Exp(s) }}>
            y = Unsqueeze(i, zero) }}"""
    )
    assert ops(fuse(model).carrier.model) == {"Reshape": 1}


@pytest.mark.parametrize(
    ("shape", "left"), [([-1, 6], 0), ([0, 6], 0), ([0, -1], 0), ([-1, 3], 1), ([6, -1], 1)]
)
def test_a_reshape_to_the_same_shape_goes(shape, left, parse, fuse, agree, ops, rng):
    model = parse(
        f"g (float[N, 6] x) => (float[A, B] y) {{ {ints(s=shape)} r = Relu(x) y = Reshape(r, s) }}"
    )
    fused = fuse(model).carrier.model
    assert ops(fused).get("Reshape", 0) == left
    agree(model, fused, {"x": normal(rng, 4, 6)}, 0)


SQUEEZED = """
g (float[N, 4, T] x) => (float[A, B, C] y) {
  last = Constant<value_ints = [2]>() first = Constant<value_ints = [0]>()
  one = Constant<value_int = 1>() r = Relu(x)
  shape = Shape(r) length = Gather(shape, last) unit = Equal(length, one)
  s = If(unit) <
    then_branch = then () => (float[K, L] a) { a = Squeeze(r, last) },
    else_branch = else () => (float[P, Q, R] b) { b = Identity(r) }
  >
  u = Unsqueeze(s, first)
  %s
}
"""
LSTM = "all, y, c = LSTM<hidden_size=3>(u, w, v)"


def test_a_branch_whose_rank_the_reader_refuses_is_not_kept(parse, fuse, agree, ops, rng):
    weights = {"w": normal(rng, 1, 12, 4), "v": normal(rng, 1, 12, 3)}
    model = parse(SQUEEZED % LSTM, weights)
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Relu": 1, "Reshape": 1, "LSTM": 1}
    agree(model, fused, {"x": normal(rng, 2, 4, 1)}, 0)


def test_a_branch_stays_where_both_ranks_are_read(parse, fuse, ops):
    assert "If" in ops(fuse(parse(SQUEEZED % "y = Relu(u)")).carrier.model)
