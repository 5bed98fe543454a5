"""In float16, what a fold makes may be infinite or vanish where the network's values do not."""

import numpy as np
import pytest

ROWS = "g (float16[4, 4] x) => (float16[4, 4] y)"
SCALE, WEIGHT = "scale", "fc.weight"
CASES = {  # the graph, the factor, the size of weights and of inputs
    "behind": ("h = MatMul(x, fc.weight) y = Mul(h, scale)", 1000, 200, 1e-3),
    "ahead": ("h = Mul(x, scale) y = MatMul(h, fc.weight)", 1000, 200, 1e-3),
    "tiny ahead": ("h = Mul(x, scale) y = MatMul(h, fc.weight)", 1e-4, 1e-3, 1e4),
    "a term": ("h = MatMul(x, fc.weight) s = Mul(h, scale) y = Add(s, c)", 1000, 200, 1e-3),
    "around a term": ("t = Mul(x, scale) h = Add(t, c) y = MatMul(h, fc.weight)", 1000, 200, 1e-3),
    "queries": (
        "q = Mul(x, scale) t = Transpose(x) k = Mul(t, scale) m = MatMul(q, k) "
        "s = Softmax(m) y = MatMul(s, fc.weight)",
        3e-4,
        1,
        3e3,
    ),
}


def halves(rng, *shape):
    return rng.standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("case", CASES)
def test_what_float16_does_not_hold_stays_apart(case, parse, fuse, agree, ops, rng):
    body, scale, weight, size = CASES[case]
    signs = np.sign(rng.standard_normal((4, 4)))
    parameters = {WEIGHT: (signs * weight).astype(np.float16), SCALE: np.float16(scale)}
    if ", c)" in body:
        parameters["c"] = np.float16(0.5)
    model = parse(f"{ROWS} {{ {body} }}", parameters)
    fused = fuse(model).carrier.model
    assert ops(fused)["Mul"] == ops(model)["Mul"]
    agree(model, fused, {"x": (halves(rng, 4, 4) * np.float16(size)).astype(np.float16)}, 5e-3)


def test_a_batch_norm_of_a_channel_that_hardly_varies_stays(parse, fuse, survey, agree, ops, rng):
    parameters = {WEIGHT: 100 * np.sign(halves(rng, 4, 4, 1, 1)), "gamma": np.ones(4, np.float16)}
    parameters |= {name: np.zeros(4, np.float16) for name in ("beta", "mean")}
    parameters["variance"] = np.full(4, 1e-6, np.float16)
    body = "h = Conv(x, fc.weight) y = BatchNormalization<epsilon = 1e-7>"
    model = parse(
        "g (float16[1, 4, 3, 3] x) => (float16[1, 4, 3, 3] y) "
        f"{{ {body}(h, gamma, beta, mean, variance) }}",
        parameters,
    )
    (layer,) = survey(model).layers
    assert "float16 does not hold what it makes" in layer.reason
    fused = fuse(model).carrier.model
    assert "BatchNormalization" in ops(fused)
    agree(model, fused, {"x": halves(rng, 1, 4, 3, 3) * np.float16(1e-3)}, 2e-2)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
@pytest.mark.parametrize("scale", [0.0, 0.25, 8.0])
def test_what_is_held_is_folded(kind, scale, parse, fuse, agree, ops, rng):
    name = {np.float16: "float16", np.float32: "float"}[kind]
    weight = halves(rng, 4, 4).astype(kind)
    weight[:, 0] = 0
    model = parse(
        f"{ROWS} {{ h = MatMul(x, fc.weight) y = Mul(h, scale) }}".replace("float16", name),
        {WEIGHT: weight, SCALE: kind(scale)},
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"MatMul": 1}
    agree(model, fused, {"x": halves(rng, 4, 4).astype(kind)}, 5e-3)
