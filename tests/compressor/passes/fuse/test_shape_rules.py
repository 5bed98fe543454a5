"""Shapes become constants, and nothing takes a detour through another shape."""

import numpy as np
import pytest


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def ints(**numbers):
    return " ".join(f"{k} = Constant<value_ints = {v}>()" for k, v in numbers.items())


def cuts(first, second, x="x", y="y"):
    text = ints(s1=[first[0]], e1=[first[1]], a1=[first[2]], t1=[first[3]])
    text += ints(s2=[second[0]], e2=[second[1]], a2=[second[2]], t2=[second[3]])
    return f"{text} h = Slice({x}, s1, e1, a1, t1) {y} = Slice(h, s2, e2, a2, t2)"


LAST = 9223372036854775807


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ((0, LAST, 2, 2), (0, LAST, 3, 2), 1),
        ((1, -1, -1, 1), (5, 0, 2, -1), 1),
        ((1, 4, 2, 1), (0, 2, 2, 1), 2),
        ((1, 4, 2, 1), (0, 2, -2, 1), 2),
    ],
)
def test_slices_of_different_axes_are_merged(first, second, count, parse, fuse, agree, ops, rng):
    model = parse(f"g (float[N, 2, 6, 6] x) => (float[N, 2, H, W] y) {{ {cuts(first, second)} }}")
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Slice": count}
    agree(model, fused, {"x": normal(rng, 2, 2, 6, 6)}, 0)


def test_a_slice_that_is_read_twice_stays(parse, fuse, agree, ops, rng):
    body = cuts((0, LAST, 2, 2), (0, LAST, 3, 2))
    model = parse(
        "g (float[N, 2, 6, 6] x) => (float[N, 2, H, W] y, float[N, 2, H, V] z) "
        f"{{ {body} z = Relu(h) }}"
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Slice": 2, "Relu": 1}
    agree(model, fused, {"x": normal(rng, 2, 2, 6, 6)}, 0)


def test_full_slices_and_noop_casts_go(parse, fuse, ops):
    text = ints(zero=[0], end=[LAST], axis=[1], one=[1])
    model = parse(
        f"g (float[N, 8] x) => (float[N, 8] y) {{ {text} a = Slice(x, zero, end, axis, one) "
        "b = Cast<to=1>(a) c = Transpose<perm=[0,1]>(b) d = Identity(c) y = Relu(d) }"
    )
    assert ops(fuse(model).carrier.model) == {"Relu": 1}


def test_a_batch_that_is_read_from_the_input_stays_dynamic(parse, fuse, agree, ops, rng):
    """Flattening as PyTorch lowers it: the batch goes through Shape, Squeeze and Concat."""
    text = ints(zero=[0], one=[1], rest=[12])
    model = parse(
        "g (float[N, 3, 4] x) => (float[N, 12] y) {"
        f"{text} s = Shape(x) b = Slice(s, zero, one) t = Concat<axis=0>(b, rest)"
        "r = Relu(x) y = Reshape<allowzero=1>(r, t) }"
    )
    fused = fuse(model, kind="torch").carrier.model
    assert ops(fused) == {"Relu": 1, "Reshape": 1}
    reshape = fused.graph.node(1)
    assert reshape.inputs[1].const_value.numpy().tolist() == [-1, 12]
    assert "allowzero" not in reshape.attributes
    for batch in (1, 3, 7):
        agree(model, fused, {"x": normal(rng, batch, 3, 4)}, 0)


@pytest.mark.parametrize(
    ("part", "places", "left"),
    [
        ("", "value_int = -1", set()),
        ("<start = -2>", "value_ints = [0, 1]", set()),
        ("", "value_int = 0", {"Shape", "Gather", "Cast", "ReduceSum"}),
    ],
)
def test_known_lengths_are_computed_beside_open_ones(
    part, places, left, parse, fuse, agree, ops, rng
):
    model = parse(
        f"g (float[N, 3, 4] x) => (float[N, 3, 4] y) {{ s = Shape{part}(x) "
        f"p = Constant<{places}>() n = Gather(s, p) f = Cast<to = 1>(n) "
        "t = ReduceSum<keepdims = 0>(f) y = Mul(x, t) }"
    )
    fused = fuse(model).carrier.model
    assert ops(fused).keys() <= {"Mul", *left, *({"Squeeze", "Slice"} if left else ())}
    for batch in (1, 3):
        agree(model, fused, {"x": normal(rng, batch, 3, 4)}, 0)


def test_several_dynamic_axes_are_copied(parse, fuse, agree, ops, rng):
    text = ints(zero=[0], one=[1], two=[2], heads=[3, 4])
    model = parse(
        "g (float[N, T, 12] x) => (float[N, 3, T, 4] y) {"
        f"{text} s = Shape(x) b = Slice(s, zero, two) t = Concat<axis=0>(b, heads)"
        "r = Relu(x) h = Reshape(r, t) y = Transpose<perm=[0,2,1,3]>(h) }"
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Relu": 1, "Reshape": 1, "Transpose": 1}
    assert fused.graph.node(1).inputs[1].const_value.numpy().tolist() == [0, 0, 3, 4]
    agree(model, fused, {"x": normal(rng, 2, 5, 12)}, 0)
    agree(model, fused, {"x": normal(rng, 3, 1, 12)}, 0)


def keys(parse):
    text = ints(flat=[-1], lead=[0, 1], head=[0], two=[2], three=[3], four=[4])
    return parse(
        "g (float[N, 3, T, 4] x) => (float[N, 3, 4, T] y) {"
        f"{text} s = Shape(x) b = Slice(s, head, two) t = Slice(s, two, three)"
        "d = Slice(s, three, four) m = Concat<axis=0>(flat, t, d) e = Concat<axis=0>(b, d, t)"
        "p = Reshape(x, m) q = Transpose<perm=[0,2,1]>(p) y = Reshape(q, e) }"
    )


def test_keys_are_transposed_directly(parse, fuse, agree, ops, rng):
    model = keys(parse)
    fused = fuse(model, kind="torch").carrier.model
    assert ops(fused) == {"Transpose": 1}
    assert list(fused.graph.node(0).attributes.get_ints("perm")) == [0, 1, 3, 2]
    agree(model, fused, {"x": normal(rng, 2, 3, 5, 4)}, 0)


def test_option_leaves_shapes_alone(parse, fuse, ops):
    assert ops(fuse(keys(parse), constants=False).carrier.model)["Reshape"] == 2


def test_transpose_between_unsqueeze_and_squeeze(parse, fuse, agree, ops, rng):
    text = ints(zero=[0], three=[3])
    model = parse(
        "g (float[T, N, 3, 4] x) => (float[3, T, N, 4] y) {"
        f"{text} u = Unsqueeze(x, zero) t = Transpose<perm=[3,1,2,0,4]>(u) y = Squeeze(t, three) }}"
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Transpose": 1}
    agree(model, fused, {"x": normal(rng, 2, 5, 3, 4)}, 0)
    other = parse(
        "g (float[T, N, 1, 4] x) => (float[1, T, N, 4] y) {"
        f"{text} u = Unsqueeze(x, zero) t = Transpose<perm=[0,1,2,3,4]>(u) y = Squeeze(t, three) }}"
    )
    agree(other, fuse(other).carrier.model, {"x": normal(rng, 2, 5, 1, 4)}, 0)


def test_names_of_output_axes_prove_nothing(parse, fuse, agree, ops, rng):
    """Users call the axes of a smaller output like those of the input."""
    text = ints(zero=[0], end=[-1], axis=[2], one=[1])
    model = parse(
        "g (float[N, 2, H, 4] x) => (float[N, 2, H, 4] y) "
        f"{{ {text} y = Slice(x, zero, end, axis, one) }}"
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Slice": 1}
    agree(model, fused, {"x": normal(rng, 1, 2, 5, 4)}, 0)
    assert str(fused.graph.outputs[0].shape) == "[N,2,H,4]"


def test_transposed_weight_keeps_its_name(parse, fuse, survey, agree, ops, rng):
    model = parse(
        "g (float[N, T, 4] x) => (float[N, T, 6] y) "
        "{ w = Transpose<perm=[1,0]>(fc.weight) y = MatMul(x, w) }",
        {"fc.weight": normal(rng, 6, 4)},
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"MatMul": 1}
    weight = fused.graph.initializers["fc.weight"]
    assert tuple(weight.shape) == (4, 6) == weight.const_value.numpy().shape
    agree(model, fused, {"x": normal(rng, 2, 3, 4)}, 0)
    assert survey(model).layers[0].action == "store the weight transposed"


def test_a_tied_embedding_is_not_stored_twice(parse, fuse, agree, ops, rng):
    model = parse(
        "g (int64[N, T] i) => (float[N, T, 50] y) { x = Gather(emb.weight, i) "
        "w = Transpose<perm=[1,0]>(emb.weight) y = MatMul(x, w) }",
        {"emb.weight": normal(rng, 50, 32)},
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Gather": 1, "Transpose": 1, "MatMul": 1}
    assert list(fused.graph.initializers) == ["emb.weight"]


def test_parts_of_a_packed_weight(parse, fuse, agree, ops, rng):
    text = ints(a=[0], b=[32], c=[64], axis=[0])
    model = parse(
        "g (float[N, 32] x) => (float[N, 32] y) {"
        f"{text} q = Slice(in.weight, a, b, axis) k = Slice(in.weight, b, c, axis)"
        "h = Gemm<transB=1>(x, q) r = Relu(h) y = Gemm<transB=1>(r, k) }",
        {"in.weight": normal(rng, 64, 32)},
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Gemm": 2, "Relu": 1}
    assert list(fused.graph.initializers) == ["in.weight.0", "in.weight.1"]
    agree(model, fused, {"x": normal(rng, 3, 32)}, 0)


def test_nothing_is_folded_that_grows(parse, fuse, ops, rng):
    model = parse(
        "g (float[256, 256] x) => (float[256, 256] y) { m = Mul(col, row) y = Add(x, m) }",
        {"col": normal(rng, 256, 1), "row": normal(rng, 1, 256)},
    )
    assert ops(fuse(model).carrier.model) == {"Mul": 1, "Add": 1}


def test_weight_norm_gives_a_layer_its_name(parse, fuse, survey, agree, rng):
    text = ints(axis=[1])
    model = parse(
        "g (float[N, 4] x) => (float[N, 6] y) {"
        f"{text} n = ReduceL2(fc.parametrizations.weight.original1, axis)"
        "d = Div(fc.parametrizations.weight.original1, n)"
        "w = Mul(d, fc.parametrizations.weight.original0) y = Gemm<transB=1>(x, w) }",
        {
            "fc.parametrizations.weight.original0": normal(rng, 6, 1),
            "fc.parametrizations.weight.original1": normal(rng, 6, 4),
        },
    )
    fused = fuse(model).carrier.model
    assert list(fused.graph.initializers) == ["fc.weight"]
    agree(model, fused, {"x": normal(rng, 3, 4)}, 1e-6)


def test_heads_are_separated_where_the_batch_has_no_name(parse, fuse, agree, ops, rng):
    """All other axes are known, so the number of elements says how long it is."""
    text = ints(flat=[5, -1, 4], heads=[-1, 2, 5, 4])
    model = parse(
        f"g (float[5, N, 8] x) => (float[B, 2, 5, 4] y) {{ {text} r = Relu(x) "
        "a = Reshape(r, flat) b = Transpose<perm=[1, 0, 2]>(a) y = Reshape(b, heads) }"
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Relu": 1, "Reshape": 1, "Transpose": 1}
    agree(model, fused, {"x": normal(rng, 5, 3, 8)}, 0)
