"""Nats a character that few bits cost the small Llama of the samples, rotated and not.

``rotate`` folds what it can into weights. What ``down_proj`` reads stays as it was, so inputs of 4
bits are measured for all layers, and for all but ``down_proj``. Losses are means over windows of
held-out text, each minus the float model's; the interval is that of the mean over windows.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.rounded_inputs import round_inputs_of
from compressor.passes.prepare.rotate import Rotate
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.passes import PassContext
from compressor.types.rounded_inputs import InputScheme
from tests.benchmarks.bench_language_model import dequantized
from tests.benchmarks.language import Setting, compressed, language_setting, nats

SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-llama"
SEEDS = (0, 1, 2)
WEIGHTS: dict[str, dict[str, Any]] = {
    "2-bit weights, rtn": {"bits": 2, "group": 32, "symmetric": False},
    "2-bit weights, gptq": {"bits": 2, "group": 32, "symmetric": False, "method": "gptq"},
    "3-bit weights, rtn": {"bits": 3, "group": 32},
    "4-bit weights, rtn": {"bits": 4, "group": 32},
    "4-bit weights of whole rows, rtn": {"bits": 4},
}
FOUR_BITS = "4-bit weights, rtn"


def folder_of(seed: int | None, tmp_path: Path) -> Path:
    """Return the sample's directory, rotated unless the seed is ``None``."""
    if seed is None:
        return SAMPLE / "checkpoint"
    folder = Path(shutil.copytree(SAMPLE / "checkpoint", tmp_path / f"rotated-{seed}"))
    made = Rotate().apply(open_checkpoint(SAMPLE / "checkpoint"), PassContext(seed), {}).carrier
    tensors = {name: tensor.read() for name, tensor in made.tensors().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def four_bits(layer: nn.Module) -> None:
    """Let a layer round each token that it reads to 15 steps of its greatest magnitude."""

    def rounded(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scale = args[0].abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
        return ((args[0] / scale).round() * scale, *args[1:])

    layer.register_forward_pre_hook(rounded)


def mxfp4(layer: nn.Module) -> None:
    """Let a layer round what it reads to floats of 4 bits, 32 of which share a power of two."""
    round_inputs_of(layer, InputScheme("mxfp4"))


def losses(setting: Setting, tmp_path: Path, reference: Tensor) -> dict[str, Tensor]:
    """Return what each format costs in each window."""
    found = {}
    modules = {}
    for title, options in WEIGHTS.items():
        outcome = compressed(setting, QuantizeWeights(**options), tmp_path)
        modules[title] = dequantized(outcome.carrier)
        found[title] = nats(modules[title], setting.windows) - reference
    weights = compressed(setting, QuantizeWeights(preset="mxfp4"), tmp_path)
    rounds = {
        "W4A4, 4-bit integers": (modules[FOUR_BITS], four_bits, ()),
        "W4A4, but float inputs of down_proj": (modules[FOUR_BITS], four_bits, ("down_proj",)),
        "W4A4, mxfp4": (dequantized(weights.carrier), mxfp4, ()),
    }
    for title, (module, rounding, kept) in rounds.items():
        copied = shared(module)
        for name, layer in copied.named_modules():
            if isinstance(layer, nn.Linear) and not name.endswith(("lm_head", *kept)):
                rounding(layer)
        found[title] = nats(copied, setting.windows) - reference
    return found


def shared(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares its weights."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters()})


@pytest.mark.benchmark
@pytest.mark.timeout(1800)
def test_rotate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    texts = [
        (SAMPLE / f"{n}.txt").read_text(encoding="utf-8") for n in ("calibration", "evaluation")
    ]
    rows: dict[str, list[str]] = {}
    reference: Tensor | None = None
    for seed in (None, *SEEDS):
        torch.manual_seed(0)
        setting = language_setting(folder_of(seed, tmp_path), texts)
        plain = nats(setting.carrier.module, setting.windows)
        reference = plain if reference is None else reference
        rows.setdefault("float", []).append(f"{float((plain - reference).mean()):9.6f}")
        for title, lost in losses(setting, tmp_path, reference).items():
            interval = 1.96 * float(lost.std()) / len(lost) ** 0.5
            rows.setdefault(title, []).append(f"{float(lost.mean()):9.4f} ± {interval:.4f}")
    assert reference is not None
    with capsys.disabled():
        print(f"\nfloat {reference.mean():.5f} nats a character")
        names = ["as it is", *(f"rotated, seed {seed}" for seed in SEEDS)]
        print(f"{'':36}" + "".join(f"{name:>20}" for name in names))
        for title, values in rows.items():
            print(f"{title:36}" + "".join(f"{value:>20}" for value in values), flush=True)
