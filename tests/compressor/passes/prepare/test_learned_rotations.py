"""``rotate`` with ``learn``: what is learned is what will be judged, and it is never worse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressor.errors import SpecError
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.transformers.block_checkpoint import BlockCheckpoint, open_blocks
from compressor.passes.prepare import learned_rotations
from compressor.passes.prepare.learned_rotations import Recipe, RotatedNetwork, learned
from compressor.passes.prepare.maths.orthogonal import Rounding
from compressor.passes.prepare.maths.rotation import DenseRotation
from compressor.passes.prepare.rotate import Rotate
from compressor.passes.prepare.rotated_decoder import Rotations, random_rotations, rotated, untied
from compressor.passes.quantize.weights.layers import Preset
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.passes import PassContext
from tests.compressor.exporters.test_activation_formats import ran, spec
from tests.compressor.passes.prepare.test_rotate import (
    ANY,
    TOKENS,
    by_blocks,
    network,
    perplexity,
    saved,
    tokens_of,
)

BATCHES = np.random.default_rng(1).integers(2, 300, (9, 2, 16))


class Text:
    """Calibration data."""

    made_up = False

    def probe(self, count: int) -> Any:
        raise AssertionError(count)

    def batches(self) -> Iterator[dict[str, Any]]:
        for batch in BATCHES:
            yield {"input_ids": batch}


class Kept:
    """Keeps what is written, and fails after some writes."""

    def __init__(self, last: int = 1000):
        self.tensors: Mapping[str, torch.Tensor] = {}
        self._left = last

    def read(self) -> Mapping[str, torch.Tensor]:
        return self.tensors

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


CONTEXT = PassContext(seed=3, samples=Text())


def opened(path: Path, kind: str) -> BlockCheckpoint:
    carrier = untied(open_blocks(saved(path / kind, kind)))
    assert isinstance(carrier, BlockCheckpoint)
    return carrier


def matrices(rotations: Rotations) -> list[torch.Tensor]:
    return [
        t.times(torch.eye(len(t), dtype=torch.float64))
        for t in (rotations.residual, *rotations.heads)
    ]


class Unrounded(Recipe):
    """Rounds nothing."""

    def of_weight(self, layer: Any) -> None:
        del layer

    def of_inputs(self, layer: Any) -> None:
        del layer


@pytest.mark.parametrize("kind", ["llama-linear", "llama-3", "qwen2", "qwen3"])
@pytest.mark.parametrize("heads", [True, False])
def test_nothing_is_lost_in_floats(kind: str, heads: bool, tmp_path: Path) -> None:
    carrier = opened(tmp_path, kind)
    lossless = RotatedNetwork(carrier, Unrounded("int8", 1))
    assert abs(lossless.loss(TOKENS, random_rotations(carrier, 3, heads=heads))) < 1e-6


@pytest.mark.parametrize("preset", ["int2-g32", "int8-w8a8", "mxfp4-w4a4"])
@pytest.mark.parametrize("kind", ["qwen2", "llama-3"])
def test_the_loss_is_that_of_the_network_that_is_written(
    preset: Preset, kind: str, tmp_path: Path
) -> None:
    carrier = opened(tmp_path, kind)
    rotations = random_rotations(carrier, 3, heads=True)
    after = rotated(carrier, rotations)
    context = PassContext(targets=frozenset({"compressed-tensors"}))
    rounded = QuantizeWeights(preset=preset).apply(after, context, {}).carrier
    assert isinstance(rounded, BlockCheckpoint)
    wanted, got = (by_blocks(c).log_softmax(-1) for c in (carrier, rounded))
    divergence = (wanted.exp() * (wanted - got)).sum(-1).mean()
    assert divergence > 1e-5
    loss = RotatedNetwork(carrier, Recipe(preset, 1)).loss(TOKENS, rotations)
    assert loss == pytest.approx(float(divergence), rel=0.02)


class Shared(Recipe):
    """Its errors are fixed shares of the range, of which the gradient is exact."""

    def of_weight(self, layer: Any) -> Rounding:
        del layer
        return Rounding(_shared, 16)

    def of_inputs(self, layer: Any) -> Rounding:
        del layer
        return Rounding(_shared)


def _shared(values: torch.Tensor) -> torch.Tensor:
    groups = values.reshape(*values.shape[:-1], -1, 16 if values.dim() == 2 else values.shape[-1])
    pattern = torch.linspace(-1, 1, groups.shape[-1])
    return values + (0.05 * groups.abs().amax(-1, keepdim=True) * pattern).reshape(values.shape)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_gradients_are_those_of_differences(kind: str, tmp_path: Path) -> None:
    carrier = opened(tmp_path, kind)
    bent = RotatedNetwork(carrier, Shared("int8", 1))
    rotations = Rotations(*_dense(random_rotations(carrier, 3, heads=True)))
    value, gradients = bent.gradients(TOKENS, rotations)
    assert value == pytest.approx(bent.loss(TOKENS, rotations), rel=1e-5)
    generator = torch.Generator().manual_seed(0)
    for place, matrix in enumerate(matrices(rotations)):
        skew = torch.randn(matrix.shape, generator=generator, dtype=torch.float64)
        skew = (skew - skew.T) / skew.norm()
        losses = []
        for size in (0.003, -0.003):  # beyond that, other values become the greatest
            moved = matrices(rotations)
            moved[place] = torch.linalg.matrix_exp(size * skew) @ matrix
            residual, *heads = map(DenseRotation, moved)
            losses.append(bent.loss(TOKENS, Rotations(residual, tuple(heads))))
        difference = (losses[0] - losses[1]) / 0.006
        wanted = float((gradients[place].double() * (skew @ matrix)).sum())
        assert wanted == pytest.approx(difference, rel=0.02, abs=4e-5)


def _dense(rotations: Rotations) -> tuple[DenseRotation, tuple[DenseRotation, ...]]:
    residual, *heads = map(DenseRotation, matrices(rotations))
    return residual, tuple(heads)


def test_learned_matrices_lose_less_and_the_function_stays(tmp_path: Path) -> None:
    carrier = opened(tmp_path, "qwen2")
    start = random_rotations(carrier, 3, heads=True)
    found = learned(carrier, start, Recipe("int2-g32", 12), CONTEXT)
    assert found.after < 0.98 * found.before
    assert f"{found.before:.4f} nats a token" in found.note
    for matrix in matrices(found.rotations):
        one = torch.eye(len(matrix), dtype=torch.float64)
        assert torch.allclose(matrix @ matrix.T, one, atol=1e-12)
    error = (by_blocks(rotated(carrier, found.rotations)) - by_blocks(carrier)).abs().max()
    assert error < 1e-5 * by_blocks(carrier).abs().max()
    again = learned(carrier, start, Recipe("int2-g32", 12), CONTEXT)
    assert all(map(torch.equal, matrices(found.rotations), matrices(again.rotations)))


def test_what_is_no_better_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_rotations, "_ANGLE", -0.3)  # uphill
    carrier = opened(tmp_path, "qwen3")
    start = random_rotations(carrier, 3, heads=True)
    found = learned(carrier, start, Recipe("int2-g32", 4), CONTEXT)
    assert found.after > found.before
    assert found.rotations is start
    assert "the random ones stay" in found.note


def test_a_run_that_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_rotations, "_KEPT_EVERY", 2)
    carrier = opened(tmp_path, "qwen3")
    run = partial(learned, carrier, random_rotations(carrier, 3, heads=True), Recipe("int4-g32", 5))
    whole = run(replace(CONTEXT, kept_tensors=Kept()))
    kept = Kept(last=2)
    with pytest.raises(KeyboardInterrupt):
        run(replace(CONTEXT, kept_tensors=kept))
    seen = []
    follow = learned_rotations._State.follow

    def counted(state: Any, *given: Any) -> None:
        seen.append(state.step)
        follow(state, *given)

    monkeypatch.setattr(learned_rotations._State, "follow", counted)
    resumed = run(replace(CONTEXT, kept_tensors=kept))
    assert seen == [4], "four steps were kept"
    assert all(map(torch.equal, matrices(whole.rotations), matrices(resumed.rotations)))
    seen.clear()
    finished = run(replace(CONTEXT, kept_tensors=kept))
    assert not seen
    assert (finished.before, finished.after) == (whole.before, whole.after)


def test_it_needs_blocks_and_text(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", "qwen2")
    declared = Rotate(learn="int4-g32")
    assert declared.replays
    assert not Rotate().replays
    for carrier in (open_checkpoint(folder), network(folder)):
        with pytest.raises(SpecError, match="runs the blocks of a checkpoint on text"):
            declared.survey(carrier, CONTEXT)
    assert declared.survey(open_blocks(folder), CONTEXT).memory


@pytest.mark.slow
def test_a_spec_that_was_killed_while_it_learned_ends_in_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "float32", "llama-3")
    tokens_of(tmp_path)
    preset: Preset = "int2-g32"
    learns = {"pass": "rotate", "learn": preset, "steps": 6}
    quantizes = {"pass": "quantize-weights", "preset": preset}

    def run(name: str, *passes: Mapping[str, Any]) -> dict[str, Any]:
        options = {"passes": list(passes), "limits": ANY}
        return ran(spec(tmp_path, "float32", {}, tmp_path / name, **options))

    monkeypatch.setattr(learned_rotations, "_KEPT_EVERY", 2)
    report = run("whole", learns, quantizes)
    (note,) = (n for n in report["passes"][0]["notes"] if "judged on text held back" in n)
    assert "random ones stay" not in note
    seen = []
    follow = learned_rotations._State.follow

    def counted(state: Any, *given: Any) -> None:
        seen.append(state.step)
        if seen == [0, 1, 2, 3, 4, 5]:
            raise KeyboardInterrupt
        follow(state, *given)

    monkeypatch.setattr(learned_rotations._State, "follow", counted)
    with pytest.raises(KeyboardInterrupt):
        run("killed", learns, quantizes)
    run("killed", learns, quantizes)
    assert seen[6:] == [4, 5], "four steps were kept"
    first, second = (tmp_path / name / "model.safetensors" for name in ("whole", "killed"))
    assert first.read_bytes() == second.read_bytes()
    artifact = report["artifacts"][0]
    assert perplexity(tmp_path / "whole") == pytest.approx(artifact["metric"]["value"], rel=1e-4)
    random = run("random", {"pass": "rotate"}, quantizes)
    assert artifact["kl"] < random["artifacts"][0]["kl"]
