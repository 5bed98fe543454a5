"""The small Llama of the samples beside llm-compressor, GPTQModel and AutoRound, in one run.

All see the same 128 texts of 256 characters, run on one thread, and are otherwise as they choose.
COMPRESSOR_LANGUAGE_PEERS names the folder that ``language_peers_environment.sh`` made. Seconds of
the processor and peak memory are those of the whole program, imports, checks and files included.
Every directory is opened by transformers in float32, and judged on the same held-out characters:
nats a character more than the float model, with the half width of a 95 % interval over windows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.benchmarks.bench_peers import quiet
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark

pytestmark = benchmark("COMPRESSOR_LANGUAGE_PEERS", seconds=7200)
SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-llama"
MODEL = SAMPLE / "checkpoint"
SCRIPT = Path(__file__).with_name("language_peers.py")
SAMPLES, LENGTH, WINDOWS = 128, 256, 128
PEERS = {"llmcompressor": "llmcompressor", "gptqmodel": "gptqmodel", "autoround": "gptqmodel"}
FORMATS = [
    (4, 32, "symmetric"),
    (4, 128, "symmetric"),
    (3, 32, "symmetric"),
    (2, 32, "symmetric"),
    (2, 32, "zeros"),
]
OURS = ("gptq", "awq", "reconstruct")
_SPEC = """\
version: 1
name: ours
model: {{factory: transformers.AutoModelForCausalLM, checkpoint: {model}}}
data:
  calibration:
    {{text: {sample}/calibration.txt, tokenizer: {model}, length: {length},
     inputs: {{input_ids: input_ids}}, samples: {samples}, batch: 8}}
  evaluation:
    {{text: {sample}/evaluation.txt, tokenizer: {model}, length: {length},
     inputs: {{input_ids: input_ids}}, target: labels, samples: 8, batch: 8}}
metric: perplexity
passes:
  - {{pass: quantize-weights, method: {method}, bits: {bits}, group: {group},
     symmetric: {symmetric}}}
exports:
  - {{format: safetensors, layout: compressed-tensors}}
limits: {{latency-ratio: null, metric-drop: null}}
output: {output}
"""


@dataclass(frozen=True)
class Made:
    """What a program did: its directory, seconds of the processor, and peak bytes."""

    directory: Path
    seconds: float
    peak: int

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.directory.glob("*.safetensors"))


def measured(command: Sequence[str | Path], target: Path) -> Made:
    """Run a program that writes a directory."""
    with (target.parent / f"{target.name}.log").open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
        _, status, used = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
    assert running.returncode == 0, Path(log.name).read_text(errors="replace")[-2000:]
    (file,) = target.rglob("model.safetensors")  # AutoRound writes a folder inside
    return Made(file.parent, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def environment() -> dict[str, str]:
    return {**quiet(), "OMP_NUM_THREADS": "1"}


def python_of(name: str) -> Path:
    return Path(os.environ["COMPRESSOR_LANGUAGE_PEERS"], PEERS[name], "bin", "python")


def nats(python: str | Path, directory: Path, windows: torch.Tensor, folder: Path) -> torch.Tensor:
    """Return the mean loss of each window."""
    np.save(folder / "windows.npy", windows[:, :-1].numpy())
    files = [folder / "windows.npy", folder / "logits.npz", directory]
    subprocess.run(
        [python, SCRIPT, "logits", *files], check=True, env=environment(), capture_output=True
    )
    (logits,) = np.load(folder / "logits.npz").values()
    found = torch.from_numpy(logits).transpose(1, 2)
    return functional.cross_entropy(found, windows[:, 1:], reduction="none").mean(1)


@pytest.mark.parametrize(("bits", "group", "zeros"), FORMATS)
def test_language_peers(bits: int, group: int, zeros: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(MODEL)

    def tokens(name: str) -> torch.Tensor:
        text = (SAMPLE / name).read_text(encoding="utf-8")
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])

    calibration = tokens("calibration.txt")[: SAMPLES * LENGTH].reshape(SAMPLES, LENGTH)
    np.save(tmp_path / "calibration.npy", calibration.numpy())
    windows = tokens("evaluation.txt").unfold(0, LENGTH + 1, LENGTH)
    windows = windows[:: len(windows) // WINDOWS][:WINDOWS]
    made: dict[str, tuple[str | Path, Made]] = {}
    symmetric = str(zeros == "symmetric").lower()
    form: dict[str, object] = {"bits": bits, "group": group, "symmetric": symmetric}
    for method in OURS:
        spec, target = tmp_path / f"{method}.yaml", tmp_path / method
        names = {"model": MODEL, "sample": SAMPLE, "output": target, "method": method}
        spec.write_text(_SPEC.format(length=LENGTH, samples=SAMPLES, **form, **names), "utf-8")
        command: list[str | Path] = [sys.executable, "-m", "compressor", "run", spec]
        made[f"compressor {method}"] = sys.executable, measured(command, target)
    for tool in PEERS:
        python, target = python_of(tool), tmp_path / tool
        numbers = [str(bits), str(group), zeros]
        files = [MODEL, tmp_path / "calibration.npy", target]
        command = [python, SCRIPT, "quantize", tool, *numbers, *files]
        made[tool] = python, measured(command, target)
    reference = nats(sys.executable, MODEL, windows, tmp_path)
    rows = [["float", f"{Made(MODEL, 0, 0).nbytes:,}", f"{0:.4f}", "", ""]]
    for title, (python, result) in made.items():
        lost = nats(python, result.directory, windows, tmp_path) - reference
        interval = 1.96 * float(lost.std()) / len(lost) ** 0.5
        shown = f"{float(lost.mean()):.4f} ± {interval:.4f}"
        peak = f"{result.peak / 1e6:.0f}"
        rows.append([title, f"{result.nbytes:,}", shown, f"{result.seconds:.1f}", peak])
    header = ["program", "bytes", "nats lost", "CPU s", "peak MB"]
    count = windows.shape[0] * LENGTH
    show(f"{bits} bits in groups of {group}, {zeros}, {count:,} characters", header, rows)
