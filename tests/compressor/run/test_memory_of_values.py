"""Inner values are looked at in portions: memory does not grow with samples times layers."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compressor.calibration import collect, portions
from compressor.calibration.collect import collect_statistics
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.run.evaluate import layer_signals
from compressor.run.noise import histograms
from compressor.run.noise.histograms import layer_histograms
from compressor.run.noise.noise import measured_noise
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from compressor.types.statistics import Request
from compressor.types.tensors import Batch, TensorSpec

LAYERS, CHANNELS, SIDE, SAMPLES = 6, 4, 96, 48
ONE = 4 * CHANNELS * SIDE**2  # bytes of a layer's output for a sample
ALL = LAYERS * SAMPLES * ONE  # 42 MB in each model
MOST = portions.MOST // 4
VALUES = histograms._MOST_VALUES // 4


@pytest.fixture(scope="module", autouse=True)
def small_portions() -> Iterator[None]:
    """Let portions, and what is counted, be a fourth of what they are: so are the activations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portions.Portions.__init__, "__defaults__", (MOST,))
        patch.setattr(collect, "MOST", MOST)
        patch.setattr(histograms, "_MOST_VALUES", VALUES)
        yield


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = np.random.default_rng(0)
    return {"image": rng.standard_normal((SAMPLES, CHANNELS, SIDE, SIDE), np.float32)}


@pytest.fixture(scope="module")
def models() -> tuple[Carrier, Carrier]:
    """Return a network with large activations and small weights, and it quantized."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(CHANNELS, CHANNELS, 1) for _ in range(LAYERS)]
    network = nn.Sequential(*(m for c in convolutions for m in (c, nn.Tanh())))
    shape = ("batch", CHANNELS, SIDE, SIDE)
    carrier = TorchCarrier(network, [TensorSpec("image", shape, "float32")])
    rules = ({"match": "*"},)  # some would be faster as floats
    declared = QuantizeStatic(weights={"rounding": "nearest"}, layers=rules)
    context = PassContext()
    requests = declared.survey(carrier, context).requests
    small = {"image": np.random.default_rng(1).standard_normal((2, *shape[1:])).astype(np.float32)}
    statistics = collect_statistics(carrier, [small], requests)
    return carrier, declared.apply(carrier, context, statistics).carrier


def peak(work: Callable[[], Any]) -> int:
    """Return the most bytes that Python's and numpy's allocators hold during some work."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_layers_are_compared_portion_by_portion(models: tuple[Carrier, Carrier], batch: Batch):
    carrier, changed = models
    found: dict[str, float | None] = {}
    held = peak(lambda: found.update(layer_signals(changed, carrier, [batch])))
    assert held < MOST + 40 * ONE < 2 * ALL
    taps = [layer.output for layer in changed.layers()]
    sums = {name: np.zeros(2) for name in taps}
    for start in range(0, SAMPLES, 2):
        part = {"image": batch["image"][start : start + 2]}
        want, have = carrier.runner(taps).run(part), changed.runner(taps).run(part)
        for name in taps:
            exact = want[name].astype(np.float64)
            sums[name] += [np.square(exact).sum(), np.square(have[name] - exact).sum()]
    for layer in changed.layers():
        signal, error = sums[layer.output]
        assert found[layer.name] == pytest.approx(10 * np.log10(signal / error), abs=1e-5)


def test_values_are_counted_portion_by_portion(models: tuple[Carrier, Carrier], batch: Batch):
    carrier, changed = models
    rows = [
        {"name": layer.name, "weight_sqnr_db": 40.0, "sqnr_db": 30.0} for layer in changed.layers()
    ]
    entries: list[dict[str, Any]] = []
    held = peak(lambda: entries.extend(layer_histograms(carrier, changed, [batch], rows)))
    # What is counted stays: some values of each layer.
    assert held < MOST + LAYERS * SAMPLES * ONE // 2 + 40 * ONE
    for entry in entries:
        assert entry["input"]["samples"] == SAMPLES
        step = -(-SAMPLES * ONE // 4 // VALUES)
        assert sum(entry["input"]["counts"]) == -(-SAMPLES * ONE // 4 // step)
        assert 0 <= entry["input"]["outside"] < 5


def test_noise_is_attributed_portion_by_portion(models: tuple[Carrier, Carrier], batch: Batch):
    carrier, changed = models
    few = {"image": batch["image"][:24]}
    held = peak(lambda: measured_noise(changed, carrier, [few]))
    assert held < 3 * 24 * ONE  # one layer's error at a time


def test_statistics_are_gathered_portion_by_portion(models: tuple[Carrier, Carrier], batch: Batch):
    carrier, _ = models
    requests = [Request(layer.output, "min-max") for layer in carrier.layers()]
    found: dict[str, Any] = {}
    held = peak(lambda: found.update(collect_statistics(carrier, [batch], requests)))
    # One portion is run while another is observed.
    assert held < 2 * MOST + 20 * ONE < 2 * ALL
    for request in requests:
        low, high = 0.0, 0.0
        for start in range(0, SAMPLES, 8):
            part = {"image": batch["image"][start : start + 8]}
            values = carrier.runner([request.tensor]).run(part)[request.tensor]
            low, high = min(low, values.min()), max(high, values.max())
        assert (found[request.key].low, found[request.key].high) == (low, high)
