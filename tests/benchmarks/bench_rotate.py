"""Nats a character that few bits cost the small Llama of the samples, rotated and not.

``rotate`` folds what it can into weights. What ``down_proj`` reads stays as it was, so inputs of 4
bits are measured for all layers, and for all but ``down_proj``. Keys and values of few bits have
weights in floats beside them, and each token of each head a scale and a zero point; keys are also
measured as if the network turned them, and what is multiplied with them, by a Hadamard matrix as it
runs, which nothing folds. Losses are means over windows of held-out text, each minus the float
model's; the interval is that of the mean over windows.
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
from compressor.models.transformers.cached_attention import change_cache, keeps_cache
from compressor.passes.prepare.maths.rotation import rotation
from compressor.passes.prepare.rotate import Rotate
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.passes import PassContext
from compressor.types.rounded_inputs import InputScheme
from tests.benchmarks.language import LENGTH, Logits, nats

SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-llama"
SEEDS = (0, 1)
WINDOWS = 64  # 16,384 characters, at even distances
WEIGHTS: dict[str, dict[str, Any]] = {
    "2-bit weights, rtn": {"bits": 2, "group": 32, "symmetric": False},
    "2-bit weights, hqq": {"bits": 2, "group": 32, "symmetric": False, "method": "hqq"},
    "3-bit weights, rtn": {"bits": 3, "group": 32},
    "4-bit weights, rtn": {"bits": 4, "group": 32},
    "4-bit weights of whole rows, rtn": {"bits": 4},
}
FOUR_BITS = "4-bit weights, rtn"
CACHE_BITS = (4, 3, 2)


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


def few_bits(values: Tensor, bits: int) -> Tensor:
    """Round the last axis to integers with a scale and a zero point."""
    low = values.amin(-1, keepdim=True).clamp(max=0)
    high = values.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low).clamp(min=1e-12) / ((1 << bits) - 1)
    zero = (low / scale).round()
    return ((values / scale).round() - zero).clamp(0, (1 << bits) - 1).add(zero) * scale


def cached(network: nn.Module, bits: int, *, turned: bool) -> nn.Module:
    """Return a copy whose attention keeps keys and values of few bits.

    Args:
        turned: keys are rounded in the basis of a Hadamard matrix.
    """

    def change(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        turn = rotation(keys.shape[-1], seed=0)
        kept = turn.back(few_bits(turn.times(keys), bits)) if turned else few_bits(keys, bits)
        return kept.to(keys.dtype), few_bits(values, bits)

    module = copy.deepcopy(network)
    for layer in module.modules():
        if keeps_cache(layer):
            change_cache(layer, change)
    return module


def quantized(network: nn.Module, folder: Path, options: dict[str, Any]) -> nn.Module:
    """Return a copy of a network with the values that codes of its folder stand for."""
    made = QuantizeWeights(**options).apply(open_checkpoint(folder), PassContext(), {}).carrier
    module = copy.deepcopy(network)
    state = module.state_dict()
    for name, tensor in made.tensors().items():
        if tensor.codes is not None:
            layer = tensor.codes.layer
            values = tensor.codes.compute(layer.canonical(tensor.read())).dequantize()
            state[f"model.{name}"].copy_(layer.stored(values))
    return module


def losses(network: nn.Module, folder: Path, windows: Tensor) -> dict[str, Tensor]:
    """Return the loss of each format in each window."""
    modules = {title: quantized(network, folder, options) for title, options in WEIGHTS.items()}
    found = {title: nats(module, windows) for title, module in modules.items()}
    rounds = {
        "W4A4, 4-bit integers": (modules[FOUR_BITS], four_bits, ()),
        "W4A4, but float inputs of down_proj": (
            copy.deepcopy(modules[FOUR_BITS]),
            four_bits,
            ("down_proj",),
        ),
        "W4A4, mxfp4": (quantized(network, folder, {"preset": "mxfp4"}), mxfp4, ()),
    }
    for title, (module, rounding, kept) in rounds.items():
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear) and not name.endswith(("lm_head", *kept)):
                rounding(layer)
        found[title] = nats(module, windows)
    for bits in CACHE_BITS:
        for turned in (False, True):
            title = f"{bits}-bit keys and values" + (", turned keys" if turned else "")
            found[title] = nats(cached(network, bits, turned=turned), windows)
    return found


@pytest.mark.benchmark
@pytest.mark.timeout(1800)
def test_rotate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    text = (SAMPLE / "evaluation.txt").read_text(encoding="utf-8")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(SAMPLE / "checkpoint")
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    windows = tokens[: len(tokens) // LENGTH * LENGTH - LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)
    windows = windows[:: len(windows) // WINDOWS][:WINDOWS]
    rows: dict[str, list[str]] = {}
    reference = torch.zeros(())
    for seed in (None, *SEEDS):
        folder = folder_of(seed, tmp_path)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        plain = nats(Logits(model), windows)
        reference = plain if seed is None else reference
        rows.setdefault("float", []).append(f"{float((plain - reference).mean()):.7f}")
        for title, loss in losses(Logits(model), folder, windows).items():
            lost = loss - reference
            interval = 1.96 * float(lost.std()) / len(lost) ** 0.5
            rows.setdefault(title, []).append(f"{float(lost.mean()):.4f} ± {interval:.4f}")
    with capsys.disabled():
        print(f"\nfloat {reference.mean():.5f} nats a character, {windows.shape[0]} windows")
        names = ["as it is", *(f"rotated, seed {seed}" for seed in SEEDS)]
        print(f"{'':36}" + "".join(f"{name:>20}" for name in names))
        for title, values in rows.items():
            print(f"{title:36}" + "".join(f"{value:>20}" for value in values), flush=True)
