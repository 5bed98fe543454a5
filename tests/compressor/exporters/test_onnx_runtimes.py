"""The targets beside ONNX Runtime's CPU provider: what they take, and where files are opened."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import ArtifactError, ModelError, SpecError
from compressor.exporters import LitertExporter, OnnxExporter, SafetensorsExporter, TensorrtExporter
from compressor.models.onnx import runtimes as onnx_runtimes
from compressor.models.onnx.ort_session import OrtRunner, exact_products, products_are_exact
from compressor.models.onnx.runtimes import OpenVinoRunner, usable_providers
from compressor.models.threads import on_threads
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.cast.cast import Cast
from compressor.passes.quantize.static.placement import ORT_CPU, ORT_CUDA, TENSORRT, profile_for
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.run import execute
from compressor.types.carrier import Carrier
from compressor.types.exporter import Exporter
from compressor.types.passes import PassContext
from tests.compressor.exporters.hand_made import CONTEXT, images, quantized, rows, sample
from tests.compressor.passes.quantize.small_models import graph, noise
from tests.compressor.passes.quantize.static_models import statistics

OPENVINO = PassContext(0, frozenset({"openvino"}))
MULTIPLIED = ("Convolution", "FullyConnected", "MatMul")
MADE = OnnxExporter(target="openvino")


def written(carrier: Carrier, folder: Path, made: OnnxExporter = MADE) -> Path:
    made.check(carrier)
    return made.write(carrier, folder, CONTEXT)[0]


def worst(first: dict[str, Any], second: dict[str, Any]) -> float:
    pairs = zip(first.values(), second.values(), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


@pytest.mark.parametrize("name", ["digits", "cifar"])
def test_openvino_computes_the_same(name: str, tmp_path: Path) -> None:
    runner = MADE.open(written(sample(name), tmp_path))
    assert runner.runtime.startswith("openvino 20")
    assert worst(runner.run(images(name)), sample(name).runner().run(images(name))) < 1e-4
    first, again = (runner.run(images(name, count)) for count in (3, 3))
    kept = {key: value.copy() for key, value in first.items()}
    runner.run(images(name, 3))
    assert worst(first, kept) == worst(again, kept) == 0, "outputs are not written again"


@pytest.mark.parametrize("operator", ["Mul", "Add"])
def test_openvino_combines_a_value_with_itself(operator: str, tmp_path: Path) -> None:
    """In one kernel with a convolution of integers, it would give zeros."""
    given = graph(
        f"""g (float[N, 3, 8, 8] x) => (float[N, 4, 8, 8] y) {{
            a = Conv (x, w)
            y = {operator} (a, a)
        }}""",
        {"w": noise(4, 3, 1, 1)},
    )
    batches = [{"x": noise(8, 3, 8, 8, seed=seed)} for seed in range(2)]
    declared = QuantizeStatic()
    found = statistics(declared, given, OPENVINO, batches)
    carrier = declared.apply(given, OPENVINO, found).carrier
    runner = MADE.open(written(carrier, tmp_path))
    assert worst(runner.run(batches[0]), carrier.runner().run(batches[0])) < 0.05


@pytest.mark.parametrize("first", ["MatMul (x, first.weight)", "Relu (x)"])
def test_openvino_takes_recurrent_layers_beside_integers(first: str, tmp_path: Path) -> None:
    """It wants their weights as constants there, and takes codes where nothing is of integers."""
    given = graph(
        f"""g (float[5, N, 8] x) => (float[5, 1, N, 8] y) {{
            a = {first}
            y = LSTM <hidden_size = 8> (a, w, r)
        }}""",
        {"first.weight": noise(8, 8), "w": noise(1, 32, 8), "r": noise(1, 32, 8)},
    )
    batch = {"x": noise(5, 4, 8)}
    declared = QuantizeStatic.model_validate({"layers": [{"match": "*"}]}, strict=False)
    found = statistics(declared, given, OPENVINO, [batch])
    carrier = declared.apply(given, OPENVINO, found).carrier
    runner = MADE.open(written(carrier, tmp_path))
    assert worst(runner.run(batch), given.runner().run(batch)) < 0.05


@pytest.mark.parametrize("name", ["digits", pytest.param("cifar", marks=pytest.mark.slow)])
def test_all_products_are_of_integers_in_openvino(name: str, tmp_path: Path) -> None:
    fused = Fuse().apply(sample(name), OPENVINO, {}).carrier
    declared = QuantizeStatic()
    found = statistics(declared, fused, OPENVINO, [images(name, 16)])
    carrier = declared.apply(fused, OPENVINO, found).carrier
    runner = MADE.open(written(carrier, tmp_path))
    assert isinstance(runner, OpenVinoRunner)
    facts = (op.get_rt_info() for op in runner._model.get_runtime_model().get_ops())
    layers = [f for f in facts if "layerType" in f and f["layerType"].astype(str) in MULTIPLIED]
    assert {f["runtimePrecision"].astype(str) for f in layers} <= {"u8", "i8"}
    want = carrier.runner().run(images(name))
    assert worst(runner.run(images(name)), want) < 0.05  # a code next to a tie may be the other


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 8},
        {"bits": 4, "group": 16},
        {"bits": 4, "group": 16, "symmetric": False},
        {"bits": 3, "group": 16},
        {"format": "fp8-e4m3"},
    ],
)
def test_openvino_takes_narrow_weights_as_they_are(options: dict[str, Any], tmp_path: Path) -> None:
    declared = QuantizeWeights.model_validate(options)
    carrier = declared.apply(sample("digits"), OPENVINO, {}).carrier
    path = written(carrier, tmp_path)
    operators = {node.op_type for node in ir.load(path).graph}
    assert "DequantizeLinear" in operators
    assert "MatMulNBits" not in operators
    batch = images("digits")
    assert worst(MADE.open(path).run(batch), carrier.runner().run(batch)) < 1e-4


def test_openvino_refuses_what_it_has_no_form_for() -> None:
    with pytest.raises(SpecError, match="activations are int16, OpenVINO takes int8, uint8"):
        MADE.check(quantized(activations=ir.DataType.INT16))


def test_what_openvino_does_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\x00" * 64)
    with pytest.raises(ArtifactError, match=r"'model.onnx'.*OpenVINO 20.* does not load it"):
        MADE.open(tmp_path / "model.onnx")


# Processors without AVX-512 keep their stack, so that nothing is told there.
DROPPED = """
import os, sys, threading
from pathlib import Path
from compressor.models.onnx.runtimes import OpenVinoRunner
held = [OpenVinoRunner(Path(sys.argv[1]), "artifact")]
other = threading.Thread(target=held.clear)
other.start()
other.join()
try:
    os.kill(os.getpid(), 2)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_signal_arrives_once_another_thread_has_dropped_openvino(tmp_path: Path) -> None:
    path = written(sample("digits"), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", DROPPED, path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\n")


def test_threads_reach_openvino(tmp_path: Path) -> None:
    path = written(sample("digits"), tmp_path)
    with on_threads(1):
        runner = onnx_runtimes.OnnxRuntime("openvino").open(path, "artifact")
    assert isinstance(runner, OpenVinoRunner)
    assert runner.threads == 1


def test_a_wrong_input_is_told(tmp_path: Path) -> None:
    runner = MADE.open(written(sample("digits"), tmp_path))
    with pytest.raises(ModelError, match="does not run"):
        runner.run({"image": np.zeros((1, 7, 8, 8), np.float32)})


def test_without_openvino_times_are_not_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert MADE.not_judged == ""
    path = written(quantized(activation_zero=3), tmp_path)
    monkeypatch.setattr(onnx_runtimes, "find_spec", lambda _: None)
    assert MADE.not_judged.startswith("meant for OpenVINO, which is not installed")
    assert isinstance(MADE.open(path), OrtRunner)


@pytest.mark.skipif("cuda" in usable_providers(), reason="the CUDA provider starts here")
def test_without_a_gpu_its_provider_is_not_judged(tmp_path: Path) -> None:
    made = OnnxExporter(target="ort-cuda")
    assert made.not_judged.startswith("meant for ONNX Runtime's CUDA provider")
    path = written(quantized(activation_zero=3), tmp_path, made)
    with exact_products(True):
        want = quantized(activation_zero=3).runner().run(rows())
    assert worst(made.open(path).run(rows()), want) < 1e-4
    with pytest.raises(ModelError, match=r"CUDAExecutionProvider|CUDA"):
        OrtRunner(path, "artifact", provider="cuda")


def test_bfloat16_is_run_by_pytorch(tmp_path: Path) -> None:
    context = PassContext(0, frozenset({"tensorrt"}))
    carrier = Cast(dtype="bf16").apply(sample("digits"), context, {}).carrier
    made = OnnxExporter(target="tensorrt", opset=22)
    runner = made.open(written(carrier, tmp_path, made))
    assert runner.runtime.startswith("torch ")
    batch = images("digits")
    assert worst(runner.run(batch), carrier.runner().run(batch)) == 0
    assert worst(runner.run(batch), sample("digits").runner().run(batch)) < 0.05
    with pytest.raises(SpecError, match="set opset: 22"):
        OnnxExporter(target="tensorrt", opset=21).check(carrier)


def test_the_strictest_target_is_followed() -> None:
    assert profile_for(frozenset({"tensorrt"})) is TENSORRT
    both = profile_for(frozenset({"ort-cpu", "tensorrt", "openvino"}))
    assert both == replace(TENSORRT, saturates=True)  # the file for ONNX Runtime must not
    assert profile_for(frozenset({"ort-cuda", "ort-cpu"})) is ORT_CPU
    assert profile_for(frozenset({"ort-cuda"})) is ORT_CUDA
    assert profile_for(frozenset()) is ORT_CPU


def test_what_stands_in_for_a_gpu_does_not_saturate(tmp_path: Path) -> None:
    """On CPUs without VNNI, integer kernels gave 24 dB for a file that has 39."""
    context = PassContext(0, frozenset({"tensorrt"}))
    fused = Fuse().apply(sample("cifar"), context, {}).carrier
    declared = QuantizeStatic()
    found = statistics(declared, fused, context, [images("cifar", 16)])
    carrier = declared.apply(fused, context, found).carrier
    made = OnnxExporter(target="tensorrt")
    runner = made.open(written(carrier, tmp_path, made))
    (exact,), (ours,) = (r.run(images("cifar")).values() for r in (fused.runner(), runner))
    assert np.square(exact - ours).sum() < 10**-3.2 * np.square(exact).sum()


@pytest.mark.parametrize(
    ("exports", "wanted"),
    [
        ([OnnxExporter(target="tensorrt")], True),
        ([SafetensorsExporter(), OnnxExporter(target="ort-cuda")], True),
        ([LitertExporter()], True),
        ([OnnxExporter(target="ort-cpu")], False),
        ([OnnxExporter(target="openvino")], False),
        ([TensorrtExporter(), OnnxExporter()], False),
        ([SafetensorsExporter()], False),
    ],
)
def test_a_run_computes_as_its_targets_do(
    exports: list[Exporter], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(execute, "_executed", lambda _: seen.append(products_are_exact()))
    spec = SimpleNamespace(exports=exports)
    execute.execute(SimpleNamespace(plan=SimpleNamespace(spec=spec)))  # type: ignore[arg-type]
    assert seen == [wanted]
    assert not products_are_exact()
