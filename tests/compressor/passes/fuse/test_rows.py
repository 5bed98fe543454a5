"""What computes row by row takes rows in any order: attention transposes its outputs once."""

import pytest

from tests.compressor.passes.fuse.test_shape_rules import ints, normal

EXIT = """g (float[N, 4, 6, 8] x) => (float[B, T, 10] y) { %s
    t = Transpose<perm=%s>(x) r = Reshape(t, flat) p = Gemm(r, w, b) a = Tanh(p)
    s = Reshape(a, apart) y = Transpose<perm=[1,0,2]>(s)
}"""
IN = [2, 0, 1, 3]


def given(rng):
    return {"w": normal(rng, 32, 10), "b": normal(rng, 10)}


def test_rows_are_put_in_order_before_the_product(parse, fuse, agree, ops, rng):
    text = EXIT % (ints(flat=[-1, 32], apart=[6, -1, 10]), IN)
    model = parse(text, given(rng))
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Transpose": 1, "Reshape": 2, "Gemm": 1, "Tanh": 1}
    for count in (1, 3):
        agree(model, fused, {"x": normal(rng, count, 4, 6, 8)}, 1e-5)


@pytest.mark.parametrize(
    ("flat", "apart", "perm"),
    [
        ([-1, 32], [3, -1, 10], IN),  # rows that are grouped otherwise
        ([-1, 32], [-1, 6, 10], [0, 2, 1, 3]),  # rows of which none is the other's sample
    ],
)
def test_other_rows_keep_their_order(flat, apart, perm, parse, fuse, agree, ops, rng):
    model = parse(EXIT % (ints(flat=flat, apart=apart), perm), given(rng))
    fused = fuse(model).carrier.model
    agree(model, fused, {"x": normal(rng, 2, 4, 6, 8)}, 1e-5)
    if apart[0] == 3:
        assert ops(fused)["Transpose"] == 2


def test_rows_with_terms_of_their_own_keep_their_order(parse, fuse, agree, ops, rng):
    text = EXIT.replace("N", "1").replace("a = Tanh(p)", "a = Add(p, each)")
    text = text % (ints(flat=[-1, 32], apart=[6, -1, 10]), IN)
    model = parse(text, {**given(rng), "each": normal(rng, 6, 10)})
    fused = fuse(model).carrier.model
    assert ops(fused)["Transpose"] == 2
    agree(model, fused, {"x": normal(rng, 1, 4, 6, 8)}, 1e-5)


def test_heads_are_separated_where_samples_have_no_name(parse, fuse, agree, ops, rng):
    lengths = ints(merged=[6, -1, 8], apart=[-1, 4, 6, 8])
    model = parse(
        f"""g (float[N, 6, 32] x) => (float[B, 4, 6, 8] y) {{ {lengths}
            t = Transpose<perm=[1,0,2]>(x) r = Reshape(t, merged)
            h = Transpose<perm=[1,0,2]>(r) y = Reshape(h, apart) }}"""
    )
    fused = fuse(model).carrier.model
    assert ops(fused)["Reshape"] == 1
    agree(model, fused, {"x": normal(rng, 3, 6, 32)}, 0)


def test_a_length_that_a_rule_finds_out_is_known_further_on(parse, fuse, rng):
    lengths = ints(merged=[6, -1, 8], apart=[-1, 4, 6, 8])
    model = parse(
        f"""g (float[N, 6, 32] x) => (float[B, 4, 8, 6] y) {{ {lengths}
            t = Transpose<perm=[1,0,2]>(x) r = Reshape(t, merged)
            h = Transpose<perm=[1,0,2]>(r) s = Reshape(h, apart)
            e = Exp(s) y = Transpose<perm=[0,1,3,2]>(e) }}"""
    )
    fused = fuse(model).carrier.model
    (exp,) = (node for node in fused.graph if node.op_type == "Exp")
    assert [str(d) for d in exp.outputs[0].shape] == ["N", "4", "6", "8"]


@pytest.mark.parametrize(
    ("product", "shape"), [("Gemm(q, w, c)", (4, 5)), ("MatMul(q, w)", (2, 4, 5))]
)
def test_rows_with_a_matrix_or_bias_of_their_own_keep_their_order(
    product, shape, parse, fuse, agree, rng
):
    width = 5 * shape[0] if len(shape) == 3 else 5
    model = parse(
        f"g (float[2, 3, 4] x) => (float[2, 3, {width}] y) {{ "
        f"{ints(flat=[6, 4], apart=[3, 2, width])} t = Transpose<perm=[1,0,2]>(x) "
        f"q = Reshape(t, flat) h = {product} s = Reshape(h, apart) "
        "y = Transpose<perm=[1,0,2]>(s) }",
        {"w": normal(rng, *shape)} | ({"c": normal(rng, 6, 5)} if len(shape) == 2 else {}),
    )
    agree(model, fuse(model).carrier.model, {"x": normal(rng, 2, 3, 4)}, 1e-5)
