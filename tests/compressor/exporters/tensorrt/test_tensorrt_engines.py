"""Real engines of small networks: each type is built as the graph says, and the same twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from compressor.calibration.collect import collect_statistics
from compressor.errors import ArtifactError, SpecError
from compressor.files import file_sha256
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.quantize.cast.cast import Cast
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from tests.compressor.exporters.hand_made import CONTEXT, Builder, entry, quantized, sample
from tests.compressor.exporters.tensorrt.engines import (
    Between,
    addresses_can_be_fixed,
    built,
    computed,
    convolution,
    exporter,
    needs_rtx,
)
from tests.compressor.passes.quantize.small_models import graph, noise

pytestmark = needs_rtx
SLOW = pytest.mark.slow

FP8, INT4 = ir.DataType.FLOAT8E4M3FN, ir.DataType.INT4
CONTEXT_OF_PASSES = PassContext(0, frozenset({"tensorrt"}), None)


def precisions(manifest: dict[str, Any]) -> set[str]:
    products = ("correlation", "gemm", "runtime_fusion")
    return {row["precision"] for row in manifest["layers"] if row["type"] in products}


def test_floats_of_each_width(tmp_path: Path) -> None:
    sizes: dict[str, int] = {}
    made_of = {"float32": sample("digits")}
    for name, step in (("float16", Cast()), ("bfloat16", Cast(dtype="bf16"))):
        made_of[name] = step.apply(sample("digits"), CONTEXT_OF_PASSES, {}).carrier
    for name, carrier in made_of.items():
        folder = tmp_path / name
        folder.mkdir()
        made = exporter("8.6")
        manifest = built(made, carrier, folder)
        assert precisions(manifest) >= {name}, name
        sizes[name] = sum(p.stat().st_size for p in folder.iterdir())
        # Small models are predicted by building them, so only the manifest's text may differ.
        assert made.predict(carrier) == pytest.approx(sizes[name], rel=0.01)
        assert made.check_written(carrier, folder / "model.engine").startswith("the engine of")
    assert max(sizes["float16"], sizes["bfloat16"]) < sizes["float32"]


@pytest.mark.parametrize(
    ("name", "carrier", "target", "type_"),
    [
        ("int8", quantized(), "8.6", "int8"),
        ("fp8", quantized(FP8, FP8), "8.9", "fp8"),
        ("int8 bias", quantized(integer_bias=True), "8.6", "int8"),
        (
            "uint8 around 128",
            quantized(activations=ir.DataType.UINT8, activation_zero=128),
            "8.6",
            "int8",
        ),
    ],
)
def test_codes_are_computed_with(
    name: str, carrier: Carrier, target: str, type_: str, tmp_path: Path
) -> None:
    made = exporter(target)
    manifest = built(made, carrier, tmp_path)
    assert computed(manifest) == {"first": type_, "second": type_}
    assert manifest["compute_capabilities"] == [target]
    said = made.check_written(carrier, tmp_path / "model.engine")
    assert said.endswith(f"TensorRT reports all 2 quantized layers in {type_}")


def test_four_bit_weights_stay_four_bits(tmp_path: Path) -> None:
    manifest = built(exporter("8.6"), quantized(INT4, None, blocks=True), tmp_path)
    assert [row["meant"] for row in manifest["quantized"]] == [None, None]
    held = [c for row in manifest["layers"] for c in row["constants"] if c.startswith("int4")]
    assert held == ["int4[64, 512]", "int4[512, 10]"]


def test_bfloat16_of_a_foreign_graph(tmp_path: Path) -> None:
    made, x = Builder(), entry()
    half = made.node("Cast", [x], "half", to=int(ir.DataType.BFLOAT16))
    weight = np.random.default_rng(0).standard_normal((64, 10)).astype(ml_dtypes.bfloat16)
    product = made.node("MatMul", [half, made.constant("fc.weight", weight)], "product")
    result = made.node("Cast", [product], "y", to=int(ir.DataType.FLOAT))
    carrier = OnnxCarrier(made.model([x], result))
    manifest = built(exporter("8.6"), carrier, tmp_path)
    assert any("bfloat16[64, 10]" in row["constants"] for row in manifest["layers"])
    with pytest.raises(SpecError, match=r"'fc'.*is bfloat16, which GPUs .* 7\.5 do not support"):
        exporter("7.5").check(carrier)


@pytest.mark.parametrize("batch", [4, pytest.param("batch", marks=SLOW)])
def test_two_builds_give_the_same_bytes(batch: int | str, tmp_path: Path) -> None:
    if batch == "batch" and not addresses_can_be_fixed():
        pytest.skip("this system does not let a process fix its addresses")
    carrier = sample("resnet") if batch == "batch" else convolution(batch=batch)
    hashes = set()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        engine, manifest = exporter("8.6").write(carrier, tmp_path / name, CONTEXT)
        hashes.add((file_sha256(engine), file_sha256(manifest)))
    assert len(hashes) == 1


def test_the_manifest_says_what_the_engine_is_of(tmp_path: Path) -> None:
    manifest = built(exporter("8.6", "8.9"), quantized(), tmp_path)
    assert manifest["engine"]["sha256"] == file_sha256(tmp_path / "model.engine")
    assert manifest["engine"]["bytes"] == (tmp_path / "model.engine").stat().st_size
    assert manifest["name"], manifest["spec"] == (CONTEXT.name, CONTEXT.spec_digest)
    assert list(manifest["onnx"]) == ["model.onnx"]
    assert len(manifest["onnx"]["model.onnx"]) == 64
    assert manifest["compute_capabilities"] == ["8.6", "8.9"]
    assert manifest["profiles"] == {"x": {"min": [1, 64], "opt": [8, 64], "max": [64, 64]}}
    assert manifest["inputs"] == ["x float32[batch, 64]"]
    assert manifest["builder"] == "rtx"
    assert set(manifest["versions"]) == {"tensorrt-rtx"}
    assert str(tmp_path) not in (tmp_path / "model.engine.json").read_text()


@pytest.mark.parametrize(
    ("between", "groups"),
    [
        ("", 1),
        ("MaxPool", 16),
        *(pytest.param(*own, marks=SLOW) for own in (("", 16), ("MaxPool", 1))),
    ],
)
def test_convolutions_in_int8(groups: int, between: Between, tmp_path: Path) -> None:
    manifest = built(exporter("8.6"), convolution(between, groups=groups), tmp_path)
    assert computed(manifest) == {"conv": "int8"}


BROKEN: list[dict[str, Any]] = [{"between": "Relu"}, {"axis": 1}]
BROKEN_TOO: list[dict[str, Any]] = [
    {"between": "Sigmoid"},
    {"between": "AveragePool"},
    {"between": "Concat"},
    {"scaled": True},
]


@pytest.mark.parametrize(
    "options", [*BROKEN, *(pytest.param(options, marks=SLOW) for options in BROKEN_TOO)]
)
def test_a_broken_placement_is_an_error(options: dict[str, Any], tmp_path: Path) -> None:
    message = r"'conv' in float32, not in int8; leave .* QuantizeLinear and DequantizeLinear must"
    with pytest.raises(ArtifactError, match=message):
        exporter("8.6").check(convolution(**options))
    with pytest.raises(ArtifactError, match=message):
        exporter("8.6").write(convolution(**options), tmp_path, CONTEXT)
    assert list(tmp_path.iterdir()) == []


def test_layers_that_a_builder_has_no_integer_kernel_for_stay_floats(tmp_path: Path) -> None:
    text = """up (float[N, 4, 6, 6] x) => (float[N, 4, 10, 10] y) {
        h = Conv<kernel_shape = [3, 3]>(x, conv.weight)
        y = ConvTranspose<kernel_shape = [4, 4], strides = [2, 2]>(h, up.weight)
    }"""
    weights = {"conv.weight": noise(8, 4, 3, 3), "up.weight": noise(8, 4, 4, 4)}
    network, step = graph(text, weights), QuantizeStatic()

    def context(builder: str) -> PassContext:
        return PassContext(0, exporter(builder=builder).targets, None)

    def kept(builder: str) -> dict[str, str]:
        rows = step.survey(network, context(builder)).layers
        return {row.name: row.reason for row in rows if not row.touched}

    assert kept("gpu") == {}
    assert kept("rtx") == {"up": "TensorRT-RTX has no integer kernel for it"}
    requests = step.survey(network, context("rtx")).requests
    statistics = collect_statistics(network, [{"x": noise(8, 4, 6, 6)}], requests)
    outcome = step.apply(network, context("rtx"), statistics)
    assert computed(built(exporter("8.6"), outcome.carrier, tmp_path)) == {"conv": "int8"}


def test_a_product_that_is_cast_before_it_is_found(tmp_path: Path) -> None:
    """TensorRT-RTX then fuses the cast, so that the fused layer does read int8."""
    made, x = Builder(), entry()
    scale, zero = made.constant("scale", np.float32(0.05)), made.constant("zero", np.int8(0))
    codes = made.node("QuantizeLinear", [x, scale, zero], "codes")
    value = made.node("DequantizeLinear", [codes, scale, zero], "dequantized")
    random = np.random.default_rng(0)
    weight = made.constant("fc.weight", random.integers(-127, 128, (64, 64)).astype(np.int8))
    scales = made.constant("fc.scale", random.uniform(0.01, 0.02, 64).astype(np.float32))
    read = made.node("DequantizeLinear", [weight, scales], "weight", axis=0)
    model = made.model([x], made.node("MatMul", [value, read], "product"), 64)
    with pytest.raises(ArtifactError, match="computes layer 'fc' in float32, not in int8"):
        exporter("8.6").write(OnnxCarrier(model), tmp_path, CONTEXT)


def test_weights_alone_are_not_taken_for_a_broken_placement(tmp_path: Path) -> None:
    manifest = built(exporter("8.6"), convolution(activations=False), tmp_path)
    assert computed(manifest) == {"conv": "float32"}
    assert manifest["quantized"][0]["meant"] is None


@pytest.mark.usefixtures("no_gpu")
def test_an_engine_that_was_changed_is_refused(tmp_path: Path) -> None:
    made = exporter("8.6")
    path = made.write(quantized(), tmp_path, CONTEXT)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ArtifactError, match=r"does not match model\.engine\.json"):
        made.check_written(quantized(), path)
    with pytest.raises(ArtifactError, match=r"cannot be run; .*has none"):
        made.open(path)
