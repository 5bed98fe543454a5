"""Weights of recurrent layers, as codes and in ONNX Runtime's integer LSTM."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

import compressor
from compressor.exporters.onnx.exporter import OnnxExporter
from compressor.exporters.safetensors.exporter import SafetensorsExporter
from compressor.graph.costs import layer_bytes, parameters
from compressor.lab.inspect.graph import inspect_onnx
from compressor.models.torch.carrier import open_module
from compressor.passes.factor.low_rank import LowRank
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.prune.magnitude.magnitude import PruneMagnitude
from compressor.passes.quantize.cast.cast import Cast
from compressor.passes.quantize.dynamic import DynamicWeights, QuantizeDynamic
from compressor.passes.quantize.static.options import StaticRule
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.progress import Silent
from compressor.types.carrier import Carrier
from compressor.types.exporter import USUAL
from compressor.types.passes import LayerRule, Pass, PassContext
from compressor.types.tensors import TensorSpec
from tests.compressor.passes.quantize.small_models import (
    file_bytes,
    float_weights,
    graph,
    noise,
    ops,
    parity_db,
)
from tests.compressor.passes.quantize.static_models import statistics

ENTRY, HIDDEN, TIME, BATCH = 24, 64, 7, 3
FEW = 32  # units that ONNX Runtime's integer LSTM is slower with
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
PLAIN = PassContext()
ORT = PassContext(targets=frozenset({"ort-cpu"}))
OPENVINO = PassContext(targets=frozenset({"openvino"}))


@cache
def network(kind: str, directions: int = 1, width: int = HIDDEN) -> Carrier:
    """A recurrent layer and a linear one behind it."""
    rows = GATES[kind] * width
    way = "bidirectional" if directions == 2 else "forward"
    state = f"float[t, {directions}, n, {width}] y"
    text = f"""g (float[t, n, {ENTRY}] x) => ({state}, float[n, 5] z) {{
        y, h = {kind}<hidden_size = {width}, direction = "{way}">(x, cell.w, cell.r, cell.b)
        first = Constant<value = int64 {{0}}>()
        last = Gather<axis = 0>(h, first)
        z = MatMul(last, fc.weight)
    }}"""
    weights = {
        "cell.w": noise(directions, rows, ENTRY) * ENTRY**-0.5,
        "cell.r": noise(directions, rows, width, seed=1) * width**-0.5,
        "cell.b": noise(directions, 2 * rows, seed=2) * 0.1,
        "fc.weight": noise(width, 5, seed=3),
    }
    return graph(text, weights)


def sequences() -> dict[str, np.ndarray]:
    return {"x": noise(TIME, BATCH, ENTRY, seed=9)}


def applied(step: Pass, carrier: Carrier, context: PassContext = ORT) -> Carrier:
    return step.apply(carrier, context, {}).carrier  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(
    ("step", "context"),
    [
        (QuantizeDynamic(), ORT),
        (QuantizeDynamic(weights=DynamicWeights(granularity="tensor")), ORT),
        (QuantizeDynamic(weights=DynamicWeights(bits=7)), OPENVINO),
        (QuantizeWeights(bits=8), ORT),
        (QuantizeWeights(bits=8, group=8, symmetric=False), OPENVINO),
    ],
)
def test_weights_are_codes_in_every_artifact(
    step: Pass, context: PassContext, kind: str, directions: int, tmp_path: Path
) -> None:
    source, batch = network(kind, directions), sequences()
    quantized = applied(step, source, context)
    initializers = quantized.graph().graph.initializers
    assert {initializers[n].dtype for n in ("cell.w", "cell.r")} <= {
        ir.DataType.INT8,
        ir.DataType.UINT8,
    }
    assert parity_db(source, quantized, batch) > 28
    (target,) = context.targets
    exporter = OnnxExporter(target=target)  # type: ignore[arg-type]
    (path,) = exporter.write(quantized, tmp_path, USUAL)
    outputs, wanted = exporter.open(path).run(batch), quantized.runner().run(batch)
    for name, values in wanted.items():
        np.testing.assert_allclose(outputs[name], values, atol=2e-5)
    SafetensorsExporter().write(quantized, tmp_path, USUAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ONNX Runtime runs its own operators
        loaded = compressor.load(tmp_path)
    with torch.no_grad():
        reloaded = loaded(torch.from_numpy(batch["x"]))
    for value, name in zip(reloaded, wanted, strict=True):
        tensor = reloaded[name] if isinstance(reloaded, dict) else value
        np.testing.assert_allclose(tensor.numpy(), wanted[name], atol=2e-5)


def test_an_lstm_shrinks_to_a_quarter() -> None:
    source = network("LSTM", 2, 128)
    for context in (ORT, OPENVINO):
        assert file_bytes(applied(QuantizeDynamic(), source, context)) < 0.3 * file_bytes(source)


@pytest.mark.parametrize(
    ("context", "operator"), [(ORT, "DynamicQuantizeLSTM"), (OPENVINO, "LSTM"), (PLAIN, "LSTM")]
)
def test_an_lstm_is_integer_where_the_target_has_it(context: PassContext, operator: str) -> None:
    quantized = applied(QuantizeDynamic(), network("LSTM"), context)
    assert ops(quantized)[-3:].count("MatMul") == 0
    assert operator in ops(quantized)
    plan = {row.name: row.action for row in QuantizeDynamic().survey(network("LSTM"), ORT).layers}
    assert set(plan.values()) == {"int8/channel dynamic"}
    plan = {row.name: row.action for row in QuantizeDynamic().survey(network("GRU"), ORT).layers}
    assert plan["cell.w"] == plan["cell.r"] == "int8/channel"


@pytest.mark.parametrize(
    ("context", "width", "operator"),
    [
        (ORT, HIDDEN, "DynamicQuantizeLSTM"),
        (ORT, FEW, "LSTM"),
        (PLAIN, HIDDEN, "LSTM"),
    ],
)
def test_quantize_static_makes_large_lstms_integer(
    context: PassContext, width: int, operator: str
) -> None:
    source, step = network("LSTM", 2, width), QuantizeStatic()
    made = step.apply(source, context, statistics(step, source, context, [sequences()]))
    assert operator in ops(made.carrier)
    assert {"cell.w", "cell.r"}.isdisjoint(float_weights(made.carrier))
    assert parity_db(source, made.carrier, sequences()) > 28
    integer = operator != "LSTM"
    rows = {row.name: row.action for row in step.survey(source, context).layers}
    assert rows["cell.w"] == rows["cell.r"] == "int8/channel" + " dynamic" * integer
    assert {row.name for row in made.layers} == {"cell.w", "cell.r", "fc"}
    assert all(row.weight_sqnr_db is None or row.weight_sqnr_db > 35 for row in made.layers)


def test_quantize_static_keeps_an_lstm_beside_integers_for_openvino() -> None:
    """It reads the weights of recurrent layers as constants once activations are codes."""
    source, step = network("LSTM", 2), QuantizeStatic()
    made = step.apply(source, OPENVINO, statistics(step, source, OPENVINO, [sequences()]))
    assert {"cell.w", "cell.r"} <= set(float_weights(made.carrier))
    assert {row.name for row in made.layers} == {"fc"}


def test_quantize_static_keeps_an_lstm_that_a_rule_changes() -> None:
    source = network("LSTM", 1, 64)
    for rule in (StaticRule(match="cell.w", bits=4), StaticRule(match="cell.r", skip=True)):
        step = QuantizeStatic(layers=(rule,))
        made = step.apply(source, ORT, statistics(step, source, ORT, [sequences()]))
        assert "LSTM" in ops(made.carrier)


def test_an_lstm_of_few_units_is_faster_as_floats() -> None:
    source = network("LSTM", 2, FEW)
    quantized = applied(QuantizeDynamic(), source)
    assert "LSTM" in ops(quantized)
    assert {"cell.w", "cell.r"}.isdisjoint(float_weights(quantized))
    plan = {row.name: row.action for row in QuantizeDynamic().survey(source, ORT).layers}
    assert plan["cell.w"] == plan["cell.r"] == "int8/channel"


def test_an_lstm_of_which_one_weight_is_skipped_stays_of_floats() -> None:
    step = QuantizeDynamic(layers=(LayerRule(match="cell.w", skip=True),))
    quantized = applied(step, network("LSTM"))
    assert "LSTM" in ops(quantized)
    assert float_weights(quantized) == ["cell.w", "cell.b"]
    assert parity_db(network("LSTM"), quantized, sequences()) > 28


FULL = """g (float[t, n, 24] x, int32[n] lengths, float[1, n, 64] h, float[1, n, 64] c)
    => (float[t, 1, n, 64] y, float[1, n, 64] z) {
    y, a, b = LSTM<hidden_size = 64, clip = 3.0, input_forget = 1>(x, w, r, b0, lengths, h, c, p)
    u, z = LSTM<hidden_size = 64>(x, w, r)
}"""


def test_states_lengths_peepholes_and_shared_weights() -> None:
    weights = {
        "w": noise(1, 256, 24) * 0.2,
        "r": noise(1, 256, 64, seed=1) * 0.15,
        "b0": noise(1, 512, seed=2) * 0.1,
        "p": noise(1, 192, seed=3) * 0.1,
    }
    source = graph(FULL, weights)
    batch = {
        "x": noise(7, 3, 24, seed=4),
        "lengths": np.array([7, 2, 5], np.int32),
        "h": noise(1, 3, 64, seed=5),
        "c": noise(1, 3, 64, seed=6),
    }
    quantized = applied(QuantizeDynamic(), source)
    assert ops(quantized) == ["DynamicQuantizeLSTM"] * 2
    assert parity_db(source, quantized, batch) > 28


def test_a_weight_that_something_else_reads_keeps_the_lstm() -> None:
    text = """g (float[t, n, 24] x) => (float[1, n, 64] y, float[1, 256, 24] v) {
        u, y = LSTM<hidden_size = 64>(x, w, r) v = Abs(w)
    }"""
    source = graph(text, {"w": noise(1, 256, 24) * 0.2, "r": noise(1, 256, 64, seed=1) * 0.15})
    quantized = applied(QuantizeDynamic(), source)
    assert "LSTM" in ops(quantized)
    assert not float_weights(quantized)
    assert parity_db(source, quantized, sequences()) > 28


@pytest.mark.parametrize("context", [ORT, OPENVINO])
def test_fusion_leaves_the_codes(context: PassContext) -> None:
    quantized = applied(QuantizeDynamic(), network("LSTM", 2), context)
    fused = applied(Fuse(), quantized)
    for name in ("cell.w", "cell.r"):
        assert fused.graph().graph.initializers[name].dtype == ir.DataType.INT8
    assert parity_db(quantized, fused, sequences()) > 80


def test_the_plan_predicts_the_bytes_of_the_codes() -> None:
    for context in (ORT, OPENVINO):
        preview = QuantizeDynamic().preview(network("LSTM"), context, {})
        rows = GATES["LSTM"] * HIDDEN
        assert layer_bytes(preview)["cell.w"] == rows * (ENTRY + 4)


def test_other_passes_say_that_they_keep_them() -> None:
    source = network("LSTM")
    steps = (PruneMagnitude(sparsity=0.5), LowRank(energy=0.5))
    for step in steps:
        rows = {row.name: row.reason for row in step.survey(source, PLAIN).layers}
        assert "the weight of a recurrent layer" in rows["cell.w"]
    context = PassContext(targets=frozenset({"tensorrt"}))
    rows = {r.name: r.reason for r in QuantizeWeights(bits=8).survey(source, context).layers}
    assert rows["cell.r"] == "TensorRT reads weights of recurrent layers as floats only"


def test_narrow_weights_are_stored_so() -> None:
    source = network("GRU", 2)
    narrow = applied(Cast(dtype="fp16", weights_only=True), source)
    assert narrow.graph().graph.initializers["cell.w"].dtype == ir.DataType.FLOAT16
    assert parity_db(source, narrow, sequences()) > 55


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.LSTM(8, 64, batch_first=True)
        self.head = torch.nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.cell(x)[0])
        return result


def test_weights_of_a_module_are_stored_once_fuse_has_computed_them() -> None:
    torch.manual_seed(0)
    module = open_module(Recurrent, {}, [TensorSpec("x", ("n", 5, 8), "float32")], "m")
    note = "weights computed as the model runs stay floats: 1 LSTM; put fuse before this pass"
    for step in (QuantizeDynamic(), QuantizeWeights(bits=8)):
        assert note in step.survey(module, ORT).notes
    fused = applied(Fuse(), module)
    assert QuantizeDynamic().survey(fused, ORT).notes == ()
    quantized = applied(QuantizeDynamic(), fused)
    assert "DynamicQuantizeLSTM" in ops(quantized)
    assert parity_db(module, quantized, {"x": noise(3, 5, 8)}) > 35


def test_what_is_inspected_says_that_weights_are_codes(tmp_path: Path) -> None:
    for number, kind in enumerate(("LSTM", "GRU")):
        quantized = applied(QuantizeDynamic(), network(kind, 2))
        folder = tmp_path / str(number)
        folder.mkdir()
        (path,) = OnnxExporter().write(quantized, folder, USUAL)
        contents = inspect_onnx(path, Silent())
        rows = {row.name: row.quantization for row in contents.tensors}
        assert rows["cell.w"] == rows["cell.r"] == "int8"
        assert contents.parameters == parameters(network(kind, 2).graph())
