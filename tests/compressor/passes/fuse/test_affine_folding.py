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
