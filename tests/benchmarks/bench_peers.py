"""ResNet-20 in W8A8 beside AIMET, NNCF and ONNX Runtime's own quantizer, from one float file; and
in W4A8 beside AIMET, which alone has it.

As published, and the same function with channels scaled by 2^±4 between its layers. Every figure
comes from the exported file in ONNX Runtime. COMPRESSOR_PEERS names the environment that
``peers_environment.sh`` made; a tool that fails says so in the table.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import CompressorError
from compressor.models.onnx.ort_session import OrtRunner
from compressor.report.run import run_spec
from compressor.run.evaluate import evaluate
from compressor.run.metrics.class_metrics import ACCURACY
from compressor.run.plan import Plan
from compressor.spec.load import load_spec
from compressor.types.carrier import Runner
from tests.benchmarks import peers
from tests.benchmarks.bench_equalize import stressed
from tests.benchmarks.bench_resnet20 import fused, planned, show
from tests.benchmarks.marks import benchmark

pytestmark = benchmark("COMPRESSOR_DATA", "COMPRESSOR_PEERS", seconds=3600)
TOOLS = {8: ("aimet", "nncf"), 4: ("aimet",)}
_BYTE = 8
SCRIPT = Path(__file__).with_name("peers_quantize.py")
_SPEC = """\
version: 1
name: resnet
model: {{onnx: {file}}}
data:
  calibration:
    npz: {data}/cifar10_train4000.npz
    inputs: {{image: image}}
    transform: samples.cifar.data:normalize
    samples: 512
    batch: 32
passes:
  - {{pass: quantize-static, weights: {{bits: {bits}}}}}
exports:
  - {{format: onnx, target: ort-cpu}}
limits: {{size-ratio: null, latency-ratio: null}}
output: {output}
"""


@pytest.mark.parametrize("bits", TOOLS)
@pytest.mark.parametrize("network", ["as published", "channels x 2^±4"])
def test_resnet20(network: str, bits: int, tmp_path: Path) -> None:
    plan = planned(tmp_path / "plan")
    reference, carrier = plan.model.carrier.runner(), fused(plan)
    if network != "as published":
        carrier = stressed(carrier)
    images = np.concatenate([b["image"] for b in plan.data["calibration"].batches()])
    np.save(tmp_path / "images.npy", images)
    ir.save(carrier.graph(), tmp_path / "float.onnx")
    rows = [
        judged(plan, reference, "float", tmp_path / "float.onnx", 0.0),
        ours(plan, reference, tmp_path, bits),
        *(theirs(plan, reference, tmp_path, tool, bits) for tool in TOOLS[bits]),
    ]
    if bits == _BYTE:
        rows.append(runtimes(plan, reference, tmp_path, images))
    header = ["artifact", "SQNR dB", "top-1 %", "CPU s"]
    show(f"ResNet-20, {network}, W{bits}A8, 2,000 images", header, rows)


def ours(plan: Plan, reference: Runner, folder: Path, bits: int) -> list[str]:
    """Quantize with the default options but for the width of weights."""
    spec, output = folder / "ours.yaml", folder / "ours"
    text = _SPEC.format(
        file=folder / "float.onnx",
        data=os.environ["COMPRESSOR_DATA"],
        output=output,
        bits=bits,
    )
    spec.write_text(text, encoding="utf-8")
    start = time.process_time()
    path = run_spec(load_spec(spec, [])).output / "model.onnx"
    # Of the whole run, plan, export and timing included.
    return judged(plan, reference, "compressor", path, time.process_time() - start)


def theirs(plan: Plan, reference: Runner, folder: Path, tool: str, bits: int) -> list[str]:
    """Quantize with a peer, in its own environment."""
    target = folder / f"{tool}.onnx"
    files = [folder / "float.onnx", folder / "images.npy", target]
    python = Path(os.environ["COMPRESSOR_PEERS"], "bin", "python")
    command = [python, SCRIPT, tool, str(bits), *files]
    done = subprocess.run(command, capture_output=True, text=True, env=quiet(), check=False)
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    if done.returncode:
        return [tool, "", (lines or ["failed"])[-1][:60], ""]
    return judged(plan, reference, tool, target, float(lines[-1]))


def quiet() -> dict[str, str]:
    """Return the environment for another Python: this project is not on its path."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


def runtimes(plan: Plan, reference: Runner, folder: Path, images: np.ndarray) -> list[str]:
    """Quantize with ONNX Runtime."""
    prepared, path = folder / "prepared.onnx", folder / "runtime.onnx"
    peers.prepare(folder / "float.onnx", prepared)
    batches = [{"image": images[i : i + 32]} for i in range(0, len(images), 32)]
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        peers.quantize(prepared, path, batches, "MinMax", False)
    return judged(plan, reference, "ONNX Runtime", path, time.process_time() - start)


def judged(plan: Plan, reference: Runner, name: str, path: Path, seconds: float) -> list[str]:
    """Run a file in ONNX Runtime."""
    try:
        found = evaluate(OrtRunner(path, name), reference, plan.data["evaluation"], ACCURACY)
    except CompressorError as error:
        return [name, "", str(error).splitlines()[0][:60], f"{seconds:.1f}"]
    sqnr = "" if found.sqnr_db is None else f"{found.sqnr_db:.2f}"
    return [name, sqnr, f"{found.metric['value']:.2f}", f"{seconds:.1f}"]
