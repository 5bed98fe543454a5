"""How well the ranges serve a real quantizer, in dB of signal to quantization noise."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.calibration.clipping import _Table, density, divergence, expected_error, snap
from compressor.calibration.histogram import empty, observe
from compressor.calibration.observers.ranges import Entropy, MinMax, Mse, RangeObserver
from compressor.types.statistics import Range

COUNT = 20_000


def samples(kind: str) -> torch.Tensor:
    random = torch.Generator().manual_seed(7)
    normal = torch.randn(COUNT, generator=random)
    uniform = torch.rand(COUNT, generator=random)
    laplace = (uniform - 0.5).sign() * -(1 - 2 * (uniform - 0.5).abs()).clamp(min=1e-7).log()
    chi = torch.randn(3, COUNT, generator=random).square().mean(0)
    kinds = {
        "gaussian": normal,
        "laplace": laplace,
        "relu": normal.relu(),
        "sparse-relu": (normal - 1).relu(),
        "student": normal / chi.sqrt(),
        "lognormal": (2 * normal).exp(),
        "uniform": 3 * uniform - 1,
        "silu": torch.nn.functional.silu(3 * normal),
        "relu6": (4 * normal).clamp(0, 6),
        "shifted": normal + 2,
    }
    return kinds[kind]


KINDS = [
    "gaussian",
    "laplace",
    "relu",
    "sparse-relu",
    "student",
    "lognormal",
    "uniform",
    "silu",
    "relu6",
    "shifted",
]


def sqnr(values: torch.Tensor, span: Range, bits: int, symmetric: bool) -> float:
    """Quantize as ONNX's QuantizeLinear and DequantizeLinear do."""
    if symmetric:
        most = 2 ** (bits - 1) - 1
        scale, zero, least = span.high / most, 0, -most
    else:
        most, least = 2**bits - 1, 0
        scale = (span.high - span.low) / most
        zero = round(-span.low / scale)
    exact = values.double()
    codes = ((exact / scale).round() + zero).clamp(least, most)
    noise = exact - (codes - zero) * scale
    return 10 * math.log10(float(exact.square().sum() / noise.square().sum()))


def found(observer: RangeObserver, values: torch.Tensor) -> Range:
    return observer.result(observer.update(observer.start(), values))


def brute_force(values: torch.Tensor, near: Range, bits: int, symmetric: bool) -> float:
    """Return the best SQNR of shares of the extrema, and of a fine grid around ``near``."""
    full = found(MinMax(symmetric=symmetric), values)
    shares = [0.9**i for i in range(30)]
    fine = [1 + step / 100 for step in range(-5, 6)]
    if symmetric:
        spans = [Range(full.low * a, full.high * a) for a in shares]
        spans += [Range(near.low * a, near.high * a) for a in fine]
    else:
        left = [a for a in shares if abs(full.low * a / (near.low or 1) - 1) < 0.5] or [1.0]
        spans = [Range(full.low * a, full.high * b) for a in left for b in shares]
        spans += [Range(near.low * a, near.high * b) for a in fine for b in fine]
    return max(sqnr(values, span, bits, symmetric) for span in spans)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_mse_is_within_a_tenth_of_a_decibel_of_brute_force(kind, bits, symmetric):
    values = samples(kind)
    span = found(Mse(bits=bits, symmetric=symmetric), values)
    best = brute_force(values, span, bits, symmetric)
    assert sqnr(values, span, bits, symmetric) > best - 0.1


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_entropy_loses_at_most_three_decibels_to_min_max(kind, bits, symmetric):
    values = samples(kind)
    full = found(MinMax(symmetric=symmetric), values)
    span = found(Entropy(bits=bits, symmetric=symmetric), values)
    assert sqnr(values, span, bits, symmetric) > sqnr(values, full, bits, symmetric) - 3.1


def test_entropy_as_published_clips_a_long_tail_and_max_loss_holds_it():
    values = samples("lognormal")
    full = found(MinMax(), values).high
    assert found(Entropy(max_loss=math.inf), values).high < full / 5
    assert found(Entropy(max_loss=0.0), values).high > full / 2


def test_entropy_keeps_a_uniform_range_and_clips_an_outlier():
    assert found(Entropy(), samples("uniform")).high == pytest.approx(2.0, abs=1e-2)
    normal = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    values = torch.cat((normal, torch.tensor([40.0])))
    assert found(Entropy(max_loss=math.inf), values).high < 10
    assert found(Entropy(max_loss=math.inf, symmetric=True), values).high < 10


FEW = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=60)


@settings(max_examples=50, deadline=None)
@given(FEW, st.sampled_from([2, 4, 8]), st.booleans())
def test_mse_is_never_worse_than_min_max_in_expected_error(values, bits, symmetric):
    state = observe(empty(), torch.tensor(values))
    spread = density(state)
    if not len(spread.mass):
        return
    steps = 2**bits - (2 if symmetric else 1)

    def error(observer: RangeObserver) -> float:
        span = found(observer, torch.tensor(values))
        return expected_error(
            spread, snap((state.unit(span.low), state.unit(span.high)), steps), steps
        )

    least = error(Mse(bits=bits, symmetric=symmetric))
    assert least <= error(MinMax(symmetric=symmetric)) * (1 + 1e-9)


@pytest.mark.parametrize("span", [(-300.0, 700.0), (-40.0, 90.0), (-2000.0, 0.0)])
@pytest.mark.parametrize("steps", [3, 15, 255])
def test_expected_error_is_the_mean_over_uniform_bins(span, steps):
    spread = density(observe(empty(), samples("laplace")))
    low, high = snap(span, steps)
    scale = (high - low) / steps
    parts = 400
    points = spread.edges[:-1, None] + (torch.arange(parts) + 0.5) / parts
    quantized = (points / scale).round().clamp(round(low / scale), round(high / scale)) * scale
    expected = float((points - quantized).square().mean(1) @ spread.mass)
    assert expected_error(spread, (low, high), steps) == pytest.approx(expected, rel=1e-3)


def test_divergence_is_kullback_leiblers():
    mass = torch.tensor([5.0, 3, 0, 2, 8, 1, 4, 7, 2, 6], dtype=torch.float64)
    start, stop, levels = 2, 9, 3
    p = mass[start:stop].clone()
    p[0] += mass[:start].sum()
    p[-1] += mass[stop:].sum()
    q = torch.zeros_like(p)
    bounds = [start + i * (stop - start) // levels for i in range(levels + 1)]
    noise = 0.0
    for left, right in itertools.pairwise(bounds):
        filled = p[left - start : right - start] > 0
        inside = mass[left:right]
        q[left - start : right - start][filled] = inside.sum() / filled.sum()
        noise += (int((inside > 0).sum()) - 1) / 2
    p, q = p / mass.sum(), q / mass[start:stop].sum()
    expected = float(torch.special.xlogy(p, p / q.clamp(min=1e-300)).sum() - noise / mass.sum())
    got = divergence(_Table.of(mass), torch.tensor([start]), torch.tensor([stop]), levels)
    assert float(got[0]) == pytest.approx(expected)
