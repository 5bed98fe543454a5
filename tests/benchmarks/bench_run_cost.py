"""What a whole `compress run` costs by phase: CPU time and peak memory, beside the plan's peak.

ResNet-50 at 224 x 224 with 16 evaluation and 32 calibration images, and BERT-base from a folder of
transformers with 16 samples of 128 tokens, both with random weights. With COMPRESSOR_DATA, the
published ResNet-20 of samples/cifar; and the small Llama of samples/tiny-llama.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.benchmarks.marks import benchmark
from tests.paths import ROOT

pytestmark = benchmark(seconds=3600)
STEPS: list[dict[str, Any]] = [{"pass": "fuse"}, {"pass": "quantize-static"}]
# The plan compiles what the runs import, as installing the package does.
_COMPILED = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
ENVIRONMENT = {**_COMPILED, "PYTHONPATH": str(ROOT)}

# Counts CPU seconds of each stage, without those of stages inside it, and its peak.
TIMED = """
import atexit, json, sys, time
from contextlib import contextmanager
from pathlib import Path

started, peaks, spent = [], {}, {}

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(l.split()[1] for l in lines if l.startswith("VmHWM")))

def mark(phase):
    now = time.process_time()
    spent[phase] = spent.get(phase, 0.0) + now - (started.pop() if started else 0.0)
    peaks[phase] = max(peaks.get(phase, 0), peak())
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    started.append(now)

def inside(stages):
    return stages[-1] if stages else "other"

from compressor.cli import options

class Phases(options.LineProgress):
    stages = []

    @contextmanager
    def stage(self, description, total=None):
        mark(inside(self.stages) if spent else "imports")
        self.stages.append(description.partition(": ")[2] or description)
        with super().stage(description, total) as advance:
            yield advance
        mark(self.stages[-1])
        self.stages.pop()

options.LineProgress = Phases

def show():
    mark("other")
    print("COST", json.dumps([spent, peaks]), file=sys.__stdout__)

atexit.register(show)
from compressor.cli.application import main
main()
"""


@dataclass(frozen=True)
class Cost:
    """What a command took.

    Attributes:
        cpu: seconds of user and system time, by phase.
        peak: bytes of resident memory at most, by phase.
    """

    cpu: dict[str, float]
    wall: float
    peak: dict[str, int]


def phase(stage: str) -> str:
    """Return the row of the table that a stage belongs to."""
    for word in ("calibrate", "compare", "evaluate", "export", "time", "attribute"):
        if stage.startswith(word) or stage.endswith(word):
            return word
    if stage.startswith(("load", "write")):
        return "other"
    return stage if stage in ("imports", "plan", "other") else "passes"


def cost(*arguments: str) -> Cost:
    """Run a command of ours in a process of its own."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", TIMED, *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr  # a limit may fail, the run is complete
    spent, peaks = json.loads(done.stdout.splitlines()[-1].removeprefix("COST "))
    cpu, peak = dict[str, float](), dict[str, int]()
    for stage, seconds in spent.items():
        row = phase(stage)
        cpu[row] = cpu.get(row, 0.0) + seconds
        peak[row] = max(peak.get(row, 0), peaks[stage])
    return Cost(cpu, time.perf_counter() - start, peak)


def planned(spec: Path, *settings: str) -> int:
    """Return the peak that the plan predicts, in bytes."""
    done = subprocess.run(
        [sys.executable, "-m", "compressor", "plan", str(spec), *settings, "--json"],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(json.loads(done.stdout)["peak_memory"])


def write(folder: Path, model: dict[str, Any], inputs: dict[str, Any], file: str) -> Path:
    """Write the spec of a network with random weights and data."""
    data = {"npz": file, "inputs": {name: name for name in inputs}}
    document = {
        "version": 1,
        "name": folder.name,
        "model": {**model, "inputs": inputs},
        "data": {"calibration": data, "evaluation": {**data, "samples": 16}},
        "metric": "cosine",
        "passes": STEPS,
        "exports": [{"format": "onnx", "target": "ort-cpu"}],
        "output": "out",
    }
    path = folder / "spec.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def resnet50(folder: Path) -> Path:
    images = np.random.default_rng(0).standard_normal((32, 3, 224, 224), np.float32)
    np.savez(folder / "images.npz", image=images)
    shape = {"image": {"shape": ["batch", 3, 224, 224]}}
    factory = {"factory": "tests.benchmarks.cost_networks:resnet50"}
    return write(folder, factory, shape, "images.npz")


def bert(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig()).save_pretrained(folder / "checkpoint")
    tokens = np.random.default_rng(0).integers(0, 30522, (16, 128))
    np.savez(folder / "tokens.npz", input_ids=tokens)
    shape = {"input_ids": {"shape": ["batch", 128], "dtype": "int64"}}
    model = {"factory": "transformers.AutoModel", "checkpoint": "checkpoint"}
    return write(folder, model, shape, "tokens.npz")


def resnet20(folder: Path) -> Path:
    del folder
    if "COMPRESSOR_DATA" not in os.environ:
        pytest.skip("COMPRESSOR_DATA names no folder of real data")
    return ROOT / "samples/cifar/spec.yaml"


def llama(folder: Path) -> Path:
    del folder
    pytest.importorskip("transformers")
    return ROOT / "samples/tiny-llama/spec.yaml"


@pytest.mark.parametrize("make", [resnet20, llama, resnet50, bert])
def test_run_cost(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / make.__name__
    folder.mkdir()
    spec, setting = make(folder), ("--set", f"output={folder / 'out'}")
    predicted = planned(spec, "--set", f"output={folder / 'planned'}")  # it keeps the graph there
    first = cost("run", str(spec), *setting)
    again = cost("run", str(spec), *setting)
    with capsys.disabled():
        print(f"\n{make.__name__:20}{'CPU s':>9}{'again':>9}{'peak MB':>9}")
        for row, seconds in first.cpu.items():
            repeated = again.cpu.get(row, 0.0)
            print(f"{row:20}{seconds:9.1f}{repeated:9.1f}{first.peak[row] / 1e6:9.0f}")
        print(
            f"{'whole':20}{sum(first.cpu.values()):9.1f}{sum(again.cpu.values()):9.1f}"
            f"{max(first.peak.values()) / 1e6:9.0f}"
        )
        print(f"wall {first.wall:.1f} s, planned peak {predicted / 1e6:.0f} MB")
