"""What a whole `compress run` costs: CPU time, wall time and peak memory, beside the plan's.

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


@dataclass(frozen=True)
class Cost:
    """What a command took.

    Attributes:
        cpu: seconds of user and system time.
        peak: bytes of resident memory at most.
    """

    cpu: float
    wall: float
    peak: int


def cost(*arguments: str) -> Cost:
    """Run a command of ours in a process of its own."""
    start = time.perf_counter()
    code = (
        "import atexit, sys\n"
        "from pathlib import Path\n"
        "def show():\n"
        # Not ru_maxrss: that starts at the peak of the process that started this one.
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    peak = next(l.split()[1] for l in lines if l.startswith('VmHWM'))\n"
        "    import time; print('COST', time.process_time(), peak, file=sys.__stdout__)\n"
        "atexit.register(show)\n"
        "from compressor.cli.application import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr  # a limit may fail, the run is complete
    _, cpu, peak = done.stdout.splitlines()[-1].split()
    return Cost(float(cpu), time.perf_counter() - start, 1024 * int(peak))


def planned(spec: Path, *settings: str) -> int:
    """Return the peak that the plan predicts, in bytes."""
    done = subprocess.run(
        [sys.executable, "-m", "compressor", "plan", str(spec), *settings, "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
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
    predicted = planned(spec, *setting)
    first = cost("run", str(spec), *setting)
    again = cost("run", str(spec), *setting)
    with capsys.disabled():
        print(f"\n{make.__name__:12}{'CPU s':>9}{'wall s':>9}{'peak MB':>9}{'planned':>9}")
        for label, found in (("first", first), ("again", again)):
            print(
                f"{label:12}{found.cpu:9.1f}{found.wall:9.1f}{found.peak / 1e6:9.0f}"
                f"{predicted / 1e6:9.0f}"
            )
