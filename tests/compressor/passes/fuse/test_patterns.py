"""Functions that were written out become standard operators, where the opset has them."""

from math import pi, sqrt

import numpy as np
import pytest
import torch
from torch import nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.types.tensors import TensorSpec


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def constants(**numbers):
    return " ".join(f"{k} = Constant<value = float {{{v!r}}}>()" for k, v in numbers.items())


NUMBERS = constants(
    half=0.5, one=1.0, root=sqrt(2), inverse=1 / sqrt(2), two=2.0, three=3.0,
    cubic=0.044715, outer=sqrt(2 / pi), six=6.0,
)  # fmt: skip
ERF = "e = Erf(d) p = Add(e, one)"
TANH = "i = Mul(cubic, c) s = Add(x, i) d = Mul(outer, s) e = Tanh(d) p = Add(one, e)"
GELUS = {
    "x/2 (1 + erf)": f"d = Div(x, root) {ERF} h = Mul(x, half) y = Mul(h, p)",
    "x (1/2 (1 + erf))": f"d = Div(x, root) {ERF} h = Mul(half, p) y = Mul(x, h)",
    "1/2 (x (1 + erf))": f"d = Mul(inverse, x) {ERF} h = Mul(p, x) y = Mul(half, h)",
    "x (1 + erf) / 2": f"d = Mul(x, inverse) {ERF} h = Mul(x, p) y = Div(h, two)",
    "tanh, pow": f"c = Pow(x, three) {TANH} h = Mul(half, x) y = Mul(h, p)",
    "tanh, x x x": f"a = Mul(x, x) c = Mul(a, x) {TANH} h = Mul(half, p) y = Mul(x, h)",
}
G = "g (float[N, 8] x) => (float[N, 8] y)"


@pytest.mark.parametrize("form", GELUS)
def test_gelu(form, parse, fuse, agree, ops, rng):
    model = parse(f"{G} {{ {NUMBERS} {GELUS[form]} }}")
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Gelu": 1}
    wanted = "tanh" if form.startswith("tanh") else "none"
    assert fused.graph.node(0).attributes.get_string("approximate") == wanted
    agree(model, fused, {"x": 3 * normal(rng, 5, 8)}, 1e-5)


def test_gelu_needs_its_opset_and_its_constants(parse, fuse, ops):
    text = GELUS["x/2 (1 + erf)"]
    assert "Gelu" not in ops(fuse(parse(f"{G} {{ {NUMBERS} {text} }}", opset=19)).carrier.model)
    assert "Gelu" in ops(fuse(parse(f"{G} {{ {NUMBERS} {text} }}", opset=20)).carrier.model)
    wrong = constants(half=0.5, one=1.0, root=1.5)
    assert "Gelu" not in ops(fuse(parse(f"{G} {{ {wrong} {text} }}")).carrier.model)
    assert "Gelu" not in ops(
        fuse(parse(f"{G} {{ {NUMBERS} {text} }}"), patterns=False).carrier.model
    )


def test_gelu_of_another_value_is_none(parse, fuse, ops):
    model = parse(
        "g (float[N, 8] x, float[N, 8] z) => (float[N, 8] y) {"
        f"{NUMBERS} d = Div(x, root) {ERF} h = Mul(z, half) y = Mul(h, p) }}"
    )
    assert "Gelu" not in ops(fuse(model).carrier.model)


NORM = (
    "axes = Constant<value_ints = [-1]>() eps = Constant<value = float {1e-6}>() "
    "m = ReduceMean(x, axes) d = Sub(x, m) "
)
SQUARES = {"pow": "q = Pow(d, two)", "mul": "q = Mul(d, d)"}
ENDS = {"div": "n = Div(d, r)", "reciprocal": "i = Reciprocal(r) n = Mul(i, d)"}


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("affine", ["", "scale", "scale and bias"])
def test_layer_norm(square, end, affine, parse, fuse, agree, ops, rng):
    body = NORM + f"{SQUARES[square]} v = ReduceMean(q, axes) a = Add(v, eps) r = Sqrt(a) "
    body += ENDS[end]
    parameters = {}
    if affine:
        parameters["scale"] = normal(rng, 8)
        body += " s = Mul(n, scale)"
    if "bias" in affine:
        parameters["shift"] = normal(rng, 8)
        body += " t = Add(shift, s)"
    last = {"": "n", "scale": "s"}.get(affine, "t")
    model = parse(f"{G} {{ {NUMBERS} {body} y = Relu({last}) }}", parameters)
    fused = fuse(model).carrier.model
    assert ops(fused) == {"LayerNormalization": 1, "Relu": 1}
    agree(model, fused, {"x": normal(rng, 5, 8)}, 1e-5)
    assert "LayerNormalization" not in ops(
        fuse(
            parse(f"{G} {{ {NUMBERS} {body} y = Relu({last}) }}", parameters), patterns=False
        ).carrier.model
    )


def test_layer_norm_wants_a_vector_as_scale(parse, fuse, agree, ops, rng):
    body = NORM + "q = Mul(d, d) v = ReduceMean(q, axes) a = Add(v, eps) r = Sqrt(a) n = Div(d, r)"
    model = parse(
        f"g (float[5, 8] x) => (float[5, 8] y) {{ {body} y = Mul(n, scale) }}",
        {"scale": normal(rng, 5, 1)},
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"LayerNormalization": 1, "Mul": 1}
    agree(model, fused, {"x": normal(rng, 5, 8)}, 1e-5)


def test_a_tiny_epsilon_is_not_nothing(parse, fuse, ops, run, rng):
    """Rules that compare with a tolerance remove it, and zeros become NaN."""
    eps = constants(eps=1e-12)
    model = parse(f"{G} {{ {eps} a = Abs(x) b = Add(a, eps) y = Div(x, b) }}")
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Abs": 1, "Add": 1, "Div": 1}
    assert np.isfinite(run(fused, {"x": np.zeros((1, 8), np.float32)})[0]).all()


def test_neutral_operations_go(parse, fuse, ops):
    body = "a = Mul(x, one) b = Add(zero, a) c = Div(b, one) d = Sub(c, zero) y = Relu(d)"
    model = parse(f"{G} {{ {constants(one=1.0, zero=0.0)} {body} }}")
    assert ops(fuse(model).carrier.model) == {"Relu": 1}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a = Clip(x, zero, six) y = Relu(a)", {"Clip": 1}),
        ("a = Relu(x) y = Clip(a, less, six)", {"Clip": 1}),
        ("a = Clip(x, less, six) y = Clip(a, zero, three)", {"Clip": 1}),
        ("a = Clip(x, six, nine) y = Clip(a, less, zero)", {"Clip": 1}),
        ("a = Relu(x) y = Relu(a)", {"Relu": 1}),
        ("a = Clip(x, less) y = Relu(a)", {"Relu": 1}),
        ("a = Relu(x) y = Clip(a, six, less)", {"Relu": 1, "Clip": 1}),
    ],
)
def test_clips_are_merged(body, expected, parse, fuse, agree, ops, rng):
    numbers = constants(zero=0.0, three=3.0, six=6.0, nine=9.0, less=-1.0)
    model = parse(f"{G} {{ {numbers} {body} }}")
    fused = fuse(model).carrier.model
    assert ops(fused) == expected
    agree(model, fused, {"x": 8 * normal(rng, 5, 8)}, 0)


def test_two_branches_of_clips_keep_their_own_bounds(parse, fuse, agree, rng):
    numbers = constants(zero=0.0, six=6.0, three=3.0)
    model = parse(
        "g (float[N, 8] x) => (float[N, 8] y, float[N, 8] z) {"
        f"{numbers} a = Clip(x, zero, six) y = Relu(a) b = Clip(x, zero, three) z = Relu(b) }}"
    )
    agree(model, fuse(model).carrier.model, {"x": 8 * normal(rng, 5, 8)}, 0)


def test_hard_swish_written_out(parse, fuse, agree, ops, rng):
    numbers = constants(zero=0.0, three=3.0, six=6.0)
    body = "a = Add(x, three) b = Clip(a, zero, six) c = Mul(x, b) y = Div(c, six)"
    model = parse(f"{G} {{ {numbers} {body} }}")
    fused = fuse(model).carrier.model
    assert ops(fused) == {"HardSwish": 1}
    agree(model, fused, {"x": 4 * normal(rng, 5, 8)}, 1e-6)
    old = parse(f"{G} {{ {numbers} {body} }}", opset=13)
    assert "HardSwish" not in ops(fuse(old).carrier.model)


@pytest.mark.parametrize(
    ("axes", "keep", "expected"),
    [
        ([2, 3], 1, {"GlobalAveragePool": 1}),
        ([-1, -2], 1, {"GlobalAveragePool": 1}),
        ([3, 2], 0, {"GlobalAveragePool": 1, "Flatten": 1}),
        ([2], 1, {"ReduceMean": 1}),
        ([1, 2], 1, {"ReduceMean": 1}),
        ([1, 2, 3], 1, {"ReduceMean": 1}),
    ],
)
def test_mean_over_space_is_pooling(axes, keep, expected, parse, fuse, agree, ops, rng):
    model = parse(
        "g (float[N, 4, 5, 6] x) => (float y) {"
        f"a = Constant<value_ints = {axes}>() y = ReduceMean<keepdims={keep}>(x, a) }}"
    )
    model.graph.outputs[0].shape = None
    fused = fuse(model).carrier.model
    assert ops(fused) == expected
    agree(model, fused, {"x": normal(rng, 3, 4, 5, 6)}, 1e-6)


def test_mean_of_tokens_stays(parse, fuse, ops):
    model = parse(
        "g (float[N, T, 8] x) => (float[N, T, 1] y) "
        "{ a = Constant<value_ints = [2]>() y = ReduceMean(x, a) }"
    )
    assert ops(fuse(model).carrier.model) == {"ReduceMean": 1}


def test_pad_goes_into_the_convolution(parse, fuse, agree, ops, rng):
    model = parse(
        "g (float[N, 4, 5, 5] x) => (float[N, 6, 5, 5] y) {"
        "pads = Constant<value_ints = [0,0,1,1,0,0,1,1]>() p = Pad(x, pads)"
        "y = Conv<kernel_shape=[3,3]>(p, fc.weight) }",
        {"fc.weight": normal(rng, 6, 4, 3, 3)},
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Conv": 1}
    agree(model, fused, {"x": normal(rng, 2, 4, 5, 5)}, 1e-6)


ATTENTION = "g (float[N, 3, 4] q, float[N, 4, 5] k, float[N, 3, 5] m) => (float[N, 3, 5] y)"
SCALES = constants(a=0.6, b=0.7, c=4.0)


@pytest.mark.parametrize(
    ("body", "muls"),
    [
        ("s = Mul(q, a) t = Mul(k, b) p = MatMul(s, t) y = Softmax(p)", 1),
        ("s = Div(q, c) t = Mul(b, k) p = MatMul(s, t) n = Add(p, m) y = Softmax(n)", 1),
        ("s = Mul(q, a) p = MatMul(s, k) y = Softmax(p)", 1),
        ("p = MatMul(q, k) s = Mul(p, a) y = Softmax(s)", 1),
        ("s = Mul(q, a) t = Mul(k, b) p = MatMul(s, t) y = Add(p, m)", 2),
        ("s = Mul(q, a) t = Mul(k, b) p = MatMul(s, t) r = Softmax(p) y = Add(r, p)", 2),
    ],
    ids=["both", "division, mask", "queries only", "behind", "no softmax", "read twice"],
)
def test_scales_of_attention(body, muls, parse, fuse, agree, ops, rng):
    model = parse(f"{ATTENTION} {{ {SCALES} {body} }}")
    fused = fuse(model).carrier.model
    assert ops(fused)["Mul"] == muls
    assert "Div" not in ops(fused)
    feeds = {"q": normal(rng, 2, 3, 4), "k": normal(rng, 2, 4, 5), "m": normal(rng, 2, 3, 5)}
    agree(model, fused, feeds, 1e-6)
    product = next(n for n in fused.graph if n.op_type == "MatMul")
    assert product.outputs[0].name == "p"
    if muls == 1 and "Mul(p" not in body:
        assert product.inputs[0].producer().op_type == "Mul"
        assert product.inputs[1].name == "k"


@pytest.mark.parametrize(
    ("scores", "left"),
    [
        ("s = Identity(p)", 0),
        ("s = Mul(p, a)", 0),
        ("s = Add(p, a)", 0),
        ("s = Add(p, never)", 1),
        ("s = Add(p, m)", 1),
        ("h = IsNaN(m) s = Where(h, m, p)", 1),
    ],
    ids=["plain", "scaled", "constant", "infinite constant", "added mask", "mask"],
)
def test_rows_of_attention_that_nothing_masks_are_not_guarded(
    scores, left, parse, fuse, agree, rng
):
    body = f"p = MatMul(q, k) {scores} r = Softmax(s) n = IsNaN(r) y = Where(n, zero, r)"
    model = parse(f"{ATTENTION} {{ {SCALES} {constants(zero=0.0, never=-np.inf)} {body} }}")
    fused = fuse(model).carrier.model
    guards = [n for n in fused.graph if n.op_type == "IsNaN" and n.inputs[0].name == "r"]
    assert len(guards) == left
    masks = normal(rng, 2, 3, 5)
    masks[0, 1] = -np.inf  # a row that sees nothing
    feeds = {"q": normal(rng, 2, 3, 4), "k": normal(rng, 2, 4, 5), "m": masks}
    agree(model, fused, feeds, 1e-6)


class WrittenOut(nn.Module):
    """GELU and normalization written out, and a single number that is trained."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        h = self.up(x)
        h = self.down(h * 0.5 * (1 + torch.erf(h / 2**0.5)))
        h = h - h.mean(-1, keepdim=True)
        return h / torch.sqrt((h**2).mean(-1, keepdim=True) + 1e-5) + x * self.scale


def test_numbers_in_the_code_of_a_module_are_not_its_parameters(fuse, ops):
    """Only the value of ``scale`` may change, so 1 is not dropped."""
    carrier = TorchCarrier(WrittenOut(), (TensorSpec("x", ("batch", 4), "float32"),))
    fused = fuse(carrier.graph(), kind="torch").carrier.model
    assert ops(fused) == {"Gemm": 2, "Gelu": 1, "LayerNormalization": 1, "Mul": 1, "Add": 1}
    assert "scale" in fused.graph.initializers


def test_products_of_integers_stay(parse, fuse, agree, ops, rng):
    weights = {"w": rng.integers(-3, 3, (4, 5), np.int32), "b": np.arange(5, dtype=np.int32)}
    model = parse(
        "g (int32[3, 4] x) => (int32[3, 5] y) { m = MatMul(x, w) y = Add(m, b) }", weights
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"MatMul": 1, "Add": 1}
    agree(model, fused, {"x": rng.integers(-3, 3, (3, 4), np.int32)}, 0)


def test_float64_keeps_operators_that_have_kernels(parse, fuse, agree, ops, rng):
    six = "three = Constant<value = double {3.0}>() six = Constant<value = double {6.0}>()"
    model = parse(
        f"g (double[1, 2, 3, 3] x) => (double[1, 2, 1, 1] y) {{ {six} a = Add(x, three) "
        "zero = Sub(three, three) c = Clip(a, zero, six) m = Mul(x, c) d = Div(m, six) "
        "axes = Constant<value = int64[2] {2, 3}>() y = ReduceMean(d, axes) }"
    )
    fused = fuse(model).carrier.model
    assert not {"GlobalAveragePool", "HardSwish", "HardSigmoid"} & ops(fused).keys()
    agree(model, fused, {"x": rng.standard_normal((1, 2, 3, 3))}, 1e-12)


AXES = "float[3, 4] x) => (float[a, b, c] y)"
DEEP = {
    "attention": (
        "float[3, 4] x, float[4, 3] k) => (float[1, 3, 3] y)",
        "q = Mul(x, c) s = Mul(k, c) m = MatMul(q, s) y = Softmax(m)",
        0.5,
    ),
    "layer norm": (
        AXES,
        "ax = Constant<value = int64[1] {-1}>() m = ReduceMean(x, ax) d = Sub(x, m) "
        "s = Mul(d, d) v = ReduceMean(s, ax) e = Add(v, c) q = Sqrt(e) y = Div(d, q)",
        1e-5,
    ),
    "gelu": (
        AXES,
        f"{NUMBERS} d = Div(x, root) e = Erf(d) p = Add(e, c) h = Mul(x, half) y = Mul(h, p)",
        1.0,
    ),
    "hard-swish": (
        AXES,
        f"{NUMBERS} z = Sub(one, one) a = Add(x, c) l = Clip(a, z, six) h = Mul(x, l) "
        "y = Div(h, six)",
        3.0,
    ),
}


@pytest.mark.parametrize("form", DEEP)
def test_constants_with_more_axes_than_the_source(form, parse, fuse, agree, rng):
    signature, body, number = DEEP[form]
    text = body.replace(" c)", " deep)").replace("(c", "(deep")
    deep = f"deep = Constant<value = float[1,1,1] {{{number}}}>()"
    model = parse(f"g ({signature} {{ {deep} {text} }}")
    feeds = {"x": normal(rng, 3, 4)} | ({"k": normal(rng, 4, 3)} if form == "attention" else {})
    agree(model, fuse(model).carrier.model, feeds, 1e-5)
