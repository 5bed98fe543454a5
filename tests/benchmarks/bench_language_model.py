"""Nats a character that weight-only quantization costs a small Llama, by method and format.

Wants a Hugging Face directory that ``samples/tiny-llama/train.py`` wrote, named by the environment
variable COMPRESSOR_LANGUAGE_MODEL, and ``tinyshakespeare.txt`` in the folder COMPRESSOR_DATA.
Losses are paired: the same windows of the held-out tenth, quantized minus float; the interval is
that of their mean over windows, and says nothing of the choice of calibration data.
"""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.carrier import Carrier
from tests.benchmarks.language import LENGTH, Setting, compressed, language_setting, nats

HELD_OUT = 0.1
GRIDS: dict[str, dict[str, Any]] = {
    "4 bits, groups of 128": {"bits": 4, "group": 128, "symmetric": True},
    "4 bits, groups of 32": {"bits": 4, "group": 32, "symmetric": True},
    "3 bits, groups of 32": {"bits": 3, "group": 32, "symmetric": True},
    "2 bits, groups of 32": {"bits": 2, "group": 32, "symmetric": True},
    "4 bits, groups of 128, zero points": {"bits": 4, "group": 128, "symmetric": False},
    "2 bits, groups of 32, zero points": {"bits": 2, "group": 32, "symmetric": False},
}
METHODS = ("rtn", "hqq", "gptq", "awq", "reconstruct")
PRESETS = ("int8", "fp8", "nvfp4", "mxfp4")


@pytest.fixture(scope="module")
def setting() -> Setting:
    pytest.importorskip("transformers")
    folder = os.environ.get("COMPRESSOR_LANGUAGE_MODEL")
    if folder is None:
        pytest.skip(
            "COMPRESSOR_LANGUAGE_MODEL names no model; make one with samples/tiny-llama/train.py"
        )
    text_file = Path(os.environ.get("COMPRESSOR_DATA", ".")) / "tinyshakespeare.txt"
    if not text_file.exists():
        pytest.skip("COMPRESSOR_DATA holds no tinyshakespeare.txt")
    text = text_file.read_text(encoding="utf-8")
    edge = len(text) - int(len(text) * HELD_OUT)
    return language_setting(folder, (text[:edge], text[edge:]))


def dequantized(carrier: Carrier) -> nn.Module:
    """Return a module with the values that the codes stand for."""
    assert isinstance(carrier, TorchCarrier)
    module = copy.deepcopy(carrier.module)
    state = module.state_dict()
    for name, tensor in carrier.tensors().items():
        if tensor.codes is not None:
            layer = tensor.codes.layer
            codes = tensor.codes.compute(layer.canonical(tensor.read()))
            state[name].copy_(layer.stored(codes.dequantize()))
    return module


@pytest.mark.benchmark
@pytest.mark.timeout(3600)
def test_language_model(setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    reference = nats(setting.carrier.module, setting.windows)
    tokens = setting.windows.shape[0] * LENGTH
    lines = [f"float {reference.mean():.5f} nats a character on {tokens:,} characters"]
    with capsys.disabled():
        print("", *lines, sep="\n", flush=True)
        for title, options in {**GRIDS, **{p: {"preset": p} for p in PRESETS}}.items():
            print(f"{title:36}{'lost':>10}{'±':>9}{'of rtn':>9}{'CPU s':>9}", flush=True)
            base = float("nan")
            for method in METHODS if "bits" in options else ("rtn", "gptq", "awq"):
                declared = QuantizeWeights(method=method, **options)
                start = time.process_time()
                outcome = compressed(setting, declared, tmp_path)
                seconds = time.process_time() - start
                lost = nats(dequantized(outcome.carrier), setting.windows) - reference
                mean = float(lost.mean())
                base = mean if method == "rtn" else base
                interval = 1.96 * float(lost.std()) / len(lost) ** 0.5
                print(
                    f"  {method:34}{mean:10.5f}{interval:9.5f}{mean / base:9.2f}{seconds:9.1f}",
                    flush=True,
                )
