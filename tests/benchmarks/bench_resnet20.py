"""ResNet-20 against ONNX Runtime's own static quantization, side by side in one run.

Tables, no assertions on time: fidelity and latency of the artifacts, time to calibrate and
quantize, peak memory against the number of samples, and how fast the command line answers.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir

from compressor import catalog
from compressor.calibration.collect import collect_statistics
from compressor.models.onnx.ort_session import OrtRunner
from compressor.report.run import run_spec
from compressor.run.evaluate import evaluate
from compressor.run.metrics.class_metrics import ACCURACY
from compressor.run.plan import Plan, make_plan
from compressor.run.timing.timing import already_open, measure
from compressor.spec.load import load_spec
from compressor.types.carrier import Carrier
from compressor.types.exporter import ExportContext
from tests.benchmarks import peers
from tests.benchmarks.marks import benchmark
from tests.benchmarks.results import keep

pytestmark = benchmark("COMPRESSOR_DATA")
SPEC = Path("samples/cifar/spec.yaml")
OBSERVERS = ("auto", "mse", "entropy", "percentile", "min-max")


def show(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table, and keep it on the page of results if there is one to keep it on."""
    keep(title, header, rows)
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(r, widths, strict=True))
        )
        for r in [header, *rows]
    ]
    print(f"\n{title}\n{lines[0]}\n{'-' * len(lines[0])}", *lines[1:], sep="\n")


def planned(output: Path, *settings: str) -> Plan:
    """Plan the sample and read its weights."""
    plan = make_plan(load_spec(SPEC, [*settings, f"output={output}"]))
    plan.model.load()
    return plan


def float_file(plan: Plan, folder: Path) -> Path:
    """Write the fused float model, what both tools start from."""
    path = folder / "float.onnx"
    ir.save(fused(plan).graph(), path)
    prepared = folder / "prepared.onnx"
    peers.prepare(path, prepared)
    return prepared


def test_fidelity_and_latency(tmp_path: Path) -> None:
    plan = planned(tmp_path / "plan")
    base = float_file(plan, tmp_path)
    files: dict[str, Path] = {}
    batches = [{"image": b["image"]} for b in plan.data["calibration"].batches()]
    for method in peers.METHODS:
        for symmetric in (False, True):
            name = f"ONNX Runtime {method} {'int8' if symmetric else 'uint8'}"
            files[name] = tmp_path / f"{method}{symmetric}.onnx"
            with contextlib.redirect_stdout(io.StringIO()):
                peers.quantize(base, files[name], batches, method, symmetric)
    for observer in OBSERVERS:
        output = tmp_path / observer
        run_spec(
            load_spec(
                SPEC,
                [
                    f"passes.1.activations.observer={observer}",
                    "exports=[{format: onnx, opset: 21, target: ort-cpu}]",
                    f"output={output}",
                ],
            )
        )
        files[f"compressor {observer}"] = output / "model.onnx"

    runners = {name: OrtRunner(path, name) for name, path in files.items()}
    reference = plan.model.carrier.runner()
    results = {
        name: evaluate(runner, reference, plan.data["evaluation"], ACCURACY)
        for name, runner in runners.items()
    }
    best = max(
        (n for n in runners if n.startswith("ONNX")), key=lambda n: results[n].sqnr_db or 0.0
    )
    latencies = {
        batch: measure(
            already_open(
                {
                    "float": reference,
                    best: runners[best],
                    "compressor mse": runners["compressor mse"],
                }
            ),
            [plan.data["evaluation"].first(batch)],
            budget=20.0,
            precision=0.01,
        )
        for batch in (1, 64)
    }
    rows = [
        [
            name,
            f"{r.sqnr_db:.2f}",
            f"{r.agreement:.2f}",
            f"{r.metric['value']:.2f}",
            f"{files[name].stat().st_size:,}",
        ]
        for name, r in results.items()
    ]
    show("ResNet-20, 2,000 images", ["artifact", "SQNR dB", "agree %", "top-1 %", "bytes"], rows)
    rows = []
    for batch, times in latencies.items():
        for name, against in (
            (best, "float"),
            ("compressor mse", "float"),
            ("compressor mse", best),
        ):
            ratio = times.ratio(name, against)
            low, high = ratio["ci95"]
            rows.append(
                [
                    f"{name} / {against}",
                    str(batch),
                    f"{ratio['value']:.3f}",
                    f"{low:.3f}-{high:.3f}",
                ]
            )
    show("Latency ratios, interleaved", ["ratio", "batch", "median", "95 %"], rows)


def fused(plan: Plan) -> Carrier:
    """Return the model that quantization starts from; the peer starts from the same."""
    return plan.spec.passes[0].apply(plan.model.carrier, plan.context, {}).carrier


def quantize_ours(plan: Plan, carrier: Carrier, observer: str, folder: Path) -> None:
    """Calibrate, quantize and write one ONNX file."""
    static = catalog.load("pass", "quantize-static").model_validate(
        {"activations": {"observer": observer}}
    )
    survey = static.survey(carrier, plan.context)
    statistics = collect_statistics(carrier, plan.data["calibration"].batches(), survey.requests)
    outcome = static.apply(carrier, plan.context, statistics)
    folder.mkdir(exist_ok=True)
    catalog.load("exporter", "onnx")().write(outcome.carrier, folder, ExportContext("cifar", ""))


def test_time_to_quantize(tmp_path: Path) -> None:
    plan = planned(tmp_path / "plan")
    base = float_file(plan, tmp_path)
    batches = [{"image": b["image"]} for b in plan.data["calibration"].batches()]

    def theirs() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            peers.quantize(base, tmp_path / "theirs.onnx", batches, "Entropy", False)

    carrier = fused(plan)

    def ours() -> None:
        quantize_ours(plan, carrier, "entropy", tmp_path / "ours")

    def seconds(run: Callable[[], None]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    theirs()
    ours()
    pairs = [(seconds(theirs), seconds(ours)) for _ in range(5)]
    rows = [[str(i), f"{a:.2f}", f"{b:.2f}", f"{b / a:.2f}"] for i, (a, b) in enumerate(pairs)]
    ratio = float(np.median([b / a for a, b in pairs]))
    rows.append(["median", "", "", f"{ratio:.2f}"])
    show(
        "Calibrate and quantize with entropy, 512 images, seconds",
        ["round", "ONNX Runtime", "compressor", "ratio"],
        rows,
    )


def child(samples: int) -> None:
    """Calibrate and quantize in this process, and print its peak memory in bytes."""
    folder = Path(os.environ["BENCH_FOLDER"])
    plan = planned(folder, f"data.calibration.samples={samples}")
    quantize_ours(plan, fused(plan), "entropy", folder)
    # Not ru_maxrss: that starts at the peak of the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    print(peak, plan.peak_memory)


def test_peak_memory(tmp_path: Path) -> None:
    rows = []
    peaks = []
    for samples in (256, 4000):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"from tests.benchmarks import bench_resnet20 as b; b.child({samples})",
            ],
            env={**os.environ, "BENCH_FOLDER": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        peak, predicted = map(int, done.stdout.split())
        peaks.append(peak)
        rows.append([str(samples), f"{peak / 1e6:.0f}", f"{predicted / 1e6:.0f}"])
    rows.append(["ratio", f"{peaks[1] / peaks[0]:.3f}", ""])
    show("Peak memory of calibration, MB", ["samples", "measured", "planned"], rows)


def test_help_answers_at_once() -> None:
    command = [sys.executable, "-m", "compressor", "--help"]
    times = []
    for _ in range(7):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    show(
        "compress --help, seconds",
        ["", "minimum", "median"],
        [["wall", f"{min(times):.3f}", f"{float(np.median(times)):.3f}"]],
    )
