"""Weights that alone are quantized, as ONNX Runtime and TensorRT want them stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto

from compressor.errors import SpecError
from compressor.exporters import OnnxExporter
from compressor.graph.costs import macs, parameters
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.types.layers import QuantizedTensor, Scheme, WeightCodes
from compressor.types.tensors import Array, Batch
from tests.compressor.exporters.hand_made import CONTEXT, worst
from tests.compressor.graph.random_codes import FORMS, SCHEMES, UNSIGNED, group, random_codes, text
from tests.compressor.passes.quantize.small_models import graph, noise

BATCH: Batch = {"x": noise(5, 64, seed=3)}
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
MXFP4 = group(4, 32, element="e2m1", scale_type="e8m0")
NVFP4 = group(4, 16, element="e2m1", scale_type="e4m3")


def coded(carrier: OnnxCarrier, scheme: Scheme) -> tuple[OnnxCarrier, QuantizedTensor]:
    """Store the weight of the only layer as random codes."""
    (layer,) = carrier.layers()
    codes = random_codes(layer, scheme)
    return carrier.with_codes({layer.weight: WeightCodes(layer, scheme, lambda _: codes)}), codes


def product(form: str, scheme: Scheme, dtype: Any = np.float32) -> tuple[OnnxCarrier, Array]:
    """Return one quantized product, and what it should compute for ``BATCH``."""
    name = {np.float32: "float", np.float16: "float16"}[dtype]
    weight = noise(*FORMS[form][1]).astype(dtype)
    carrier, codes = coded(graph(text(form, name), {"fc.weight": weight}), scheme)
    return carrier, BATCH["x"].astype(np.float64) @ codes.dequantize().double().numpy().T


def written(made: OnnxExporter, carrier: OnnxCarrier, folder: Path) -> tuple[Path, list[str]]:
    """Export; return the file and its operators."""
    made.check(carrier)
    path = made.write(carrier, folder, CONTEXT)[0]
    return path, [node.op_type for node in onnx.load(path).graph.node]


def error(made: OnnxExporter, path: Path, wanted: Array, dtype: Any = np.float32) -> float:
    got = made.open(path).run({"x": BATCH["x"].astype(dtype)})
    return worst({"y": got["y"].astype(np.float64)}, {"y": wanted})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_file_computes_with_the_dequantized_weight_and_holds_codes_only(
    form: str, scheme: Scheme, tmp_path: Path
) -> None:
    carrier, wanted = product(form, scheme)
    made = OnnxExporter()
    path, operators = written(made, carrier, tmp_path)
    assert error(made, path, wanted) < 1e-5
    assert abs(made.predict(carrier) - path.stat().st_size) <= 32  # the spec's name differs
    integers = scheme.element == "int" and scheme.bits in (3, 4)
    assert operators == ["MatMulNBits"] if integers else "DequantizeLinear" not in operators
    tensors = onnx.load(path).graph.initializer
    tables = 4 * 256 * (scheme.element == "e2m1") + 4 * 256 * (scheme.bits == 2)
    size = sum(len(t.raw_data) for t in tensors if t.data_type != TensorProto.INT64)
    stored = replace(scheme, bits=4) if scheme.bits == 3 else scheme
    # A scale a block at least, and zero points of two bits in the four that opset 21 has.
    allowed = stored.nbytes(48, 64) + tables + 4 * 48 + 48 * scheme.groups(64) // 4
    assert size <= allowed
    for tensor in tensors:
        weights = tensor.data_type in FLOATS and np.prod(tensor.dims) >= 48 * 64 // 2
        assert not weights, f"{tensor.name} holds floats"


def folded(path: Path) -> list[str]:
    """Return the operators that ONNX Runtime runs."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path.with_name("folded.onnx"))
    options.log_severity_level = 4
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(path.with_name("folded.onnx")).graph.node]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_nothing_is_dequantized_when_the_model_runs(
    form: str, scheme: Scheme, tmp_path: Path
) -> None:
    path, _ = written(OnnxExporter(), product(form, scheme)[0], tmp_path)
    assert len(folded(path)) == 1


INT8_COMPUTE = [
    (Scheme(8, narrow=False), 8, 64),
    (group(8, 32, narrow=False), 8, 32),
    (group(4, 16, **UNSIGNED), 4, 16),
    (group(4, 64, narrow=False, signed_scale=True), 4, 64),
    (group(2, 32, **UNSIGNED), 2, 32),
    (Scheme(2, narrow=False), 2, 64),
]


@pytest.mark.parametrize(("scheme", "bits", "block"), INT8_COMPUTE, ids=str)
def test_products_in_8_bits(scheme: Scheme, bits: int, block: int, tmp_path: Path) -> None:
    carrier, wanted = product("linear", scheme)
    made = OnnxExporter(matmul_compute="int8")
    path, operators = written(made, carrier, tmp_path)
    assert operators == ["MatMulNBits"]
    node = onnx.load(path).graph.node[0]
    fields = {a.name: a.i for a in node.attribute}
    want = {"K": 64, "N": 48, "bits": bits, "block_size": block, "accuracy_level": 4}
    assert fields == want
    # Activations of 8 bits: measured as 0.2 % to 0.9 % on these.
    assert 1e-4 < error(made, path, wanted) < 0.02


def test_small_blocks_of_two_bits_have_no_kernel_in_8_bits(tmp_path: Path) -> None:
    carrier, wanted = product("linear", group(2, 16, **UNSIGNED))
    made = OnnxExporter(matmul_compute="int8")
    path, operators = written(made, carrier, tmp_path)
    assert "MatMulNBits" not in operators
    assert error(made, path, wanted) < 1e-5


@pytest.mark.parametrize("compute", ["float32", "int8"])
@pytest.mark.parametrize("columns", [17, 60, 100, 300, 600])
def test_columns_that_no_block_divides(columns: int, compute: Any, tmp_path: Path) -> None:
    body = f"g (float[n, {columns}] x) => (float[n, 9] y) {{ y = MatMul(x, fc.weight) }}"
    scheme = Scheme(4, **UNSIGNED)  # type: ignore[arg-type]
    carrier, codes = coded(graph(body, {"fc.weight": noise(columns, 9)}), scheme)
    made = OnnxExporter(matmul_compute=compute)
    path, operators = written(made, carrier, tmp_path)
    assert operators == ["MatMulNBits"]
    x = noise(3, columns, seed=4)
    wanted = x.astype(np.float64) @ codes.dequantize().double().numpy().T
    got = made.open(path).run({"x": x})
    assert worst(got, {"y": wanted}) < (1e-5 if compute == "float32" else 0.02)


@pytest.mark.parametrize(("size", "block"), [(512, 256), (48, 16), (24, 0), (8, 0), (96, 32)])
def test_groups_are_split_into_blocks_that_the_kernel_has(
    size: int, block: int, tmp_path: Path
) -> None:
    columns = 2 * size
    body = f"g (float[n, {columns}] x) => (float[n, 9] y) {{ y = Gemm<transB=1>(x, fc.weight) }}"
    carrier, codes = coded(graph(body, {"fc.weight": noise(9, columns)}), group(4, size))
    made = OnnxExporter()
    path, operators = written(made, carrier, tmp_path)
    if block:
        fields = {a.name: a.i for a in onnx.load(path).graph.node[0].attribute}
        assert fields["block_size"] == block
    assert ("MatMulNBits" in operators) == bool(block)
    x = noise(3, columns, seed=4)
    wanted = x.astype(np.float64) @ codes.dequantize().double().numpy().T
    assert worst(made.open(path).run({"x": x}), {"y": wanted}) < 1e-5


BIASED = {
    "gemm": ("y = Gemm<transB = 1>(x, fc.weight, b)", ["MatMulNBits"]),
    "add": ("a = MatMul(x, t) y = Add(a, b)", ["MatMulNBits"]),
    "add-first": ("a = MatMul(x, t) y = Add(b, a)", ["MatMulNBits"]),
    "read-twice": ("a = MatMul(x, t) c = Add(a, b) y = Mul(a, c)", ["MatMulNBits", "Add", "Mul"]),
}


@pytest.mark.parametrize("case", BIASED)
def test_biases_are_fused(case: str, tmp_path: Path) -> None:
    body, operators = BIASED[case]
    turned = "t = Transpose<perm = [1, 0]>(fc.weight) " if "t)" in body else ""
    weights = {"fc.weight": noise(48, 64), "b": noise(48, seed=2)}
    whole = f"g (float[n, 64] x) => (float[n, 48] y) {{ {turned}{body} }}"
    carrier, codes = coded(graph(whole, weights), group(4, 32))
    made = OnnxExporter()
    path, found = written(made, carrier, tmp_path)
    assert found == operators
    plain = BATCH["x"].astype(np.float64) @ codes.dequantize().double().numpy().T
    wanted = plain + weights["b"]
    assert error(made, path, plain * wanted if case == "read-twice" else wanted) < 1e-5


@pytest.mark.parametrize(
    "body",
    [
        "y = Gemm<transB = 1, alpha = 0.5>(x, fc.weight)",
        "z = Transpose(x) y = Gemm<transA = 1, transB = 1>(z, fc.weight)",
        "y = Gemm<transB = 1>(x, fc.weight, c)",
        "y = Gemm<transB = 1, beta = 2.0>(x, fc.weight, b)",
    ],
)
def test_other_products_stay(body: str, tmp_path: Path) -> None:
    weights = {"fc.weight": noise(48, 64)}
    if ", b)" in body:
        weights["b"] = noise(48, seed=2)
    if ", c)" in body:
        weights["c"] = noise(5, 48, seed=2)
    carrier, _ = coded(
        graph(f"g (float[n, 64] x) => (float[n, 48] y) {{ {body} }}", weights), group(4, 32)
    )
    made = OnnxExporter()
    path, operators = written(made, carrier, tmp_path)
    assert "Gemm" in operators
    assert worst(made.open(path).run(BATCH), carrier.runner().run(BATCH)) < 1e-5


def test_a_table_that_is_also_multiplied_with_is_stored_once(tmp_path: Path) -> None:
    body = """g (int64[n] i) => (float[n, 48] y) {
        x = Gather(table, i) t = Transpose<perm = [1, 0]>(table) y = MatMul(x, t)
    }"""
    for scheme, compute in ((group(4, 32), "float32"), (Scheme(8), "float32"), (Scheme(8), "int8")):
        carrier, codes = coded(graph(body, {"table": noise(48, 64)}), scheme)
        made = OnnxExporter.model_validate({"matmul-compute": compute})
        path, _ = written(made, carrier, tmp_path)
        large = [t for t in onnx.load(path).graph.initializer if np.prod(t.dims) >= 48 * 32]
        assert [t.name for t in large] == ["table"]
        weight = codes.dequantize().numpy()
        rows = np.array([3, 0, 47])
        got = made.open(path).run({"i": rows})
        assert worst(got, {"y": weight[rows] @ weight.T}) < 1e-5


def test_two_products_with_one_weight_share_it(tmp_path: Path) -> None:
    body = "g (float[n, 64] x) => (float[n, 64] y) { a = MatMul(x, w) y = MatMul(a, w) }"
    carrier, codes = coded(graph(body, {"w": noise(64, 64)}), group(4, 16, **UNSIGNED))
    path, operators = written(OnnxExporter(), carrier, tmp_path)
    assert operators == ["MatMulNBits"] * 2
    assert [t.name for t in onnx.load(path).graph.initializer] == ["w", "w_scale", "w_zero_point"]
    weight = codes.dequantize().numpy().T
    got = OnnxExporter().open(path).run(BATCH)
    assert worst(got, {"y": BATCH["x"] @ weight @ weight}) < 1e-5


@pytest.mark.parametrize("scheme", [group(4, 32), Scheme(8), group(2, 32), NVFP4], ids=str)
def test_half_precision(scheme: Scheme, tmp_path: Path) -> None:
    kept = scheme if scheme.element == "e2m1" else replace(scheme, scale_type="float16")
    carrier, wanted = product("linear", kept, np.float16)
    path, _ = written(OnnxExporter(), carrier, tmp_path)
    assert error(OnnxExporter(), path, wanted, np.float16) < 2e-3
    assert len(folded(path)) <= 3  # the runtime may compute in float32, between two casts


def test_scales_across_the_columns_are_left_alone(tmp_path: Path) -> None:
    """A file of somebody else's may have its scales along another axis."""
    body = """g (float[n, 64] x) => (float[n, 48] y) {
        w = DequantizeLinear<axis = 0>(codes, scale) y = MatMul(x, w)
    }"""
    codes = np.random.default_rng(0).integers(-8, 8, (64, 48)).astype(ml_dtypes.int4)
    scale = np.abs(noise(64)) + 0.1
    carrier = graph(body, {"codes": codes, "scale": scale})
    made = OnnxExporter()
    path, operators = written(made, carrier, tmp_path)
    assert "MatMulNBits" not in operators
    assert error(made, path, BATCH["x"] @ (codes.astype(np.float32) * scale[:, None])) < 1e-5


def test_groups_that_do_not_divide_are_left_alone(tmp_path: Path) -> None:
    body = """g (float[n, 50] x) => (float[n, 48] y) {
        w = DequantizeLinear<axis = 0, block_size = 24>(codes, scale) y = MatMul(x, w)
    }"""
    codes = np.random.default_rng(0).integers(-8, 8, (50, 48)).astype(np.int8)
    scale = np.abs(noise(3, 48)) + 0.1
    made = OnnxExporter()
    _, operators = written(made, graph(body, {"codes": codes, "scale": scale}), tmp_path)
    assert operators == ["DequantizeLinear", "MatMul"]


def test_a_last_group_that_is_not_full_is_packed(tmp_path: Path) -> None:
    body = """g (float[n, 600] x) => (float[n, 9] y) {
        w = DequantizeLinear<axis = 0, block_size = 512>(codes, scale) y = MatMul(x, w)
    }"""
    codes = np.random.default_rng(0).integers(-8, 8, (600, 9)).astype(ml_dtypes.int4)
    scale = np.abs(noise(2, 9)) + 0.1
    made = OnnxExporter()
    path, operators = written(made, graph(body, {"codes": codes, "scale": scale}), tmp_path)
    assert operators == ["MatMulNBits"]
    x = noise(3, 600)
    wanted = x @ (codes.astype(np.float32) * np.repeat(scale, 512, 0)[:600])
    assert worst(made.open(path).run({"x": x}), {"y": wanted}) < 1e-5


@pytest.mark.parametrize("external", ["never", "always"])
def test_packed_weights_beside_the_model(external: Any, tmp_path: Path) -> None:
    body = "g (float[n, 256] x) => (float[n, 300] y) { y = MatMul(x, w) }"
    carrier, codes = coded(graph(body, {"w": noise(256, 300)}), group(4, 128, narrow=False))
    made = OnnxExporter(external_data=external)
    path, _ = written(made, carrier, tmp_path)
    sizes = sum(f.stat().st_size for f in tmp_path.iterdir())
    assert abs(made.predict(carrier) - sizes) <= 32
    assert len(list(tmp_path.iterdir())) == 1 + (external == "always")
    x = noise(3, 256)
    wanted = x @ codes.dequantize().numpy().T
    assert worst(made.open(path).run({"x": x}), {"y": wanted}) < 1e-5


def test_nothing_is_evaluated_for_a_plan() -> None:
    def never(_: torch.Tensor) -> QuantizedTensor:
        raise AssertionError("evaluated")

    for scheme in (group(4, 32), group(2, 16, **UNSIGNED), Scheme(8), MXFP4, NVFP4):
        carrier = graph(text("linear"), {"fc.weight": noise(48, 64)})
        (layer,) = carrier.layers()
        planned = carrier.with_codes({"fc.weight": WeightCodes(layer, scheme, never)})
        for made in (OnnxExporter(), OnnxExporter(target="tensorrt", opset=23)):
            if scheme.symmetric or made.target == "ort-cpu":
                made.check(planned)
                assert made.predict(planned) > 0


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_written_file_is_read_as_what_it_is(scheme: Scheme, tmp_path: Path) -> None:
    path, _ = written(OnnxExporter(), product("linear", scheme)[0], tmp_path)
    opened = open_onnx(path, 21)
    assert parameters(opened.graph()) == 48 * 64
    assert macs(opened.graph()) == 48 * 64
    assert worst(opened.runner().run(BATCH), OnnxExporter().open(path).run(BATCH)) < 1e-5


@pytest.mark.parametrize("opset", [17, 25])
def test_blocks_go_into_any_opset(opset: int, tmp_path: Path) -> None:
    for scheme in (group(4, 32), group(2, 32), Scheme(8)):
        carrier, wanted = product("linear", scheme)
        made = OnnxExporter(opset=opset)
        path, _ = written(made, carrier, tmp_path)
        assert {o.domain: o.version for o in onnx.load(path).opset_import}[""] == opset
        assert error(made, path, wanted) < 1e-5


def test_what_an_opset_lacks_is_said_of_the_layer() -> None:
    carrier, _ = product("linear", Scheme(8, element="e4m3"))
    with pytest.raises(SpecError, match=r"layer 'fc': .*float8e4m3fn; set opset: 19"):
        OnnxExporter(opset=18).check(carrier)


BEHIND = {
    "direct": "y = MatMul(d, t)",
    "reshaped": "r = Reshape(d, shape) y = MatMul(r, t)",
}


@pytest.mark.parametrize("case", BEHIND)
def test_products_of_two_quantized_values_stay(case: str, tmp_path: Path) -> None:
    body = f"""g (float[n, 64] x) => (float[n, 48] y) {{
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
        t = Transpose<perm = [1, 0]>(fc.weight) {BEHIND[case]}
    }}"""
    weights = {
        "fc.weight": noise(48, 64),
        "s": np.array(0.03, np.float32),
        "z": np.array(0, np.int8),
        "shape": np.array([-1, 64]),
    }
    if case == "direct":
        del weights["shape"]
    carrier, _ = coded(graph(body, weights), Scheme(8))
    _, operators = written(OnnxExporter(), carrier, tmp_path)
    assert operators.count("DequantizeLinear") == 2
    assert "MatMul" in operators
