"""Tables of embeddings: rows are looked up in codes, and only those become floats."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

import compressor
from compressor.exporters.onnx.exporter import OnnxExporter
from compressor.exporters.safetensors.exporter import SafetensorsExporter
from compressor.graph.costs import layer_bytes
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.dynamic import QuantizeDynamic
from compressor.passes.quantize.static.options import StaticRule
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.carrier import Carrier
from compressor.types.exporter import USUAL
from compressor.types.passes import PassContext
from tests.compressor.passes.quantize.small_models import (
    file_bytes,
    float_weights,
    graph,
    noise,
    ops,
    parity_db,
)
from tests.compressor.passes.quantize.static_models import statistics

WORDS, WIDTH, PLACES = 1100, 64, 16
ORT = PassContext(targets=frozenset({"ort-cpu"}))
STEPS = pytest.mark.parametrize("step", [QuantizeDynamic(), QuantizeStatic()])
TIED = {
    "turned": "t = Transpose<perm = [1, 0]>(embed.weight) y = MatMul(f, t)",
    "gemm": "y = Gemm<transB = 1>(f, embed.weight)",
}


@cache
def network(head: str = "y = MatMul(f, head.weight)") -> Carrier:
    """Words and places are looked up, normalized and multiplied."""
    text = f"""g (int64[n] i, int64[n] p) => (float[n, m] y) {{
        w = Gather(embed.weight, i) q = Gather(place.weight, p) s = Add(w, q)
        x = LayerNormalization(s, gain) f = MatMul(x, fc.weight) {head}
    }}"""
    weights = {
        "embed.weight": noise(WORDS, WIDTH) * np.exp(noise(WORDS, 1, seed=1)),
        "place.weight": noise(PLACES, WIDTH, seed=2),
        "gain": np.ones(WIDTH, np.float32),
        "fc.weight": noise(WIDTH, WIDTH, seed=3),
    }
    if "head.weight" in head:
        weights["head.weight"] = noise(WIDTH, 8, seed=4)
    return graph(text, weights)


def words(seed: int = 0, count: int = 9) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {"i": random.integers(0, WORDS, count), "p": random.integers(0, PLACES, count)}


def applied(step: QuantizeDynamic | QuantizeStatic, carrier: Carrier, targets: str = "ort-cpu"):
    context = PassContext(targets=frozenset({targets}))
    observed = {}
    if isinstance(step, QuantizeStatic):
        observed = statistics(step, carrier, context, [words(seed) for seed in range(1, 5)])
    return step.apply(carrier, context, observed)


def element(carrier: Carrier, name: str) -> ir.DataType | None:
    return carrier.graph().graph.initializers[name].dtype


@STEPS
def test_a_large_table_is_stored_as_int8_and_a_small_one_stays(step) -> None:
    source = network()
    rows = {row.name: row for row in step.survey(source, ORT).layers}
    assert rows["embed"].touched
    assert rows["embed"].action == "int8/channel"
    assert rows["place"].reason == (
        "a table below 65,536 weights stays; quantize-weights stores it with embeddings: true"
    )
    outcome = applied(step, source)
    quantized = outcome.carrier
    assert element(quantized, "embed.weight") == ir.DataType.INT8
    assert float_weights(quantized) == ["place.weight"]
    assert file_bytes(quantized) < 0.31 * file_bytes(source)
    assert parity_db(source, quantized, words()) > 32
    (layer,) = (layer for layer in outcome.layers if layer.name == "embed")
    assert layer.weight_sqnr_db > 40  # a scale a row; one for all would be 27
    assert layer_bytes(quantized)["embed"] == WORDS * (WIDTH + 4)


@STEPS
def test_only_rows_in_use_become_floats(step) -> None:
    quantized = applied(step, network()).carrier
    table = quantized.graph().graph.initializers["embed.weight"]
    assert [use.node.op_type for use in table.uses()] == ["Gather"]


@STEPS
@pytest.mark.parametrize("tie", TIED)
def test_a_table_that_is_multiplied_too_is_stored_once(step, tie: str) -> None:
    source = network(TIED[tie])
    quantized = applied(step, source).carrier
    assert element(quantized, "embed.weight") == ir.DataType.INT8
    assert float_weights(quantized) == ["place.weight"]
    assert parity_db(source, quantized, words()) > 30
    assert ops(quantized).count("MatMulInteger") == 2 * isinstance(step, QuantizeDynamic)


@STEPS
@pytest.mark.parametrize("tie", ["y = MatMul(f, head.weight)", *TIED.values()])
@pytest.mark.parametrize("target", ["ort-cpu", "openvino"])
def test_artifacts_give_what_the_model_gives(step, tie: str, target: str, tmp_path: Path) -> None:
    source = Fuse().apply(network(tie), ORT, {}).carrier
    quantized = applied(step, source, target).carrier
    exporter = OnnxExporter(target=target)  # type: ignore[arg-type]
    (path,) = exporter.write(quantized, tmp_path, USUAL)
    assert path.stat().st_size < 0.4 * file_bytes(source)
    batch = words()
    wanted = source.runner().run(batch)["y"]
    given = {"onnx": exporter.open(path).run(batch)["y"]}
    SafetensorsExporter().write(quantized, tmp_path, USUAL)
    with torch.no_grad():
        loaded = compressor.load(tmp_path)(**{n: torch.from_numpy(a) for n, a in batch.items()})
    given["safetensors"] = (loaded["y"] if isinstance(loaded, dict) else loaded).numpy()
    for name, values in given.items():
        error = np.square(values - wanted).sum()
        assert 10 * np.log10(np.square(wanted).sum() / error) > 30, name


@STEPS
def test_fusion_leaves_the_codes(step) -> None:
    quantized = applied(step, network()).carrier
    fused = Fuse().apply(quantized, ORT, {}).carrier
    assert element(fused, "embed.weight") == ir.DataType.INT8
    assert parity_db(quantized, fused, words()) > 80


def test_tables_are_kept_for_tensorrt_and_by_rules() -> None:
    source = network()
    tensorrt = PassContext(targets=frozenset({"tensorrt"}))
    rows = {row.name: row.reason for row in QuantizeStatic().survey(source, tensorrt).layers}
    assert rows["embed"] == "a table is looked up, not multiplied"
    step = QuantizeStatic(layers=(StaticRule(match="embed", skip=True),))
    rows = {row.name: row.reason for row in step.survey(source, ORT).layers}
    assert rows["embed"] == "skipped by the rule 'embed'"


def test_a_layer_that_reads_rows_of_a_table_is_integer() -> None:
    text = """g (int64[n] i, int64[n] p) => (float[n, 8] y) {
        x = Gather(embed.weight, i) y = MatMul(x, fc.weight)
    }"""
    weights = {"embed.weight": noise(WORDS, WIDTH), "fc.weight": noise(WIDTH, 8, seed=3)}
    source = graph(text, weights)
    quantized = applied(QuantizeStatic(layers=(StaticRule(match="*"),)), source).carrier
    assert not float_weights(quantized)
    assert "QuantizeLinear" in ops(quantized)
    assert parity_db(source, quantized, words()) > 25  # of 36 words in calibration
