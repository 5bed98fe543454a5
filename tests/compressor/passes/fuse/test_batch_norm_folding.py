"""Batch-norm goes into the layer before it, and only where nobody else notices."""

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import ModelError
from compressor.graph.layers import graph_layers

NORM = ("weight", "bias", "running_mean", "running_var")


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def norm_parameters(rng, channels, name="bn"):
    arrays = [normal(rng, channels) for _ in range(3)]
    arrays.append(rng.uniform(0.1, 2, channels).astype(np.float32))
    return {f"{name}.{part}": array for part, array in zip(NORM, arrays, strict=True)}


def bn(source, output, name="bn"):
    return f"{output} = BatchNormalization({source}, {', '.join(f'{name}.{p}' for p in NORM)})"


LAYERS = {
    "conv": ("Conv<kernel_shape=[3,3], pads=[1,1,1,1]>", (6, 4, 3, 3), 4, 6),
    "grouped conv": ("Conv<kernel_shape=[3,3], group=2>", (6, 2, 3, 3), 4, 6),
    "depthwise conv": ("Conv<kernel_shape=[3,3], group=4>", (4, 1, 3, 3), 4, 4),
    "transposed conv": ("ConvTranspose<kernel_shape=[2,2], strides=[2,2]>", (4, 6, 2, 2), 4, 6),
    "grouped transposed conv": ("ConvTranspose<kernel_shape=[3,3], group=2>", (4, 3, 3, 3), 4, 6),
    "linear": ("Gemm<transB=1>", (6, 4), 4, 6),
    "transposed linear": ("Gemm<alpha=0.5, beta=2.0>", (4, 6), 4, 6),
}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_every_layer_takes_its_batch_norm(kind, with_bias, parse, fuse, agree, ops, rng):
    call, shape, channels, outputs = LAYERS[kind]
    spatial = "" if "linear" in kind else ", 7, 7"
    axes = "N, C" if "linear" in kind else "N, C, H, W"
    parameters = {"fc.weight": normal(rng, *shape), **norm_parameters(rng, outputs)}
    if with_bias:
        parameters["fc.bias"] = normal(rng, outputs)
    operands = "x, fc.weight" + (", fc.bias" if with_bias else "")
    model = parse(
        f"g (float[N, {channels}{spatial}] x) => (float[{axes}] y) "
        f"{{ h = {call}({operands}) {bn('h', 'y')} }}",
        parameters,
    )
    outcome = fuse(model)
    fused = outcome.carrier.model
    assert ops(fused) == {call.split("<")[0]: 1}
    assert sorted(fused.graph.initializers) == ["fc.bias", "fc.weight"]
    assert [entry.name for entry in outcome.layers] == ["fc"]
    assert outcome.layers[0].details == {"fused": ["fold batch-norm bn"]}
    feeds = {"x": normal(rng, 3, channels, *(() if "linear" in kind else (7, 7)))}
    agree(model, fused, feeds, 2e-6)


def test_matmul_with_and_without_bias(parse, fuse, agree, ops, rng):
    for bias in ("", "g = Add(h, fc.bias) "):
        parameters = {"fc.weight": normal(rng, 4, 6), **norm_parameters(rng, 6)}
        if bias:
            parameters["fc.bias"] = normal(rng, 6)
        model = parse(
            "m (float[N, 4] x) => (float[N, 6] y) "
            f"{{ h = MatMul(x, fc.weight) {bias}{bn('g' if bias else 'h', 'y')} }}",
            parameters,
        )
        fused = fuse(model).carrier.model
        assert ops(fused) == {"Gemm": 1}
        assert sorted(fused.graph.initializers) == ["fc.bias", "fc.weight"]
        agree(model, fused, {"x": normal(rng, 5, 4)}, 2e-6)
        plain = fuse(model, patterns=False).carrier.model
        assert ops(plain) == {"MatMul": 1, "Add": 1}
        agree(model, plain, {"x": normal(rng, 5, 4)}, 2e-6)


def two_convolutions(parse, rng, second="fc.weight"):
    parameters = {"fc.weight": normal(rng, 4, 4, 3, 3)}
    parameters |= norm_parameters(rng, 4, "bn1") | norm_parameters(rng, 4, "bn2")
    if second != "fc.weight":
        parameters[second] = parameters["fc.weight"].copy()
    conv = "Conv<kernel_shape=[3,3], pads=[1,1,1,1]>"
    return parse(
        "g (float[N, 4, 5, 5] x) => (float[N, 4, 5, 5] y) {"
        f"a = {conv}(x, fc.weight) {bn('a', 'b', 'bn1')} c = Relu(b)"
        f"d = {conv}(c, {second}) {bn('d', 'y', 'bn2')} }}",
        parameters,
    )


def test_a_shared_weight_is_not_touched(parse, fuse, survey, agree, ops, rng):
    model = two_convolutions(parse, rng)
    outcome = fuse(model)
    fused = outcome.carrier.model
    assert ops(fused)["BatchNormalization"] == 2
    old, new = (m.graph.initializers["fc.weight"].const_value.numpy() for m in (model, fused))
    np.testing.assert_array_equal(old, new)
    agree(model, fused, {"x": normal(rng, 2, 4, 5, 5)}, 1e-6)
    plan = survey(model)
    assert [(entry.name, entry.touched) for entry in plan.layers] == [("fc", False)]
    assert "another layer reads the same weight" in plan.layers[0].reason
    assert outcome.notes[-1] == (
        "2 batch-norms stay: another layer reads the same weight, and is not followed by the same; "
        "if a module is called several times, compress it alone"
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["conv", "matmul"])
def test_a_batch_norm_behind_each_call_of_a_module_is_folded_once(
    biased, kind, parse, fuse, survey, agree, ops, rng
):
    """As in siamese networks. One weight and one bias remain."""
    parameters = norm_parameters(rng, 6) | ({"fc.bias": normal(rng, 6)} if biased else {})
    if kind == "conv":
        parameters["fc.weight"] = normal(rng, 6, 4, 3, 3)
        shapes, feeds = ("N, 4, 5, 5", "N, 6, 3, 3"), [normal(rng, 2, 4, 5, 5) for _ in "ab"]
        call = f"Conv({{}}, fc.weight{', fc.bias' * biased})"
    else:
        parameters["fc.weight"] = normal(rng, 4, 6)
        shapes, feeds = ("N, 4", "N, 6"), [normal(rng, 3, 4) for _ in "ab"]
        call = "MatMul({}, fc.weight)"
    body = ""
    for source in "ab":
        made = f"l{source}"
        body += f"{made} = {call.format(source)} "
        if kind == "matmul" and biased:
            body, made = f"{body} s{source} = Add({made}, fc.bias) ", f"s{source}"
        body += bn(made, f"n{source}") + " "
    model = parse(
        f"g (float[{shapes[0]}] a, float[{shapes[0]}] b) => (float[{shapes[1]}] y) "
        f"{{ {body} y = Sub(na, nb) }}",
        parameters,
    )
    outcome = fuse(model)
    fused = outcome.carrier.model
    assert ops(fused) == {"Conv" if kind == "conv" else "Gemm": 2, "Sub": 1}
    assert sorted(fused.graph.initializers) == ["fc.bias", "fc.weight"]
    assert outcome.layers[0].details == {"fused": ["fold batch-norm bn"]}
    assert survey(model).layers[0].touched
    agree(model, fused, dict(zip("ab", feeds, strict=True)), 5e-6)


def test_a_shared_weight_with_another_reader_is_not_touched(parse, fuse, agree, ops, rng):
    parameters = norm_parameters(rng, 6) | {"fc.weight": normal(rng, 4, 6)}
    model = parse(
        "g (float[N, 4] a) => (float[N, 6] x, float[N, 6] y, float[N, 6] z) {"
        f"p = MatMul(a, fc.weight) {bn('p', 'x')} b = Relu(a) q = MatMul(b, fc.weight) "
        f"{bn('q', 'y')} c = Neg(a) z = MatMul(c, fc.weight) }}",
        parameters,
    )
    fused = fuse(model).carrier.model
    assert ops(fused)["BatchNormalization"] == 2
    agree(model, fused, {"a": normal(rng, 3, 4)}, 1e-6)


def test_equal_weights_of_two_layers_stay_apart(parse, fuse, agree, ops, rng):
    model = two_convolutions(parse, rng, second="fd.weight")
    fused = fuse(model).carrier.model
    assert ops(fused) == {"Conv": 2, "Relu": 1}
    assert [layer.name for layer in graph_layers(fused)] == ["fc", "fd"]
    agree(model, fused, {"x": normal(rng, 2, 4, 5, 5)}, 2e-6)


@pytest.mark.parametrize(
    ("rest", "outputs"),
    [("", "float[N, 4, 3, 3] h"), ("z = Relu(h)", "float[N, 4, 3, 3] z")],
    ids=["graph output", "another reader"],
)
def test_an_output_that_is_read_elsewhere_keeps_its_value(
    rest, outputs, parse, fuse, survey, agree, ops, rng
):
    parameters = {"fc.weight": normal(rng, 4, 4, 3, 3), **norm_parameters(rng, 4)}
    model = parse(
        f"g (float[N, 4, 5, 5] x) => (float[N, 4, 3, 3] y, {outputs}) {{"
        f"h = Conv<kernel_shape=[3,3]>(x, fc.weight) {bn('h', 'y')} {rest} }}",
        parameters,
    )
    fused = fuse(model).carrier.model
    assert ops(fused)["BatchNormalization"] == 1
    agree(model, fused, {"x": normal(rng, 2, 4, 5, 5)}, 0)
    assert "other readers" in survey(model).layers[0].reason


def test_the_folded_output_keeps_the_name_of_what_it_equals(parse, fuse, run, rng):
    """A value of the same name means the same before and after, so that errors can be located."""
    parameters = {"fc.weight": normal(rng, 4, 4, 3, 3), **norm_parameters(rng, 4)}
    model = parse(
        "g (float[N, 4, 5, 5] x) => (float[N, 4, 3, 3] y) {"
        f"h = Conv<kernel_shape=[3,3]>(x, fc.weight) {bn('h', 'n')} y = Relu(n) }}",
        parameters,
    )
    fused = fuse(model).carrier.model
    conv = next(iter(fused.graph))
    assert (conv.op_type, conv.outputs[0].name) == ("Conv", "n")


def test_a_batch_norm_without_layer_stays(parse, fuse, ops, rng):
    model = parse(
        f"g (float[N, 4, 5, 5] x) => (float[N, 4, 5, 5] y) {{ r = Relu(x) {bn('r', 'y')} }}",
        norm_parameters(rng, 4),
    )
    outcome = fuse(model)
    assert ops(outcome.carrier.model) == {"Relu": 1, "BatchNormalization": 1}
    assert outcome.layers == ()


def test_training_batch_norm_stays(parse, fuse, ops, rng):
    parameters = {"fc.weight": normal(rng, 4, 4, 3, 3), **norm_parameters(rng, 4)}
    text = (
        "g (float[N, 4, 5, 5] x) => (float[N, 4, 3, 3] y) {"
        f"h = Conv<kernel_shape=[3,3]>(x, fc.weight) {bn('h', 'y, m, v')} }}"
    ).replace("BatchNormalization", "BatchNormalization<training_mode=1>")
    assert ops(fuse(parse(text, parameters)).carrier.model)["BatchNormalization"] == 1


@pytest.mark.parametrize("variance", [-1.0, -1.1e-5, np.nan])
def test_a_bad_variance_names_the_layer(variance, parse, fuse, survey, rng):
    parameters = {"fc.weight": normal(rng, 4, 4, 3, 3), **norm_parameters(rng, 4, "layer1.bn")}
    parameters["layer1.bn.running_var"][2] = variance
    model = parse(
        "g (float[N, 4, 5, 5] x) => (float[N, 4, 3, 3] y) {"
        f"h = Conv<kernel_shape=[3,3]>(x, fc.weight) {bn('h', 'y', 'layer1.bn')} }}",
        parameters,
    )
    with pytest.raises(ModelError, match=r"layer 'layer1\.bn'.*in channel 2.*checkpoint"):
        fuse(model)
    assert survey(model).layers[0].action == "fold batch-norm layer1.bn"


def test_half_precision_weights_stay_half_and_are_folded_precisely(parse, fuse, run, rng):
    parameters = {"fc.weight": normal(rng, 4, 4, 3, 3), **norm_parameters(rng, 4)}
    halves = {name: array.astype(np.float16) for name, array in parameters.items()}
    model = parse(
        "g (float16[N, 4, 5, 5] x) => (float16[N, 4, 3, 3] y) {"
        f"h = Conv<kernel_shape=[3,3]>(x, fc.weight) {bn('h', 'y')} }}",
        halves,
    )
    fused = fuse(model).carrier.model
    weight = fused.graph.initializers["fc.weight"]
    assert weight.dtype == ir.DataType.FLOAT16
    wide = {name: array.astype(np.float64) for name, array in halves.items()}
    scale = wide["bn.weight"] / np.sqrt(wide["bn.running_var"] + np.float32(1e-5))
    exact = wide["fc.weight"] * scale[:, None, None, None]
    np.testing.assert_array_equal(weight.const_value.numpy(), exact.astype(np.float16))


def test_quantized_weights_are_left_alone(parse, fuse, survey, ops, rng):
    parameters = norm_parameters(rng, 4)
    parameters["fc.weight"] = rng.integers(-127, 127, (4, 4, 3, 3)).astype(np.int8)
    parameters["fc.scale"] = np.full(4, 0.01, np.float32)
    model = parse(
        "g (float[N, 4, 5, 5] x) => (float[N, 4, 3, 3] y) {"
        "w = DequantizeLinear<axis=0>(fc.weight, fc.scale)"
        f"h = Conv<kernel_shape=[3,3]>(x, w) {bn('h', 'y')} }}",
        parameters,
    )
    fused = fuse(model).carrier.model
    assert ops(fused) == {"DequantizeLinear": 1, "Conv": 1, "BatchNormalization": 1}
    assert "quantized" in survey(model).layers[0].reason


def test_option_switches_folding_off(parse, fuse, ops, rng):
    parameters = {"fc.weight": normal(rng, 4, 4, 3, 3), **norm_parameters(rng, 4)}
    model = parse(
        "g (float[N, 4, 5, 5] x) => (float[N, 4, 3, 3] y) {"
        f"h = Conv<kernel_shape=[3,3]>(x, fc.weight) {bn('h', 'y')} }}",
        parameters,
    )
    outcome = fuse(model, batch_norm=False)
    assert ops(outcome.carrier.model) == {"Conv": 1, "BatchNormalization": 1}
    assert "nothing to fuse" in outcome.notes[0]
