"""What is pruned stays exactly zero whatever quantizes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.passes.prune.magnitude.magnitude import PruneMagnitude
from compressor.passes.quantize.maths.awq import awq
from compressor.passes.quantize.maths.floating import round_to_nearest
from compressor.passes.quantize.maths.gptq import gptq, gptq_weights, output_error
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.carrier import Carrier
from compressor.types.layers import Scheme
from tests.compressor.passes.quantize import static_models
from tests.compressor.passes.quantize.static_models import Residual
from tests.compressor.passes.quantize.weight_only_models import (
    ANY,
    Language,
    carrier,
    codes,
    quantized,
    weights,
)

SCHEMES = [
    Scheme(8),
    Scheme(8, symmetric=False),
    Scheme(8, granularity="tensor"),
    Scheme(4, symmetric=False, signed=False, granularity="group", group=8),
    Scheme(2, granularity="group", group=16),
    Scheme(8, element="e4m3"),
    Scheme(4, granularity="group", group=16, element="e2m1", scale_type="e4m3"),
    Scheme(4, granularity="group", group=32, element="e2m1", scale_type="e8m0"),
]


def sparse(rows: int, columns: int, seed: int, share: float = 0.6) -> torch.Tensor:
    """A weight of which a share is zero; a shift makes its ranges lopsided."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) + 0.4
    return values * (torch.rand(rows, columns, generator=generator) >= share)


def moment(columns: int, seed: int) -> torch.Tensor:
    """The second moment of inputs that are strongly correlated, one of them dead."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator)
    inputs = torch.randn(4 * columns, columns, generator=generator) @ mixing
    inputs[:, 1] = 0
    return inputs.T @ inputs


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SCHEMES), st.integers(0, 100), st.floats(0.05, 0.95))
def test_gptq_leaves_zeros(scheme: Scheme, seed: int, share: float):
    weight, second = sparse(12, 64, seed, share), moment(64, seed)
    found = gptq_weights(weight, second, scheme)
    assert bool((found.dequantize()[weight == 0] == 0).all())
    nearest = round_to_nearest(weight, scheme)
    assert output_error(weight, found, second) <= output_error(weight, nearest, second) * 1.0001


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.element == "int"])
def test_gptq_with_given_scales_leaves_zeros_and_still_helps(scheme: Scheme):
    """That is what quantize-static calls."""
    weight, second = sparse(48, 96, 1), moment(96, 1)
    nearest = round_to_nearest(weight, scheme)
    found = gptq(weight, second, nearest.scale, nearest.zero_point, scheme)
    assert bool((found.dequantize()[weight == 0] == 0).all())
    # Four of ten weights make up for less than all would: 0.80 to 0.87 of the error, measured.
    assert output_error(weight, found, second) < 0.9 * output_error(weight, nearest, second)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_awq_leaves_zeros(scheme: Scheme):
    weight, second = sparse(16, 64, 2), moment(64, 2)
    found = awq([weight], second, [scheme])
    assert bool((found.weights[0].dequantize()[weight == 0] == 0).all())


# ------------------------------------------------------------------------------- whole passes

METHODS: list[dict[str, Any]] = [
    {"method": method, **numbers}
    for method in ("rtn", "hqq", "gptq", "awq")
    for numbers in ({"bits": 8}, {"bits": 4, "group": 32, "symmetric": False})
]
METHODS += [{"preset": preset} for preset in ("fp8", "nvfp4", "mxfp4", "int2-g32")]


@pytest.fixture(scope="module")
def pruned() -> Carrier:
    step = PruneMagnitude(sparsity=0.7)
    return step.apply(carrier(Language()), ANY, {}).carrier


@pytest.mark.parametrize("options", METHODS)
def test_quantize_weights_leaves_zeros(pruned: Carrier, options: dict[str, Any], tmp_path: Path):
    after = quantized(weights(**options), pruned, tmp_path).carrier
    found = codes(after)
    assert len(found) == 6
    for name, own in found.items():
        layer = next(x for x in pruned.layers() if x.weight == name)
        gone = layer.canonical(pruned.weight(layer)) == 0
        assert float(gone.float().mean()) == pytest.approx(0.7, abs=0.001)
        assert bool((own.dequantize()[gone] == 0).all()), name
        assert bool((own.dequantize()[~gone] != 0).any())


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_quantize_static_leaves_zeros(rounding: str, granularity: str):
    before = PruneMagnitude(sparsity=0.6).apply(static_models.shared(Residual), ANY, {}).carrier
    step = QuantizeStatic.model_validate(
        {"weights": {"rounding": rounding, "granularity": granularity}}, strict=False
    )
    after = static_models.quantized(step, before).carrier
    layers = {layer.name: layer for layer in after.layers()}
    checked = 0
    for layer in before.layers():
        own = after.weight(layers[layer.name])
        if own.dtype == torch.int8:  # symmetric, so that the code of zero is 0
            checked += 1
            gone = before.weight(layer) == 0
            assert bool((own[gone] == 0).all())
            assert bool((own[~gone] != 0).any())
    assert checked >= 3
