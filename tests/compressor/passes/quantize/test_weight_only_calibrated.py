"""quantize-weights with calibration data: GPTQ and AWQ, block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from compressor.errors import DataError
from compressor.graph.blocks import partition
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.quantize.code_training import Recipe
from compressor.passes.quantize.weights import gptq
from compressor.run.blocks.blockwise import Feed, GraphBlocks
from compressor.types.carrier import Carrier
from compressor.types.tensors import Array, Batch
from tests.compressor.passes.prepare.networks import scaled_layers
from tests.compressor.passes.quantize.weight_only_models import (
    ANY,
    WIDTH,
    batches,
    codes,
    error,
    images,
    quantized,
    reasons,
    same,
    weights,
)


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("options", [{"bits": 4, "group": 32}, {"bits": 3}, {"preset": "nvfp4"}])
def test_calibrated_methods_lose_less_than_rounding_to_nearest(language, tmp_path, method, options):
    nearest = quantized(weights(**options), language, tmp_path)
    outcome = quantized(weights(method=method, **options), language, tmp_path)
    assert error(language, outcome.carrier) < 0.7 * error(language, nearest.carrier)
    touched = {layer.name for layer in outcome.layers}
    assert touched == {f"{n}.{i}" for n in ("gate", "up", "down") for i in range(2)}
    assert all((layer.weight_sqnr_db or 0) > 5 for layer in outcome.layers)


def test_moments_are_asked_for_once_a_value(language):
    survey = weights(method="gptq", bits=4).survey(language, ANY)
    assert weights(method="gptq", bits=4).by_block
    assert len(survey.requests) == 4, "gate and up read the same value"


def test_each_block_sees_the_quantized_one_before_it(language, tmp_path):
    declared = weights(method="gptq", bits=2, group=32)
    survey = declared.survey(language, ANY)
    graph = language.graph()
    blocks = GraphBlocks(graph, partition(graph), survey.requests, Feed(batches(), tmp_path))
    seen = {}

    class Watched:
        def __len__(self) -> int:
            return len(blocks)

        def __iter__(self) -> Iterator[Any]:
            for block in blocks:
                seen.update(block.statistics)
                yield block

    outcome = declared.apply(language, replace(ANY, blocks=Watched()), {})
    request = next(r for r in survey.requests if r.key == list(seen)[2])
    after = outcome.carrier.runner([request.tensor])
    vectors = np.concatenate([after.run(b)[request.tensor].reshape(-1, WIDTH) for b in batches()])
    found = seen[request.key]
    taken = vectors[: found.rows]
    np.testing.assert_allclose(found.second[0], taken.T @ taken, rtol=1e-3, atol=1e-2)


def test_awq_moves_scales_into_norms_and_the_layer_before(language, tmp_path):
    outcome = quantized(weights(method="awq", bits=4, group=32), language, tmp_path)
    before, after = language.tensors(), outcome.carrier.tensors()
    changed = {
        name
        for name, tensor in after.items()
        if tensor.codes is None and not torch.equal(tensor.read(), before[name].read())
    }
    assert changed == {f"norms.{i}.{n}" for i in range(2) for n in ("weight", "bias")} | {
        f"up.{i}.bias" for i in range(2)
    }
    assert scaled_layers(language, outcome, batches()[0]) == {"up.0", "up.1"}


def test_layers_whose_input_is_not_seen_are_rounded_to_nearest(mixed, tmp_path):
    declared = weights(method="gptq", bits=8)
    assert "rounded to nearest" in reasons(declared, mixed)["wide"]
    outcome = quantized(declared, mixed, tmp_path, images())
    want = codes(weights(bits=8, range="mse").apply(mixed, ANY, {}).carrier)
    found = codes(outcome.carrier)
    same(found["wide.weight"], want["wide.weight"])
    assert not torch.equal(found["depth.weight"].codes, want["depth.weight"].codes)
    assert {layer.name for layer in outcome.layers} == {"conv", "depth", "wide", "fc", "last"}


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_few_bits_are_visited_more_often(language, tmp_path, monkeypatch, bits):
    declared, layer = weights(method="gptq", bits=bits, group=32), "gate.0.weight"
    usual = codes(quantized(declared, language, tmp_path).carrier)[layer]
    monkeypatch.setattr(gptq, "_SWEEPS", 1)
    once = codes(quantized(declared, language, tmp_path).carrier)[layer]
    assert torch.equal(usual.codes, once.codes) == (bits == 4)
    if bits < 4:  # the first layer, whose inputs are those of the float model
        matrix = language.tensors()[layer].read()
        vectors = torch.from_numpy(
            np.concatenate([observed_inputs(language, b) for b in batches()])
        )
        losses = [(vectors @ (q.dequantize() - matrix).T).square().sum() for q in (usual, once)]
        assert losses[0] < losses[1]


def observed_inputs(model: Carrier, batch: Batch) -> Array:
    """What the first layers read, ``[vectors, columns]``."""
    survey = weights(method="gptq", bits=4).survey(model, ANY)
    tensor = survey.requests[0].tensor
    return model.runner([tensor]).run(batch)[tensor].reshape(-1, WIDTH)


def same_in_graphs(file: Carrier, module: Carrier) -> None:
    held, own = (x.graph().graph.initializers for x in (file, module))
    for name in codes(module):
        for each in (name, f"{name}_scale"):
            assert np.array_equal(held[each].const_value.numpy(), own[each].const_value.numpy())


ZEROS = pytest.param({"symmetric": False}, marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [{"group": 32}, ZEROS])
def test_trained_codes_lose_less_than_those_of_gptq(language, tmp_path, monkeypatch, options):
    """On module and file alike; where a block is no better, nothing changes."""
    monkeypatch.setattr(gptq, "_RECIPE", Recipe(steps=40, batch=8, rate=0.02, size_rate=0.01))
    data = batches(16)
    started = quantized(weights(method="gptq", bits=2, **options), language, tmp_path, data)
    declared = weights(method="reconstruct", bits=2, **options)
    outcome = quantized(declared, language, tmp_path, data)
    # Measured: 0.74 and 0.79
    assert error(language, outcome.carrier) < 0.9 * error(language, started.carrier)
    for layer in outcome.layers:
        assert layer.details["block_error"] <= layer.details["before"]
    file = quantized(declared, OnnxCarrier(language.graph()), tmp_path, data).carrier
    same_in_graphs(file, outcome.carrier)
    monkeypatch.setattr(gptq, "_RECIPE", Recipe(steps=2, batch=8, rate=100.0, size_rate=9.0))
    spoiled = quantized(declared, language, tmp_path, data).carrier
    for name, kept in codes(started.carrier).items():
        same(kept, codes(spoiled)[name])


def divergence(model: Carrier, other: Carrier) -> float:
    """Mean nats a token on data that was not calibrated with."""
    batch = batches(4, seed=9)[0]
    exact, found = (
        torch.log_softmax(torch.from_numpy(next(iter(m.runner().run(batch).values()))), -1)
        for m in (model, other)
    )
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def test_codes_that_are_trained_together_lower_the_divergence(language, tmp_path, monkeypatch):
    """On module and file alike; where it does harm, codes and scales stay."""
    steps = {"steps": 60, "batch": 8}
    monkeypatch.setattr(gptq, "_RECIPE", Recipe(**steps, rate=0.02, size_rate=0.01))
    monkeypatch.setattr(gptq, "_JOINT", Recipe(**steps, rate=0.02, size_rate=0.02))
    options, data = {"bits": 2, "group": 32}, batches(16)
    declared, scored = weights(method="reconstruct", **options), replace(ANY, metric="perplexity")
    started = quantized(weights(method="gptq", **options), language, tmp_path, data)
    by_block = quantized(declared, language, tmp_path, data, replace(ANY, metric="mse"))
    together = quantized(declared, language, tmp_path, data, scored)
    losses = [divergence(language, x.carrier) for x in (started, by_block, together)]
    print("LOSSES", losses)
    assert losses[2] < 0.9 * min(losses[:2])
    assert "divergence" in together.notes[-1]
    assert not any("divergence" in note for note in by_block.notes)
    file = quantized(declared, OnnxCarrier(language.graph()), tmp_path, data, scored).carrier
    same_in_graphs(file, together.carrier)
    monkeypatch.setattr(gptq, "_JOINT", Recipe(steps=2, batch=8, rate=5.0, size_rate=5.0))
    spoiled = quantized(declared, language, tmp_path, data, scored)
    for name, kept in codes(started.carrier).items():
        same(kept, codes(spoiled.carrier)[name])


def test_the_plan_counts_what_training_together_takes(language):
    """A step's values, and several times the weights; training by block takes no more than GPTQ."""
    declared, shapes = weights(method="reconstruct", bits=2, group=32), {"tokens": (1, 12)}
    scored = replace(ANY, metric="perplexity", shapes=shapes)
    found = declared.survey(language, scored).memory
    longer = declared.survey(language, replace(scored, shapes={"tokens": (1, 24)})).memory
    layers = [layer for layer in language.layers() if not layer.is_table]
    numbers = sum(math.prod(layer.shape) for layer in layers)
    assert found > 8 * 4 * numbers
    assert 0 < longer - found < found
    assert declared.survey(language, replace(scored, metric="mse")).memory == 0
    assert weights(method="gptq", bits=2, group=32).survey(language, scored).memory == 0


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_tables_and_the_output_layer_are_quantized_where_asked(language, tmp_path, method):
    declared = weights(method=method, bits=8, embeddings=True)
    assert "rounded to nearest" in reasons(declared, language)["embed_tokens"]
    outcome = quantized(declared, language, tmp_path)
    assert {"embed_tokens", "lm_head"} < {layer.name for layer in outcome.layers}
    assert error(language, outcome.carrier) < 1e-3


def test_a_layer_without_statistics_is_an_error(language):
    class Blind:
        weights = tuple(layer.weight for layer in language.layers())
        statistics: dict[str, Any] = {}  # noqa: RUF012

        def kept(self, make: Any) -> Any:
            return make()

        def replace(self, changes: Any) -> None:
            raise AssertionError(changes)

    for method in ("gptq", "awq"):
        with pytest.raises(DataError, match="found nothing about its input"):
            weights(method=method, bits=4).apply(language, replace(ANY, blocks=[Blind()]), {})
