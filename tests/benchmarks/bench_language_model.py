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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor.carriers.torch_carrier import TorchCarrier
from compressor.graph.blocks import partition
from compressor.plan import make_observer
from compressor.run.blockwise import Feed, GraphBlocks
from compressor.types.carrier import Carrier
from compressor.types.passes import Outcome, PassContext
from compressor.types.tensors import Batch, TensorSpec
from passes.quantize.weight_only import QuantizeWeights

LENGTH, SEQUENCES, BATCH = 256, 128, 8
HELD_OUT = 0.1
GRIDS: dict[str, dict[str, Any]] = {
    "4 bits, groups of 128": {"bits": 4, "group": 128},
    "4 bits, groups of 32": {"bits": 4, "group": 32},
    "3 bits, groups of 32": {"bits": 3, "group": 32},
    "2 bits, groups of 32": {"bits": 2, "group": 32},
    "2 bits, groups of 32, zero points": {"bits": 2, "group": 32, "symmetric": False},
}
METHODS = ("rtn", "hqq", "gptq", "awq")
PRESETS = ("int8", "fp8", "nvfp4", "mxfp4")


class Logits(nn.Module):
    """A language model from tokens to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


@dataclass(frozen=True)
class Setting:
    """The float model, what calibrates it, and what it is measured on.

    Attributes:
        carrier: the float model, lowered.
        calibration: batches of sequences from the part that it was trained on.
        windows: held-out windows side by side, ``[N, LENGTH + 1]``.
    """

    carrier: TorchCarrier
    calibration: list[Batch]
    windows: Tensor

    def float_model(self) -> nn.Module:
        """The module itself."""
        return self.carrier.module


@pytest.fixture(scope="module")
def setting() -> Setting:
    transformers = pytest.importorskip("transformers")
    folder = os.environ.get("COMPRESSOR_LANGUAGE_MODEL")
    if folder is None:
        pytest.skip(
            "COMPRESSOR_LANGUAGE_MODEL names no model; make one with samples/tiny-llama/train.py"
        )
    text_file = Path(os.environ.get("COMPRESSOR_DATA", ".")) / "tinyshakespeare.txt"
    if not text_file.exists():
        pytest.skip("COMPRESSOR_DATA holds no tinyshakespeare.txt")
    text = text_file.read_text(encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    edge = len(text) - int(len(text) * HELD_OUT)
    known, unseen = (
        torch.tensor(tokenizer(part, add_special_tokens=False)["input_ids"])
        for part in (text[:edge], text[edge:])
    )
    random = torch.Generator().manual_seed(0)
    starts = torch.randint(len(known) - LENGTH, (SEQUENCES,), generator=random)
    rows = torch.stack([known[s : s + LENGTH] for s in starts])
    count = (len(unseen) - 1) // LENGTH
    windows = torch.stack([unseen[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(count)])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    carrier = TorchCarrier(Logits(model), [TensorSpec("tokens", ("batch", "sequence"), "int64")])
    carrier.graph()  # lowered here, so that no method is charged with it
    return Setting(carrier, [{"tokens": b.numpy()} for b in rows.split(BATCH)], windows)


@torch.inference_mode()
def nats(model: nn.Module, windows: Tensor) -> Tensor:
    """Return each window's mean nats a character."""
    found = []
    for batch in windows.split(32):
        logits = model(batch[:, :-1]).transpose(1, 2)
        found.append(functional.cross_entropy(logits, batch[:, 1:], reduction="none").mean(1))
    return torch.cat(found).to(torch.float64)


def quantized(setting: Setting, declared: QuantizeWeights, folder: Path) -> Outcome:
    """Calibrate, if the method wants it, and quantize."""
    context = PassContext()
    survey = declared.survey(setting.carrier, context)
    if not survey.blockwise:
        return declared.apply(setting.carrier, context, {})
    graph = setting.carrier.graph()
    feed = Feed(setting.calibration, make_observer, folder)
    blocks = GraphBlocks(graph, partition(graph), survey.requests, feed)
    return declared.apply_blockwise(setting.carrier, context, blocks)


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
    reference = nats(setting.float_model(), setting.windows)
    tokens = setting.windows.shape[0] * LENGTH
    lines = [f"float {reference.mean():.5f} nats a character on {tokens:,} characters"]
    with capsys.disabled():
        print("", *lines, sep="\n", flush=True)
        for title, options in {**GRIDS, **{p: {"preset": p} for p in PRESETS}}.items():
            print(f"{title:36}{'lost':>10}{'±':>9}{'of rtn':>9}{'seconds':>9}", flush=True)
            base = float("nan")
            for method in METHODS if "bits" in options else ("rtn", "gptq", "awq"):
                declared = QuantizeWeights(method=method, **options)
                start = time.perf_counter()
                outcome = quantized(setting, declared, tmp_path)
                seconds = time.perf_counter() - start
                lost = nats(dequantized(outcome.carrier), setting.windows) - reference
                mean = float(lost.mean())
                base = mean if method == "rtn" else base
                interval = 1.96 * float(lost.std()) / len(lost) ** 0.5
                print(
                    f"  {method:34}{mean:10.5f}{interval:9.5f}{mean / base:9.2f}{seconds:9.1f}",
                    flush=True,
                )
