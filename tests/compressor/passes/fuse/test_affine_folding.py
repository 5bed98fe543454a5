"""Factors and terms by constants go into the layer before them."""

import numpy as np
import pytest


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


CONV = "h = Conv<kernel_shape=[3,3]>(x, fc.weight, fc.bias)"
IMAGE = "g (float[N, 4, 5, 5] x) => (float[N, 6, 3, 3] y)"


@pytest.mark.parametrize(
    ("op", "shape"),
    [("Mul", (6, 1, 1)), ("Div", (1, 6, 1, 1)), ("Add", (6, 1, 1)), ("Sub", ()), ("Mul", (1,))],
)
def test_convolution_takes_constants(op, shape, parse, fuse, agree, ops, rng):
    parameters = {"fc.weight": normal(rng, 6, 4, 3, 3), "fc.bias": normal(rng, 6)}
    parameters["c"] = np.asarray(normal(rng, *shape) + 3, np.float32)
    model = parse(f"{IMAGE} {{ {CONV} y = {op}(h, c) }}", parameters)
    fused = fuse(model, kind="torch").carrier.model
    assert ops(fused) == {"Conv": 1}
    assert sorted(fused.graph.initializers) == ["fc.bias", "fc.weight"]
    agree(model, fused, {"x": normal(rng, 2, 4, 5, 5)}, 2e-6)


def test_a_chain_and_a_constant_in_front(parse, fuse, agree, ops, rng):
    parameters = {"fc.weight": normal(rng, 6, 4, 3, 3), "fc.bias": normal(rng, 6)}
    parameters |= {"a": normal(rng, 6, 1, 1), "b": normal(rng, 6, 1, 1)}
    model = parse(f"{IMAGE} {{ {CONV} i = Mul(a, h) y = Add(b, i) }}", parameters)
    outcome = fuse(model)
    assert ops(outcome.carrier.model) == {"Conv": 1}
    assert outcome.layers[0].details == {"fused": ["fold Mul by a", "fold Add of b"]}
    agree(model, outcome.carrier.model, {"x": normal(rng, 2, 4, 5, 5)}, 2e-6)


@pytest.mark.parametrize(
    ("shape", "op"), [((3,), "Mul"), ((6, 1, 3), "Mul"), ((1, 1, 3, 1), "Add"), ((3, 3), "Add")]
)
def test_constants_of_other_axes_stay(shape, op, parse, fuse, agree, ops, rng):
    parameters = {"fc.weight": normal(rng, 6, 4, 3, 3), "fc.bias": normal(rng, 6)}
    parameters["c"] = normal(rng, *shape)
    model = parse(f"{IMAGE} {{ {CONV} y = {op}(h, c) }}", parameters)
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Conv": 1, op: 1}
    agree(model, fused, {"x": normal(rng, 2, 4, 5, 5)}, 0)


def test_broadcasting_that_adds_axes_stays(parse, fuse, agree, ops, rng):
    parameters = {"fc.weight": normal(rng, 4, 6), "c": normal(rng, 1, 1, 6)}
    model = parse(
        "g (float[N, 4] x) => (float[1, N, 6] y) { h = MatMul(x, fc.weight) y = Mul(h, c) }",
        parameters,
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"MatMul": 1, "Mul": 1}
    agree(model, fused, {"x": normal(rng, 3, 4)}, 0)


def test_layer_scale_goes_through_a_transposition(parse, fuse, agree, ops, rng):
    parameters = {"fc.weight": normal(rng, 4, 6), "fc.bias": normal(rng, 6)}
    parameters["gamma"] = normal(rng, 6, 1, 1)
    model = parse(
        "g (float[N, 5, 5, 4] x, float[N, 6, 5, 5] r) => (float[N, 6, 5, 5] y) {"
        "h = MatMul(x, fc.weight) b = Add(h, fc.bias)"
        "t = Transpose<perm=[0,3,1,2]>(b) s = Mul(t, gamma) y = Add(r, s) }",
        parameters,
    )
    outcome = fuse(model)
    fused = outcome.carrier.model
    assert ops(fused) == {"MatMul": 1, "Transpose": 1, "Add": 2}
    assert outcome.layers[0].details == {"fused": ["fold Mul by gamma"]}
    feeds = {"x": normal(rng, 2, 5, 5, 4), "r": normal(rng, 2, 6, 5, 5)}
    agree(model, fused, feeds, 2e-6)
    names = {v.name for node in fused.graph for v in node.outputs}
    assert "s" in names, "the transposition's output takes the product's name"
    assert not names & {"h", "b", "t"}, "scaled values must not be called as before"


def test_a_bias_that_two_layers_read_is_copied(parse, fuse, agree, ops, rng):
    parameters = {"fc.weight": normal(rng, 6, 4, 3, 3), "fd.weight": normal(rng, 6, 4, 3, 3)}
    parameters |= {"both": normal(rng, 6), "a": normal(rng, 6, 1, 1)}
    model = parse(
        "g (float[N, 4, 5, 5] x) => (float[N, 6, 3, 3] y, float[N, 6, 3, 3] z) {"
        "h = Conv(x, fc.weight, both) y = Mul(h, a) z = Conv(x, fd.weight, both) }",
        parameters,
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Conv": 2}
    assert sorted(fused.graph.initializers) == ["both", "fc.bias", "fc.weight", "fd.weight"]
    agree(model, fused, {"x": normal(rng, 2, 4, 5, 5)}, 2e-6)


def test_residual_additions_stay(parse, fuse, agree, ops, rng):
    parameters = {"fc.weight": normal(rng, 6, 4, 3, 3), "fc.bias": normal(rng, 6)}
    text = IMAGE.replace("x)", "x, float[N, 6, 3, 3] r)", 1)
    model = parse(f"{text} {{ {CONV} y = Add(h, r) }}", parameters)
    assert ops(fuse(model).carrier.model) == {"Conv": 1, "Add": 1}


def test_option_switches_it_off(parse, fuse, ops, rng):
    parameters = {"fc.weight": normal(rng, 6, 4, 3, 3), "fc.bias": normal(rng, 6)}
    parameters["c"] = normal(rng, 6, 1, 1)
    model = parse(f"{IMAGE} {{ {CONV} y = Mul(h, c) }}", parameters)
    assert ops(fuse(model, affine=False).carrier.model) == {"Conv": 1, "Mul": 1}


def test_a_trainable_gate_is_folded_whatever_its_value(parse, fuse, ops, rng):
    """A fresh gate of 1 must not be taken for a constant that does nothing."""
    for gate in (1.0, 0.3):
        parameters = {"gate": np.array([gate], np.float32)}
        model = parse("g (float[N, 4] x) => (float[N, 4] y) { y = Mul(x, gate) }", parameters)
        assert ops(fuse(model, kind="torch").carrier.model) == {"Mul": 1}


def test_gemm_needs_a_vector_or_a_row(parse, fuse, agree, ops, rng):
    apart = {"MatMul": 1, "Add": 1}
    shapes = {(6,): {"Gemm": 1}, (1, 6): {"Gemm": 1}, (5, 6): apart, (1, 5, 6): apart}
    for shape, expected in shapes.items():
        parameters = {"fc.weight": normal(rng, 4, 6), "c": normal(rng, *shape)}
        outer = "1, 5, 6" if len(shape) == 3 else "5, 6" if shape[0] == 5 else "N, 6"
        model = parse(
            f"g (float[{'N' if 'N' in outer else 5}, 4] x) => (float[{outer}] y) "
            "{ h = MatMul(x, fc.weight) y = Add(c, h) }",
            parameters,
        )
        fused = fuse(model).carrier.model
        assert ops(fused) == expected
        agree(model, fused, {"x": normal(rng, 5, 4)}, 1e-6)


BEHIND = "g (float[N, 4, 5, 5] x) => (float[N, 6, h, w] y)"


def behind(rng, scale=0.2):
    weights = {"fc.weight": normal(rng, 6, 4, 3, 3), "fc.bias": normal(rng, 6)}
    return weights | {"s": np.float32([scale]), "b": np.float32([-0.3])}


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_behind_takes_one_factor_and_term(bias, parse, fuse, agree, ops, rng):
    # Between an activation and a layer, as in PP-LCNetV3.
    given = "t, fc.weight, fc.bias" if bias else "t, fc.weight"
    text = f"h = Relu(x) m = Mul(h, s) t = Sub(m, b) y = Conv<kernel_shape=[3,3]>({given})"
    parameters = behind(rng)
    parameters = parameters if bias else {k: v for k, v in parameters.items() if k != "fc.bias"}
    model = parse(f"{BEHIND} {{ {text} }}", parameters)
    outcome = fuse(model)
    fused = outcome.carrier.model
    assert ops(fused) == {"Relu": 1, "Conv": 1}
    (layer,) = outcome.layers
    assert layer.details == {"fused": ["fold Sub of b before it", "fold Mul by s before it"]}
    agree(model, fused, {"x": normal(rng, 2, 4, 5, 5)}, 2e-6)
    assert ops(fuse(model, affine=False).carrier.model)["Mul"] == 1


def test_a_term_before_padding_stays_and_its_factor_goes(parse, fuse, agree, ops, rng):
    # Beyond the image are zeros, not terms.
    text = """h = Relu(x) m = Mul(s, h) t = Add(b, m)
        y = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(t, fc.weight, fc.bias)"""
    model = parse(f"{BEHIND} {{ {text} }}", behind(rng))
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Relu": 1, "Add": 1, "Conv": 1}
    agree(model, fused, {"x": normal(rng, 2, 4, 5, 5)}, 2e-6)
    names = {v.name for node in fused.graph for v in node.outputs}
    assert not names & {"m", "t"}, "another value must not be called as before"


@pytest.mark.parametrize("scale", [0.0, 1e-6])
def test_a_factor_that_would_make_the_term_large_stays(scale, parse, fuse, agree, ops, rng):
    text = """h = Relu(x) m = Mul(s, h) t = Add(b, m)
        y = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(t, fc.weight, fc.bias)"""
    model = parse(f"{BEHIND} {{ {text} }}", behind(rng, scale))
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Relu": 1, "Mul": 1, "Add": 1, "Conv": 1}
    agree(model, fused, {"x": normal(rng, 2, 4, 5, 5)}, 0)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("m = Mul(h, s) t = Transpose<perm=[0,1,3,2]>(m) z = Add(m, t)", {"Mul": 1, "Add": 1}),
        ("z = Mul(h, v)", {"Mul": 1}),
    ],
)
def test_factors_with_other_readers_or_several_numbers_stay(text, left, parse, fuse, ops, rng):
    weights = {"fc.weight": normal(rng, 6, 4, 1, 1)}
    weights |= {"v": normal(rng, 1, 1, 1, 5)} if "v" in text else {"s": np.float32([0.2])}
    layer = "y = Conv<kernel_shape=[1,1]>(z, fc.weight)"
    model = parse(f"{BEHIND} {{ h = Relu(x) {text} {layer} }}", weights)
    fused = ops(fuse(model).carrier.model)
    assert {name: fused[name] for name in left} == left


@pytest.mark.parametrize("kind", ["Gemm<alpha=0.5>(t, fc.weight, fc.bias)", "MatMul(t, fc.weight)"])
def test_a_linear_layer_takes_what_comes_before_it(kind, parse, fuse, agree, ops, rng):
    weights = {"fc.weight": normal(rng, 4, 6), "fc.bias": normal(rng, 6)}
    weights = {k: v for k, v in weights.items() if k in kind}
    weights["b" if "Gemm" in kind else "s"] = np.float32(-0.3)
    text = f"h = Relu(x) t = {'Add(h, b)' if 'Gemm' in kind else 'Mul(h, s)'}"
    model = parse(f"g (float[N, 4] x) => (float[N, 6] y) {{ {text} y = {kind} }}", weights)
    fused = fuse(model).carrier.model
    assert sum(ops(fused).values()) == 2
    agree(model, fused, {"x": normal(rng, 3, 4)}, 2e-6)


def test_a_vector_that_widens_a_column_is_no_bias(parse, fuse, agree, ops, rng):
    model = parse(
        "g (float[N, 4] x) => (float[N, 5] y) "
        "{ m = MatMul(x, fc.weight) z = Add(m, b) y = Mul(z, c) }",
        {"fc.weight": normal(rng, 4, 1), "b": normal(rng, 5), "c": np.float32([2])},
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"MatMul": 1, "Add": 1, "Mul": 1}
    agree(model, fused, {"x": normal(rng, 3, 4)}, 1e-6)
