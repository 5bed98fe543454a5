"""Codes of a checkpoint that are trained block by block, in the memory of one block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from compressor.errors import SpecError
from compressor.models.transformers.block_checkpoint import open_blocks
from compressor.passes.quantize import block_codes
from compressor.passes.quantize.code_training import Recipe
from compressor.passes.quantize.weights import gptq
from compressor.progress import quiet_libraries
from compressor.run.blocks.decoder_blocks import decoder_run
from compressor.run.blocks.sensitivity import Sensitivity
from compressor.run.pipeline import run_passes
from compressor.types.carrier import Carrier
from tests.compressor.run.blocks.test_decoder_blocks import (
    LAYERS,
    SIZES,
    WORDS,
    folder_of,
    opened_blocks,
    passed,
    values,
    workspace,
)

GPTQ = {"pass": "quantize-weights", "method": "gptq", "bits": 2, "group": 16}
STEP = {**GPTQ, "method": "reconstruct"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tokens = np.random.default_rng(0).integers(0, WORDS, (64, 24))
    np.savez(folder / "tokens.npz", input_ids=tokens)
    folder_of(folder / "wide", transformers.LlamaConfig(**SIZES))
    folder_of(folder / "half", transformers.LlamaConfig(**SIZES), torch.bfloat16)
    return folder


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(steps=12, batch=8, rate=0.02, size_rate=0.01)
    monkeypatch.setattr(gptq, "_STREAMED", recipe)


def network(folder: Path) -> Any:
    with quiet_libraries():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def divergence(folder: Path, carrier: Carrier) -> float:
    """Mean nats a token from the float network, on tokens that nothing was calibrated with."""
    tokens = torch.randint(0, WORDS, (16, 24), generator=torch.Generator().manual_seed(9))
    model = network(folder)
    state = model.state_dict()
    with torch.inference_mode():
        exact = model(tokens).logits.log_softmax(-1)
        for name, tensor in carrier.tensors().items():
            if tensor.codes is not None:
                codes = tensor.codes.read(carrier.weight)
                state[name].copy_(tensor.codes.layer.stored(codes.dequantize()))
        found = model(tokens).logits.log_softmax(-1)
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def spoiling(after: int) -> Callable[..., Any]:
    """Return what stops a run in place of training a block, once so many are done."""
    made, calls = block_codes._made, 0

    def counted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        return made(*given)

    return counted


def test_trained_blocks_lose_less_than_those_of_gptq(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gptq, "_STREAMED", Recipe(steps=40, batch=8, rate=0.02, size_rate=0.01))
    started = passed(llama, "wide", GPTQ, tmp_path / "gptq")
    trained = passed(llama, "wide", STEP, tmp_path / "trained")
    losses = [divergence(llama / "wide", carrier) for carrier in (started, trained)]
    assert losses[1] < 0.9 * losses[0]
    before, after = values(started), values(trained)
    for name, codes in before.items():
        inside = ".layers." in name
        assert torch.equal(codes, after[name]) != inside, name


def test_blocks_that_gain_nothing_keep_the_codes_of_gptq(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started = values(passed(llama, "half", GPTQ, tmp_path / "gptq"))
    spoiled = Recipe(steps=2, batch=8, rate=100.0, size_rate=9.0)
    monkeypatch.setattr(gptq, "_STREAMED", spoiled)
    kept = values(passed(llama, "half", STEP, tmp_path / "trained"))
    assert all(torch.equal(kept[name], codes) for name, codes in started.items())


def test_a_killed_run_goes_on_with_the_next_block(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of bfloat16 weights, which are trained as floats of 32 bits."""
    whole = values(passed(llama, "half", STEP, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(block_codes, "_made", spoiling(after=1))
        with pytest.raises(KeyboardInterrupt):
            passed(llama, "half", STEP, tmp_path / "killed")
    opened = opened_blocks(monkeypatch)
    again = values(passed(llama, "half", STEP, tmp_path / "killed"))
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    assert opened == [1, 2], "block 0 is not run again, and what errors do is known"
    assert not list((tmp_path / "killed").glob("partial-*"))


def test_what_errors_do_is_that_of_the_whole_network(llama: Path, tmp_path: Path):
    """The gradients of blocks one by one are those of the network, for the tokens drawn."""
    made = workspace(llama, "wide", STEP, tmp_path)
    carrier = open_blocks(llama / "wide")
    tokens = torch.from_numpy(np.load(llama / "tokens.npz")["input_ids"][:6])
    with decoder_run(made, "quantize-weights", "0" * 64, carrier, ()) as blocks:
        found = Sensitivity(blocks, torch.split(tokens, 4), seed=3)
        felt = [found.of(index) for index in range(LAYERS)]
    model, flowing = network(llama / "wide"), list[torch.Tensor]()

    def watched(_: Any, __: Any, out: Any) -> None:
        value = out if isinstance(out, torch.Tensor) else out[0]
        value.retain_grad()
        flowing.append(value)

    for block in model.model.layers:
        block.register_forward_hook(watched)
    random, expected = torch.Generator().manual_seed(3), [torch.zeros(())] * LAYERS
    for part in torch.split(tokens, 4):
        flowing.clear()
        scores = model(part).logits.log_softmax(-1).flatten(0, 1)
        drawn = torch.multinomial(scores.detach().exp(), 1, generator=random)
        (-scores.gather(1, drawn).sum()).backward()
        gradients = [value.grad.flatten(0, 1) for value in flowing if value.grad is not None]
        expected = [e + g.T @ g for e, g in zip(expected, gradients, strict=True)]
    for matrix, summed in zip(felt, expected, strict=True):
        torch.testing.assert_close(matrix, summed / tokens.numel(), rtol=1e-3, atol=1e-5)


def test_the_plan_says_how_blocks_are_trained_and_counts_what_that_takes(
    llama: Path, tmp_path: Path
):
    made = workspace(llama, "wide", STEP, tmp_path).plan
    (planned,) = made.passes
    assert any("one block after the other" in note for note in planned.notes)
    carrier = open_blocks(llama / "wide")
    assert planned.memory > 8 * carrier.decoder.largest_block
    longer = replace(made.context, shapes={"input_ids": (1, 4096)})
    step = made.spec.passes[0]
    assert step.survey(carrier, longer).memory > planned.memory
    assert not workspace(llama, "wide", GPTQ, tmp_path).plan.passes[0].memory


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "int8-w8a8"}, "trains weights whose inputs are floats"),
        ({"preset": "mxfp4"}, "trains weights to integers, layer"),
    ],
)
def test_what_is_not_trained_is_refused(
    llama: Path, tmp_path: Path, options: dict[str, Any], message: str
):
    step = {"pass": "quantize-weights", "method": "reconstruct", **options}
    with pytest.raises(SpecError, match=message):
        workspace(llama, "half", step, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen3Config(**SIZES, head_dim=8),
        transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=8),
        transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    ],
    ids=lambda config: config.model_type,
)
def test_blocks_of_other_classes(
    llama: Path, tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
):
    """Sliding attention, and experts, which are trained by the tokens that they are sent."""
    monkeypatch.setattr(gptq, "_STREAMED", Recipe(steps=40, batch=8, rate=0.02, size_rate=0.01))
    np.savez(tmp_path / "tokens.npz", **np.load(llama / "tokens.npz"))
    folder_of(tmp_path / "model", config)
    (step,) = run_passes(workspace(tmp_path, "model", STEP, tmp_path / "out"))
    errors = [
        (layer["details"]["block_nats"], layer["details"]["before"])
        for layer in step.result["layers"]
        if ".layers." in layer["name"] and layer["scheme"] != "float32"
    ]
    assert len(errors) >= 7 * LAYERS
    assert all(after < before for after, before in errors), errors
