"""Nats a character that few bits cost small decoders: as they are, rotated, and as it is learned.

``rotate`` folds what it can into weights. What ``down_proj`` reads stays as it was, so inputs of 4
bits are measured for all layers, for all but ``down_proj``, and as if the network turned what
``down_proj`` reads by a Hadamard matrix as it runs, and had weights for that. Keys and values of
few bits have weights in floats beside them, and each token of each head a scale and a zero point;
keys are also measured as if the network turned them, and what is multiplied with them. Nothing
folds these two. The learned matrices are those for the format at hand; for integers of 4 bits,
which are no preset, those for ``W4A4, 4-bit integers``, and for keys and values too. Losses are
means over windows of held-out text, each minus the float model's; the interval is that of the mean
over windows.

Two networks: the Llama of the samples, and a Qwen3 of another width with tied embeddings, which is
trained here.
"""

from __future__ import annotations

import copy
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from compressor.files import json_text
from compressor.models.checkpoint.carrier import CheckpointCarrier, open_checkpoint
from compressor.models.rounded_inputs import rounded_inputs
from compressor.models.transformers.block_checkpoint import BlockCheckpoint, open_blocks
from compressor.models.transformers.cached_attention import change_cache, keeps_cache
from compressor.passes.prepare.learned_rotations import Recipe, learned
from compressor.passes.prepare.maths.orthogonal import Rounding
from compressor.passes.prepare.maths.rotation import rotation
from compressor.passes.prepare.rotated_decoder import Rotations, random_rotations, rotated, untied
from compressor.passes.quantize.weights.layers import Preset
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.report.run import run_spec
from compressor.spec.load import check_spec
from compressor.spec.source_text import Document
from compressor.types.passes import PassContext
from compressor.types.rounded_inputs import InputScheme
from tests.benchmarks.language import LENGTH, Logits, nats

SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-llama"
WINDOWS = 64  # 16,384 characters, at even distances
TEXTS, STEPS = 128, 50  # to learn from
SIZES = {
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True,
}  # fmt: skip
TRAINING, BATCH, RATE = 300, 8, 5e-3
TWO_BITS: dict[str, Any] = {"bits": 2, "group": 32, "symmetric": False}
WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "2-bit weights, rtn": ("int2-g32", TWO_BITS),
    "2-bit weights, hqq": ("int2-g32", {**TWO_BITS, "method": "hqq"}),
    "4-bit weights, rtn": ("int4-g32", {"bits": 4, "group": 32}),
}
FLOATS = ("mxfp4", "nvfp4")
INTEGERS = "W4A4, 4-bit integers"
DOWN = "down_proj"
CACHE_BITS = (4, 3)
LEARNED = {
    "llama": ("int2-g32", "int4-g32", "mxfp4-w4a4", "nvfp4-w4a4", INTEGERS),
    "qwen3": ("int2-g32", INTEGERS),
}


def four_bits(values: Tensor) -> Tensor:
    """Round each token to 15 steps of its greatest magnitude."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
    return (values / scale).round() * scale


class Integers(Recipe):
    """Weights of 4 bits in groups, and inputs of 4 bits with a scale for each token."""

    def of_inputs(self, layer: Any) -> Rounding:
        """Return how what a layer reads is rounded."""
        del layer
        return Rounding(four_bits)


class Texts:
    """What is learned from."""

    made_up = False

    def __init__(self, tokens: Tensor):
        starts = torch.randint(
            len(tokens) - LENGTH, (TEXTS,), generator=torch.Generator().manual_seed(0)
        )
        self._rows = torch.stack([tokens[s : s + LENGTH] for s in starts])

    def probe(self, count: int) -> Any:
        """Return the first ones."""
        return {"input_ids": self._rows[:count].numpy()}

    def batches(self) -> Iterator[Any]:
        """Yield them one by one."""
        for row in self._rows:
            yield {"input_ids": row[None].numpy()}


def trained(folder: Path, tokens: Tensor, kind: str = "qwen3") -> Path:
    """Train a small network of a width that is no power of two; only a Qwen3's is tied."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": 66, "max_position_embeddings": 512}
    sizes["tie_word_embeddings"] = kind == "qwen3"
    config = transformers.AutoConfig.for_model(kind, **sizes)
    network = transformers.AutoModelForCausalLM.from_config(config)
    rates = {"max_lr": RATE, "total_steps": TRAINING, "pct_start": 0.05}
    optimizer = torch.optim.AdamW(network.parameters(), RATE, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, **rates)
    for _ in range(TRAINING):
        rows = torch.stack(
            [tokens[s : s + LENGTH + 1] for s in torch.randint(len(tokens) - LENGTH, (BATCH,))]
        )
        logits = network(input_ids=rows[:, :-1], use_cache=False).logits
        optimizer.zero_grad()
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    network.save_pretrained(folder)
    return folder


def saved(carrier: BlockCheckpoint, rotations: Rotations | None, folder: Path) -> Path:
    """Write a turned checkpoint, or one as it is."""
    made = carrier if rotations is None else rotated(carrier, rotations)
    assert isinstance(made, CheckpointCarrier)
    folder.mkdir()
    tensors = {name: tensor.read().clone() for name, tensor in made.tensors().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json_text(dict(made.config)))
    return folder


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


def rounding(network: nn.Module, change: Any, kept: str = "", instead: Any = None) -> nn.Module:
    """Return a copy whose linear layers round what they read.

    Args:
        change: takes a layer, and lets it round.
        kept: the layers that do not; with ``instead``, those that round by it.
    """
    module = copy.deepcopy(network)
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear) or name.endswith("lm_head"):
            continue
        if not kept or not name.endswith(kept):
            change(layer)
        elif instead is not None:
            instead(layer)
    return module


def hooked(nearest: Any, layer: nn.Module) -> None:
    """Let a layer round what it reads."""
    layer.register_forward_pre_hook(lambda _, args: (nearest(args[0]), *args[1:]))


def turned(nearest: Any, layer: nn.Module) -> None:
    """Let a layer turn what it reads by a Hadamard matrix, and round that."""
    assert isinstance(layer, nn.Linear)
    turn = rotation(layer.in_features, seed=0)
    hooked(lambda values: nearest(turn.times(values).to(values.dtype)), layer)


def turned_down(folder: Path) -> tuple[nn.Module, Path]:
    """Return a network whose ``down_proj`` wants turned inputs, and its folder."""
    import transformers

    made = folder.with_name(f"{folder.name}-down")
    shutil.copytree(folder, made)
    tensors = load_file(made / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("down_proj.weight"):
            tensors[name] = rotation(weight.shape[1], seed=0).times(weight).to(weight.dtype)
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return Logits(transformers.AutoModelForCausalLM.from_pretrained(made).float()), made


def float_inputs(name: Any, values: Tensor) -> Tensor:
    """Round what a layer reads to floats of 4 bits."""
    largest = float(values.abs().amax()) if name == "nvfp4" else None
    return rounded_inputs(values, InputScheme(name, largest=largest))


def solved(folder: Path) -> nn.Module:
    """Return the network whose 2-bit weights gptq has found, as transformers opens it."""
    import transformers

    out = folder.with_name(f"{folder.name}-gptq")
    text = {"text": str(SAMPLE / "calibration.txt"), "tokenizer": str(SAMPLE / "checkpoint")}
    value = {
        "version": 1,
        "name": out.name,
        "model": {"checkpoint": str(folder)},
        "data": {
            "calibration": {
                **text, "length": LENGTH, "samples": TEXTS, "inputs": {"input_ids": "input_ids"}
            }
        },
        "passes": [{"pass": "quantize-weights", "method": "gptq", **TWO_BITS}],
        "exports": [{"format": "safetensors", "layout": "compressed-tensors"}],
        "output": str(out),
    }  # fmt: skip
    run_spec(check_spec(Document(Path("spec.yaml"), value)))
    made: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(out).float()
    return Logits(made)


def variants(network: nn.Module, folder: Path, wanted: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield each format of a network that belongs to what was learned for, with its title."""
    online = turned_down(folder)
    for title, (preset, options) in WEIGHTS.items():
        if wanted in ("", preset):
            yield title, quantized(network, folder, options)
    if wanted in ("", "int2-g32"):
        yield "2-bit weights, gptq", solved(folder)
    for name in FLOATS:
        if wanted in ("", f"{name}-w4a4"):
            nearest = partial(float_inputs, name)
            narrow = quantized(network, folder, {"preset": name})
            yield f"W4A4, {name}", rounding(narrow, partial(hooked, nearest))
            narrow = quantized(*online, {"preset": name})
            made = rounding(narrow, partial(hooked, nearest), DOWN, partial(turned, nearest))
            yield f"W4A4, {name}, {DOWN} turned", made
    if wanted in ("", INTEGERS):
        options, hook = WEIGHTS["4-bit weights, rtn"][1], partial(hooked, four_bits)
        narrow = quantized(network, folder, options)
        yield INTEGERS, rounding(narrow, hook)
        yield f"{INTEGERS}, but {DOWN}", rounding(narrow, hook, DOWN)
        narrow = quantized(*online, options)
        made = rounding(narrow, hook, DOWN, partial(turned, four_bits))
        yield f"{INTEGERS}, {DOWN} turned", made
        for bits in CACHE_BITS:
            for turn in (False, True):
                title = f"{bits}-bit keys and values" + (", turned keys" if turn else "")
                yield title, cached(network, bits, turned=turn)


def learned_for(carrier: BlockCheckpoint, start: Rotations, wanted: str, text: Texts) -> Rotations:
    """Return matrices that are learned for a preset, or for integers."""
    integers = wanted == INTEGERS
    recipe = Integers("int4-g32", STEPS) if integers else Recipe(cast("Preset", wanted), STEPS)
    begun = time.process_time()
    found = learned(carrier, start, recipe, PassContext(samples=text))
    seconds = time.process_time() - begun
    print(f"{wanted}: {found.note}, {seconds:.0f} s of the processor", flush=True)
    return found.rotations


@pytest.mark.benchmark
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_rotate(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    encode: Any = transformers.AutoTokenizer.from_pretrained(SAMPLE / "checkpoint")

    def tokens_of(path: Path) -> Tensor:
        text = path.read_text(encoding="utf-8")
        return torch.tensor(encode(text, add_special_tokens=False)["input_ids"])

    source = SAMPLE / "checkpoint"
    if name == "qwen3":
        whole = Path(os.environ.get("COMPRESSOR_DATA", "")) / "tinyshakespeare.txt"
        if not whole.is_file():
            pytest.skip("COMPRESSOR_DATA has no tinyshakespeare.txt")
        tokens = tokens_of(whole)
        source = trained(tmp_path / name, tokens[: len(tokens) * 9 // 10])
    unseen = tokens_of(SAMPLE / "evaluation.txt")
    windows = unseen[: len(unseen) // LENGTH * LENGTH - LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)
    windows = windows[:: len(windows) // WINDOWS][:WINDOWS]
    text = Texts(tokens_of(SAMPLE / "calibration.txt"))
    carrier = untied(open_blocks(source))
    assert isinstance(carrier, BlockCheckpoint)
    start = random_rotations(carrier, 0, heads=True)
    rows: dict[str, list[str]] = {}
    reference = torch.zeros(())

    def measure(folder: Path, wanted: str = "") -> None:
        nonlocal reference
        network = Logits(transformers.AutoModelForCausalLM.from_pretrained(folder).float())
        plain = nats(network, windows)
        reference = reference if rows else plain
        if not wanted:
            rows.setdefault("float", []).append(f"{float((plain - reference).mean()):.7f}")
        for title, module in variants(network, folder, wanted):
            lost = nats(module, windows) - reference
            interval = 1.96 * float(lost.std()) / len(lost) ** 0.5
            rows.setdefault(title, []).append(f"{float(lost.mean()):.4f} ± {interval:.4f}")
        for made in folder.parent.glob(f"{folder.name}*"):
            shutil.rmtree(made)

    with capsys.disabled():
        measure(saved(carrier, None, tmp_path / "plain"))
        measure(saved(carrier, start, tmp_path / "seed-0"))
        measure(saved(carrier, random_rotations(carrier, 1, heads=True), tmp_path / "seed-1"))
        for wanted in LEARNED[name]:
            rotations = learned_for(carrier, start, wanted, text)
            measure(saved(carrier, rotations, tmp_path / "learned"), wanted)
        print(f"\n{name}: float {reference.mean():.5f} nats a character, {len(windows)} windows")
        names = ["as it is", "seed 0", "seed 1", "learned from seed 0"]
        print(f"{'':42}" + "".join(f"{each:>20}" for each in names))
        for title, values in rows.items():
            print(f"{title:42}" + "".join(f"{value:>20}" for value in values), flush=True)
