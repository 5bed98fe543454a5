"""What lies between codes is written as ONNX Runtime recognizes it, so that no kernel gets slow."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from compressor.exporters.onnx.forms import in_form_for
from compressor.graph.codes import attach_codes
from compressor.graph.editing import Editor
from compressor.graph.layers import layers_with_nodes
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.onnx.ort_runner import graph_runner
from compressor.passes.quantize.dynamic import QuantizeDynamic
from compressor.passes.quantize.maths.affine import absmax_parameters, quantize
from compressor.passes.quantize.static import placement
from compressor.passes.quantize.static.latency_facts import VNNI
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.layers import Scheme
from compressor.types.passes import PassContext
from tests.compressor.graph.channels.channel_graphs import graph
from tests.compressor.passes.quantize.static_models import statistics

ORT = PassContext(targets=frozenset({"ort-cpu"}))
SILU = """(float[1, 64, 64, 64] x) => (float[1, 64, 64, 64] y) {
    a = Conv<kernel_shape = [1, 1]>(x, first) g = Sigmoid(a) s = Mul(a, g)
    y = Conv<kernel_shape = [1, 1]>(s, second)
}"""
POINTS = {"first": (64, 64, 1, 1), "second": (64, 64, 1, 1)}


def quantized(model: ir.Model, **options: object) -> ir.Model:
    declared = QuantizeStatic.model_validate({"layers": [{"match": "*"}], **options}, strict=False)
    carrier = OnnxCarrier(model)
    shape = [d if isinstance(d, int) else 2 for d in carrier.inputs[0].shape]
    batches = [{"x": np.random.default_rng(3).standard_normal(shape, np.float32)}]
    counted = statistics(declared, carrier, ORT, batches)
    return declared.apply(carrier, ORT, counted).carrier.graph()


def dynamically(model: ir.Model) -> ir.Model:
    return QuantizeDynamic().apply(OnnxCarrier(model), ORT, {}).carrier.graph()


def executed(model: ir.Model, folder: Path) -> Counter[str]:
    """Count the operators that ONNX Runtime executes."""
    source, optimized = folder / "source.onnx", folder / "optimized.onnx"
    ir.save(model, source)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(optimized)
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(optimized).graph.node)


def same(before: ir.Model, after: ir.Model) -> bool:
    shape = [d if isinstance(d, int) else 2 for d in before.graph.inputs[0].shape or ()]
    x = {"x": np.random.default_rng(5).standard_normal(shape, np.float32)}
    (one,), (other,) = (list(graph_runner(m).run(x).values()) for m in (before, after))
    return bool(np.square(one - other).sum() < 1e-3 * np.square(one).sum())


@pytest.fixture(scope="module")
def gated() -> ir.Model:
    """``x * sigmoid(x)`` of floats between integer layers, as where tables are slow."""
    with pytest.MonkeyPatch.context() as patch:
        only = replace(placement.ORT_CPU, latencies=(replace(VNNI, looked_up=5.0),))
        patch.setitem(placement.PROFILES, "ort-cpu", only)  # type: ignore[arg-type]
        return quantized(graph(SILU, POINTS), layers=[{"match": "*"}])


def test_a_gate_between_codes_is_one_operator(gated, tmp_path):
    written = in_form_for("ort-cpu", gated, "float32")
    assert executed(gated, tmp_path)["DequantizeLinear"] == 3, "one for each reader, and the end"
    counted = executed(written, tmp_path)
    assert counted["QuickGelu"] == 1
    assert not counted["Sigmoid"] + counted["Mul"]
    assert counted["DequantizeLinear"] == 2
    assert counted["QLinearConv"] == 2
    assert same(gated, written)


@pytest.mark.parametrize("target", ["openvino", "tensorrt", "ort-cuda"])
def test_other_targets_get_standard_operators(gated, target):
    assert in_form_for(target, gated, "float32") is gated


def test_a_gate_of_floats_is_left_to_the_runtime():
    model = graph(SILU, POINTS)
    assert in_form_for("ort-cpu", model, "float32") is model


@pytest.mark.parametrize(("symmetric", "bits"), [(True, 8), (False, 8), (False, 4)])
@pytest.mark.parametrize("batch", ["1", "N"])
def test_a_product_with_bias_stays_one_of_integers(batch, symmetric, bits, tmp_path):
    # With all axes known, ONNX Runtime merged the sum into a Gemm of floats: twice the time. Else
    # it added the bias behind the product, in a pass of its own over all that this wrote.
    text = f"""(float[{batch}, 9, 12] x) => (float[{batch}, 9, 5] y) {{
        m = MatMul(x, fc) y = Add(m, bias)
    }}"""
    source = graph(text, {"fc": (12, 5), "bias": (5,)})
    options = {"activations": {"symmetric": symmetric}, "weights": {"bits": bits}}
    model = quantized(source, **options, first_last="same")
    written = in_form_for("ort-cpu", model, "float32")
    counted = executed(written, tmp_path)
    assert counted.pop("Add", 0) == symmetric, "there is no fast kernel for signed codes"
    assert counted == {"QuantizeLinear": 1, "MatMulIntegerToFloat": 1}
    assert written.graph.initializers["bias"].shape == ir.Shape([5])
    assert in_form_for("openvino", model, "float32") is model
    assert same(model, written)


@pytest.mark.parametrize("skipped", ["first", "none"])
def test_what_is_quantized_behind_a_pool_of_floats_stays_there(skipped, tmp_path):
    # ONNX Runtime quantized before the pool, and took 57 ms for codes where floats took 0.3 ms.
    text = """(float[1, 64, 32, 32] x) => (float[1, 64, 16, 16] y) {
        a = Conv<kernel_shape = [1, 1]>(x, first) r = Relu(a)
        p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)
        y = Conv<kernel_shape = [1, 1]>(p, second)
    }"""
    rules = [{"match": "first", "skip": True}] if skipped == "first" else []
    source = graph(text, POINTS)
    for node in source.graph:
        node.name = f"node_{node.outputs[0].name}"
    model = quantized(source, layers=[*rules, {"match": "*"}])
    written = in_form_for("ort-cpu", model, "float32")
    assert same(model, written)
    if skipped == "none":  # the convolution before it writes codes
        assert written is model
        return
    orders = []
    for form in (model, written):
        executed(form, tmp_path)
        orders.append([n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node])
    assert [o.index("MaxPool") < o.index("QuantizeLinear") for o in orders] == [False, True]


def test_a_layer_of_floats_behind_codes_has_its_weight_ready(tmp_path):
    # A convolution that reads codes and writes floats is none of integers; its weight was decoded
    # in each run, and the runtime did not know it as a constant.
    text = """(float[1, 64, 32, 32] x) => (float[1, 64, 32, 32] y) {
        a = Conv<kernel_shape = [1, 1]>(x, first) y = Conv<kernel_shape = [1, 1]>(a, second)
    }"""
    half = quantized(
        graph(text, POINTS), layers=[{"match": "second", "skip": True}, {"match": "*"}]
    )
    (layer,) = (layer for layer, _ in layers_with_nodes(half) if layer.name == "second")
    tensor = half.graph.initializers["second"].const_value
    assert tensor is not None
    matrix, scheme = layer.canonical(torch.from_numpy(np.array(tensor.numpy()))), Scheme(8)
    codes = quantize(matrix, *absmax_parameters(matrix, scheme), scheme)
    attach_codes(Editor(half), layer, scheme, lambda: codes)
    assert executed(half, tmp_path)["DequantizeLinear"] == 2
    written = in_form_for("ort-cpu", half, "float32")
    counted = executed(written, tmp_path)
    assert counted["DequantizeLinear"] == 1
    assert counted["Conv"] == counted["QLinearConv"] == 1
    assert same(half, written)
    assert in_form_for("openvino", half, "float32") is half


@pytest.mark.parametrize("batch", ["1", "N"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_bias_with_gelu_and_a_sum_with_a_norm_are_not_merged(batch, dynamic, tmp_path):
    # Of 8 x 96 tokens of MiniLM, BiasGelu took 5.2 ms and the two one by one 4.0; of float MiniLM,
    # SkipLayerNormalization took 14.2 ms, and sums and norms less than 3.
    text = f"""(float[{batch}, 9, 12] x) => (float[{batch}, 9, 12] y) {{
        m = MatMul(x, up) a = Add(m, bias) g = Gelu(a)
        n = MatMul(g, down) s = Add(n, x) y = LayerNormalization<axis = -1>(s, scale, shift)
    }}"""
    sizes = {"up": (12, 20), "bias": (20,), "down": (20, 12), "scale": (12,), "shift": (12,)}
    source = graph(text, sizes, opset=21)
    model = dynamically(source) if dynamic else quantized(source, prepare="none")
    written = in_form_for("ort-cpu", model, "float32")
    merged, apart = executed(model, tmp_path), executed(written, tmp_path)
    assert merged["SkipLayerNormalization"] == 1
    assert apart["LayerNormalization"] == apart["Sum"] == apart["Gelu"] == 1
    assert not apart["SkipLayerNormalization"] + apart["BiasGelu"]
    assert sum(apart[name] for name in ("MatMulIntegerToFloat", "DynamicQuantizeMatMul")) == 2
    assert same(model, written)


NARROW = """(float[N, 8, 6, 6] x) => (float[N, 5] y) {
    c = Conv<kernel_shape = [3, 3]>(x, first, bias) r = Relu(c)
    p = GlobalAveragePool(r) f = Flatten(p) y = Gemm<transB = 1>(f, head, last)
}"""
WEIGHTS = {"first": (16, 8, 3, 3), "bias": (16,), "head": (5, 16), "last": (5,)}


def narrow() -> ir.Model:
    model = graph(NARROW, WEIGHTS)
    for node in model.graph:
        node.name = f"node_{node.outputs[0].name}"
    return model


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_narrow_weights_are_multiplied_as_bytes(bits, symmetric, tmp_path):
    # They were decoded in each run: 2.15 ms in place of 0.70 for a ResNet-20.
    weights = {"bits": bits, "symmetric": symmetric}
    model = quantized(narrow(), weights=weights, first_last="same")
    written = in_form_for("ort-cpu", model, "float32")
    counted = executed(written, tmp_path)
    assert counted["QLinearConv"] == counted["QGemm"] == 1
    assert not counted["Conv"] + counted["Gemm"]
    stored = {name: v.dtype for name, v in written.graph.initializers.items() if len(v.shape) > 1}
    assert set(stored) == {"first", "head"}
    assert set(stored.values()) <= {ir.DataType.INT4, ir.DataType.UINT4}
    assert same(model, written)
    for target in ("openvino", "tensorrt", "ort-cuda"):
        assert not any(n.op_type == "Cast" for n in in_form_for(target, model, "float32").graph)


def test_biases_of_narrow_convolutions_stay_floats():
    model = quantized(narrow(), weights={"bits": 4})
    biases = {name: model.graph.initializers[name].dtype for name in ("bias", "last")}
    assert biases == {"bias": ir.DataType.FLOAT, "last": ir.DataType.INT32}


BETWEEN = """(float[1, 8, 6, 6] x) => (float[1, 8, 6, 6] y) {
    a = Conv<kernel_shape = [1, 1]>(x, first) b = OP(a, second) r = ACTIVATION(b)
    t = Transpose<perm = [0, 1, 3, 2]>(r) y = Conv<kernel_shape = [1, 1]>(t, third)
}"""


@pytest.mark.parametrize("activation", ["Relu", "Identity"])
@pytest.mark.parametrize("op", ["Conv<kernel_shape = [1, 1]>", "ConvTranspose"])
def test_a_layer_that_a_rule_keeps_in_floats_has_float_weights(op, activation, tmp_path):
    # ONNX Runtime quantized its weight with one scale for all rows: an error of 34 to 37 dB.
    text = BETWEEN.replace("OP", op).replace("ACTIVATION", activation)
    source = graph(text, dict.fromkeys(("first", "second", "third"), (8, 8, 1, 1)))
    for node in source.graph:
        node.name = f"node_{node.outputs[0].name}"
    rules = [{"match": "second", "skip": True}, {"match": "*"}]
    model = quantized(source, layers=rules)
    written = in_form_for("ort-cpu", model, "float32")
    counted = executed(written, tmp_path)
    optimized = onnx.load(tmp_path / "optimized.onnx").graph
    assert counted["QLinearConv"] == 2
    assert sum(n for name, n in counted.items() if name.endswith(op.partition("<")[0])) >= 1
    assert not [t for t in optimized.initializer if "second" in t.name and t.data_type == 3]
    assert same(model, written)
    assert in_form_for("openvino", model, "float32") is model


SIGMOID = """(float[4, 64] x) => (float[4, 64] y) {{
    low = Constant<value_float = -1.0>() high = Constant<value_float = 1.0>()
    a = {layer} b = {after} y = Sigmoid(b) }}"""
PRODUCTS = {
    "MatMul": ("MatMulIntegerToFloat", "MatMul(x, w)", {"w": (64, 64)}),
    "Gemm": ("QGemm", "Gemm<transB = 1>(x, w, bias)", {"w": (64, 64), "bias": (64,)}),
}


@pytest.mark.parametrize("after", ["Relu(a)", "Clip(a, low, high)"])
@pytest.mark.parametrize("product", ["MatMul", "Gemm"])
def test_a_product_before_an_activation_of_floats_stays_one_of_integers(
    product: str, after: str, tmp_path: Path
) -> None:
    """It decoded the weight in every run: ten times the time of floats for 2048 x 2048."""
    kernel, layer, shapes = PRODUCTS[product]
    made = quantized(graph(SIGMOID.format(layer=layer, after=after), shapes))
    written = in_form_for("ort-cpu", made, "auto")
    found = executed(written, tmp_path)
    assert found[kernel] == 1, found
    assert not found["DequantizeLinear"]
    assert same(made, written)


@pytest.mark.parametrize("batch", ["4", "n"])
def test_a_product_before_a_sum_of_floats_stays_one_of_integers(batch: str, tmp_path: Path) -> None:
    """It made a ``Gemm`` of floats of both."""
    text = f"(float[{batch}, 64] x) => (float[{batch}, 64] y) {{ b = MatMul(x, w) y = Add(x, b) }}"
    made = quantized(graph(text, {"w": (64, 64)}))
    written = in_form_for("ort-cpu", made, "auto")
    found = executed(written, tmp_path)
    assert found["MatMulIntegerToFloat"] == 1, found
    assert same(made, written)


def test_a_product_that_codes_and_floats_are_made_of_is_one_of_integers(tmp_path: Path) -> None:
    text = """(float[4, 64] x) => (float[4, 64] y) {
        a = MatMul(x, w) s = Softplus(a) b = MatMul(a, w2) y = Mul(s, b) }"""
    made = quantized(graph(text, {"w": (64, 64), "w2": (64, 64)}))
    softplus = next(node for node in made.graph if node.op_type == "Softplus")
    product = next(node for node in made.graph if node.op_type == "MatMul")
    softplus.replace_input_with(0, product.outputs[0])  # as in files of others
    found = executed(in_form_for("ort-cpu", made, "auto"), tmp_path)
    assert found["MatMulIntegerToFloat"] == 2, found


FOUR = {"activations": {"bits": 4}, "first_last": "same"}
THREE = """(float[2, 16, 8, 8] x) => (float[2, 16, 8, 8] y) {
    a = Conv<kernel_shape = [1, 1]>(x, one) b = Relu(a)
    c = Conv<kernel_shape = [1, 1]>(b, two) y = Conv<kernel_shape = [1, 1]>(c, three) }"""
POINTWISE = dict.fromkeys(("one", "two", "three"), (16, 16, 1, 1))


def test_fewer_than_eight_bits_keep_integer_kernels(tmp_path: Path) -> None:
    """Clipped before they were rounded, activations of four bits took longer than floats."""
    made = quantized(graph(THREE, POINTWISE), **FOUR)
    written = in_form_for("ort-cpu", made, "auto")
    found = executed(written, tmp_path)
    assert found["QLinearConv"] == 3, found
    assert same(made, written)


def clipped_types(model: ir.Model) -> set[ir.DataType | None]:
    return {
        n.inputs[0].dtype for n in model.graph if n.op_type == "Clip" and n.inputs[0].producer()
    }


def test_only_unsigned_bytes_are_clipped_and_from_opset_12_on() -> None:
    made = quantized(graph(THREE, POINTWISE), **FOUR)
    assert clipped_types(in_form_for("ort-cpu", made, "auto")) == {ir.DataType.UINT8}
    made.graph.opset_imports[""] = 11
    assert clipped_types(in_form_for("ort-cpu", made, "auto")) == {ir.DataType.FLOAT}
    options = {**FOUR, "activations": {"bits": 4, "symmetric": True}}
    signed = quantized(graph(THREE, POINTWISE), **options)
    assert clipped_types(in_form_for("ort-cpu", signed, "auto")) == {ir.DataType.FLOAT}


def test_a_layer_of_floats_keeps_its_activation_before_the_codes() -> None:
    rules = [{"match": "one", "skip": True}, {"match": "*"}]
    made = quantized(graph(THREE, POINTWISE), **FOUR, layers=rules)
    written = in_form_for("ort-cpu", made, "auto")
    (first,) = (n for n in written.graph if n.op_type == "Clip" and n.inputs[0].name == "b")
    assert first.inputs[0].dtype == ir.DataType.FLOAT
