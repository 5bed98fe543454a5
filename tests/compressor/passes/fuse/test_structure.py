"""What a graph is for its user stays: inputs, outputs, branches, loops, foreign operators."""

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import ModelError


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def test_inputs_and_outputs_keep_names_order_and_axes(parse, fuse, agree, rng):
    model = parse(
        "g (float[N, 4] b, float[N, 4] unused, float[N, 4] a) "
        "=> (float[N, 4] z, float[N, 4] y, float[N, 4] x) {"
        "s = Add(a, b) z = Identity(s) y = Identity(z) x = Identity(a) }"
    )
    fused = fuse(model).carrier.model
    for old, new in ((model.graph.inputs, fused.graph.inputs),):
        assert [(v.name, str(v.shape)) for v in new] == [(v.name, str(v.shape)) for v in old]
    outputs = [(v.name, str(v.shape)) for v in fused.graph.outputs]
    assert outputs == [("z", "[N,4]"), ("y", "[N,4]"), ("x", "[N,4]")]
    agree(model, fused, {name: normal(rng, 3, 4) for name in ("a", "b", "unused")}, 0)


def test_equal_outputs_stay_two(parse, fuse, agree, rng):
    model = parse("g (float[N, 4] x) => (float[N, 4] y, float[N, 4] z) { y = Relu(x) z = Relu(x) }")
    fused = fuse(model).carrier.model
    assert [v.name for v in fused.graph.outputs] == ["y", "z"]
    agree(model, fused, {"x": normal(rng, 3, 4)}, 0)


def test_dead_code_goes_with_its_parameters(parse, fuse, ops, rng):
    model = parse(
        "g (float[N, 4] x) => (float[N, 6] y) "
        "{ a = MatMul(x, dead.weight) b = Relu(a) y = MatMul(x, fc.weight) }",
        {"dead.weight": normal(rng, 4, 6), "fc.weight": normal(rng, 4, 6)},
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"MatMul": 1}
    assert list(fused.graph.initializers) == ["fc.weight"]


BRANCHES = """
g (float[N, 4] x, bool flag) => (float[N, 4] y) {
  h = Relu(x)
  r = If(flag) <
    then_branch = t () => (float[N, 4] o) { o = Identity(h) },
    else_branch = e () => (float[N, 4] p) {
      one = Constant<value = float {1.0}>()
      m = MatMul(h, fc.weight)
      q = Mul(m, one)
      p = Add(q, fc.bias)
    }
  >
  y = Identity(r)
}
"""


def test_branches_stay_whole(parse, fuse, agree, ops, rng):
    model = parse(BRANCHES, {"fc.weight": normal(rng, 4, 4), "fc.bias": normal(rng, 4)})
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Relu": 1, "If": 1, "Identity": 1, "Gemm": 1}
    for flag in (True, False):
        feeds = {"x": normal(rng, 3, 4), "flag": np.array(flag)}
        agree(model, fused, feeds, 1e-6)


def test_batch_norm_inside_a_branch(parse, fuse, agree, ops, rng):
    norm = {f"bn.{p}": normal(rng, 4) for p in ("weight", "bias", "mean")}
    norm["bn.var"] = rng.uniform(0.5, 1, 4).astype(np.float32)
    model = parse(
        "g (float[N, 3, 5, 5] x, bool flag) => (float[N, 4, 3, 3] y) { y = If(flag) <"
        "then_branch = t () => (float[N, 4, 3, 3] o) { a = Conv(x, fc.weight)"
        "o = BatchNormalization(a, bn.weight, bn.bias, bn.mean, bn.var) },"
        "else_branch = e () => (float[N, 4, 3, 3] p) { p = Conv(x, fd.weight) } > }",
        {"fc.weight": normal(rng, 4, 3, 3, 3), "fd.weight": normal(rng, 4, 3, 3, 3), **norm},
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"If": 1, "Conv": 2}
    for flag in (True, False):
        agree(model, fused, {"x": normal(rng, 2, 3, 5, 5), "flag": np.array(flag)}, 2e-6)


FOLDED_BRANCH = """
g (float[N, 4] x, bool flag) => (float[N, 4] y) {
  y = If(flag) <
    then_branch = t () => (float[N, 4] o) {
      axes = Constant<value = int64[1] {0}>()
      mean = ReduceSum<keepdims=0>(table, axes)
      row = Unsqueeze(mean, axes)
      n = Neg(x)
      there = Transpose<perm=[1, 0]>(n)
      back = Transpose<perm=[1, 0]>(there)
      o = Mul(back, row)
    },
    else_branch = e () => (float[N, 4] p) { p = Identity(x) }
  >
}
"""


def test_parameters_are_folded_in_a_branch_that_was_rewritten(parse, fuse, agree, ops, rng):
    # the axes are an input from opset 13 on; the rewriter notes opset 1 for the branch
    model = parse(FOLDED_BRANCH, {"table": normal(rng, 3, 4)})
    fused = fuse(model).carrier.model
    assert ops(fused) == {"If": 1, "Neg": 1, "Mul": 1, "Identity": 1}
    for flag in (True, False):
        agree(model, fused, {"x": normal(rng, 5, 4), "flag": np.array(flag)}, 1e-6)


LOOP = """
g (float[4] x, int64 n) => (float[4] y) {
  yes = Constant<value = bool {1}>()
  two = Constant<value = float {2.0}>()
  y = Loop(n, yes, x) <
    body = b (int64 i, bool c, float[4] v) => (bool d, float[4] w) {
      d = Identity(c)
      s = Mul(v, two)
      w = Identity(s)
    }
  >
}
"""


@pytest.mark.parametrize("count", [0, 3])
def test_loops_stay_whole(count, parse, fuse, agree, ops, rng):
    model = parse(LOOP)
    fused = fuse(model).carrier.model
    assert ops(fused)["Loop"] == 1
    agree(model, fused, {"x": normal(rng, 4), "n": np.array(count)}, 0)


def test_foreign_operators_stay(parse, fuse):
    model = parse(
        "g (float[N, 4] x) => (float[N, 4] y) { a = Identity(x) b = my.domain.Op <k=3> (a) "
        "c = my.domain.Op <k=3> (b) y = Identity(c) }",
        domains=', "my.domain" : 2',
    )
    fused = fuse(model).carrier.model
    assert [(n.domain, n.op_type, n.attributes.get_int("k")) for n in fused.graph] == [
        ("my.domain", "Op", 3)
    ] * 2
    assert fused.opset_imports["my.domain"] == 2


def test_functions_are_inlined(parse, fuse, agree, ops, rng):
    text = """
    g (float[N, 4] x) => (float[N, 4] y) { h = my.Twice(x) y = my.Twice(h) }
    <domain: "my", opset_import: ["" : 21]> Twice (a) => (b) { b = Add(a, a) }
    """
    model = parse(text, domains=', "my" : 1')
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Add": 2}
    assert not fused.functions
    agree(model, fused, {"x": normal(rng, 3, 4)}, 0)


def test_random_numbers_are_neither_shared_nor_folded(parse, fuse, ops):
    model = parse(
        "g (float[4] x) => (float[4] y) { p = Constant<value = float[4] {0.5, 0.5, 0.5, 0.5}>()"
        "a = Bernoulli(p) b = Bernoulli(p) c = Sub(a, b) y = Add(x, c) }"
    )
    assert ops(fuse(model).carrier.model)["Bernoulli"] == 2


def test_metadata_goes(parse, fuse, rng):
    model = parse("g (float[N, 4] x) => (float[N, 4] y) { h = Relu(x) y = Abs(h) }")
    model.metadata_props["names"] = "cat, dog"
    model.graph.doc_string = "a trace"
    for node in model.graph:
        node.metadata_props["pkg.torch.onnx.stack_trace"] = "line 1"
        node.doc_string = "line 1"
        node.outputs[0].metadata_props["note"] = "note"
    fused = fuse(model).carrier.model
    assert fused.metadata_props == {"names": "cat, dog"}, "the model's own are the user's"
    assert not fused.graph.doc_string
    for node in fused.graph:
        assert not node.metadata_props
        assert not node.doc_string
        assert not node.outputs[0].metadata_props


def test_names_are_unique_and_there(parse, fuse):
    model = parse("g (float[N, 4] x) => (float[N, 4] y) { h = Relu(x) y = Abs(h) }")
    for node in model.graph:
        node.name = "same"
    assert [n.name for n in fuse(model).carrier.model.graph] == ["same", "same_1"]
    for node in model.graph:
        node.name = None
    names = [n.name for n in fuse(model).carrier.model.graph]
    assert all(names)
    assert len(set(names)) == 2


def test_equal_code_constants_are_stored_once(parse, fuse, rng):
    model = parse(
        "g (float[N, 4] x) => (float[N, 2, 2] y, float[N, 2, 2] z) {"
        "a = Constant<value_ints = [-1, 2, 2]>() b = Constant<value = int64[3] {-1, 2, 2}>()"
        "y = Reshape(x, a) h = Relu(x) z = Reshape(h, b) }"
    )
    assert len(fuse(model).carrier.model.graph.initializers) == 1


def test_a_library_failure_is_a_model_error(parse, fuse, monkeypatch):
    def broken(model):
        raise RuntimeError("no such thing")

    monkeypatch.setattr("compressor.passes.fuse.simplify.fold", broken)
    with pytest.raises(ModelError, match=r"no such thing.*constants: false"):
        fuse(parse("g (float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }"))


@pytest.mark.parametrize("opset", [11, 13, 17, 21, 23])
def test_no_operator_is_newer_than_the_opset(opset, parse, fuse, agree, ops, rng):
    model = parse(
        "g (float[N, 3, 4] x) => (float[N, 12] y) {"
        "zero = Constant<value = int64[1] {0}>() one = Constant<value = int64[1] {1}>()"
        "rest = Constant<value = int64[1] {12}>() s = Shape(x) b = Slice(s, zero, one)"
        "t = Concat<axis=0>(b, rest) r = Relu(x) y = Reshape(r, t) }",
        opset=opset,
    )
    fused = fuse(model).carrier.model
    agree(model, fused, {"x": normal(rng, 5, 3, 4)}, 0)


def test_parameters_that_are_inputs_too_stay_changeable(parse, fuse, agree, rng):
    """Old exporters list initializers among the inputs, which lets callers override them."""
    model = parse(
        "g (float[N, 4] x, float[4, 6] w) => (float[N, 6] y) { h = MatMul(x, w) y = Add(h, c) }",
        {"c": normal(rng, 6)},
    )
    tensor = ir.Tensor(normal(rng, 4, 6), name="w")
    model.graph.inputs[1].const_value = tensor
    model.graph.register_initializer(model.graph.inputs[1])
    fused = fuse(model).carrier.model
    feeds = {"x": normal(rng, 3, 4), "w": normal(rng, 4, 6)}
    agree(model, fused, feeds, 1e-6)
    agree(model, fused, {"x": feeds["x"]}, 1e-6)


def test_an_input_that_is_an_output_keeps_its_name(parse, fuse, agree, rng):
    model = parse("g (float[2, 3] x) => (float[2, 3] x, float[2, 3] y) { y = Relu(x) }")
    fused = fuse(model).carrier.model
    assert [v.name for v in fused.graph.inputs] == ["x"]
    assert [v.name for v in fused.graph.outputs] == ["x", "y"]
    agree(model, fused, {"x": normal(rng, 2, 3)}, 0)
