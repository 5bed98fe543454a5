"""Codes of weights whose products no 16-bit sum overflows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from compressor.models.layer_uses import paired_positions
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.quantize.dynamic import DynamicWeights, QuantizeDynamic
from compressor.passes.quantize.maths.affine import absmax_parameters, quantize
from compressor.passes.quantize.maths.gptq import gptq, gptq_weights, output_error
from compressor.passes.quantize.maths.gptq_vectors import gptq_from_vectors
from compressor.passes.quantize.maths.pairs import (
    MOST,
    clip_pairs,
    paired_scale,
    pairs,
    without_overflow,
)
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.layers import Layer, Scheme
from compressor.types.passes import PassContext
from tests.compressor.passes.quantize.static_models import IMAGE, ORT, TENSORRT, quantized

BYTES = Scheme(8)


def worst_sums(codes: Tensor, positions: int) -> tuple[int, int]:
    """Least and greatest 16-bit sum that any inputs from 0 to 255 can give, in ORT's order."""
    rows, columns = codes.shape
    order = [c * positions + p for p in range(positions) for c in range(columns // positions)]
    ordered = codes.numpy().astype(np.int64)[:, order]
    ordered = ordered[:, : columns // 2 * 2].reshape(rows, -1, 2)
    most = 255 * np.maximum(ordered, 0).sum(-1)
    least = 255 * np.minimum(ordered, 0).sum(-1)
    return int(least.min(initial=0)), int(most.max(initial=0))


def fits(codes: Tensor, positions: int) -> bool:
    least, most = worst_sums(codes, positions)
    return least >= -(2**15) and most < 2**15


shapes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.sampled_from([1, 2, 3, 9]))


@given(shape=shapes, seed=st.integers(0, 2**16))
def test_clipped_pairs_fit_16_bits_and_only_those_that_did_not_change(
    shape: tuple[int, int, int], seed: int
) -> None:
    rows, channels, positions = shape
    columns = channels * positions
    codes = torch.randint(
        -127, 128, (rows, columns), generator=torch.Generator().manual_seed(seed)
    ).to(torch.int8)
    given = codes.clone()
    clipped = clip_pairs(codes, positions)
    assert fits(clipped, positions)
    assert codes.equal(given)  # the argument is as it was
    assert clipped.dtype == codes.dtype
    assert (clipped.int().abs() <= codes.int().abs()).all()
    assert (clipped.sign() * codes.sign() >= 0).all()
    first, second = pairs(columns, positions)
    a, b = codes.int()[:, first], codes.int()[:, second]
    over = (a * b > 0) & ((a + b).abs() > MOST)
    assert clipped[:, first][~over].equal(codes[:, first][~over])
    assert clipped[:, second][~over].equal(codes[:, second][~over])
    sums = clipped.int()[:, first] + clipped.int()[:, second]
    assert (sums[over].abs() == MOST).all()  # no more than needed


def test_the_larger_code_of_a_pair_gives_more() -> None:
    codes = torch.tensor([[127, 127, 100, 127, 127, 100, -3, -126, 64, 64]], dtype=torch.int8)
    wanted = [64, 64, 51, 77, 77, 51, -3, -125, 64, 64]
    assert clip_pairs(codes, 1).tolist() == [wanted]


def test_pairs_run_over_the_channels_of_one_position_then_of_the_next() -> None:
    # columns: channel 0 at positions 0, 1 and 2, then channel 1, then channel 2
    first, second = pairs(9, 3)
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == [
        (0, 3),
        (6, 1),
        (4, 7),
        (2, 5),
    ]
    assert [x.tolist() for x in pairs(5, 1)] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_scales_widen_only_where_pairs_would_be_clipped(granularity: str) -> None:
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(6, 64, generator=generator)
    matrix[0] = 0
    matrix[0, ::2] = 1.0  # no pair of large weights
    scheme = replace(BYTES, granularity=granularity, paired=1)
    scale, zero = absmax_parameters(matrix, scheme)
    widened = paired_scale(matrix, scale, scheme)
    assert (widened >= scale).all()
    assert (widened <= 2.001 * scale).all()
    if granularity == "channel":
        assert widened[0] == scale[0]
    before, after = (
        (quantize(matrix, s, zero, scheme).dequantize() - matrix).square().sum(1)
        for s in (scale, widened)
    )
    assert after.sum() < before.sum()
    assert paired_scale(matrix, scale, BYTES) is scale


@pytest.mark.parametrize("at_once", [1, 14, 1 << 16])
@pytest.mark.parametrize(("columns", "positions"), [(7, 1), (9, 3)])
def test_each_scale_is_the_best_of_those_tried(
    monkeypatch: pytest.MonkeyPatch, columns: int, positions: int, at_once: int
) -> None:
    """In one piece and in several."""
    monkeypatch.setattr("compressor.passes.quantize.maths.pairs._AT_ONCE", at_once)
    matrix = torch.randn(6, columns, generator=torch.Generator().manual_seed(0)).abs()
    matrix[1:] += 0.8
    matrix[3] *= -1
    scheme = replace(BYTES, paired=positions)
    scale = matrix.abs().amax(1, keepdim=True) / (100 + 10 * torch.arange(6.0)[:, None])
    tries = [scale * 2 ** (step / 16) for step in range(17)]
    errors = torch.stack([squared_errors(matrix, tried, scheme) for tried in tries])
    best = errors.argmin(0)
    clipped = squared_errors(matrix, scale, scheme) > squared_errors(matrix, scale, BYTES)
    best[~clipped] = 0
    assert len(best.unique()) > 3
    wanted = torch.stack([tries[place][row] for row, place in enumerate(best)])
    assert paired_scale(matrix, scale, scheme).tolist() == wanted.tolist()
    shared = replace(scheme, granularity="tensor")
    one = matrix.abs().amax().reshape(1, 1) / 110
    steps = [one * 2 ** (step / 16) for step in range(17)]
    sums = torch.stack([squared_errors(matrix, step, shared).sum() for step in steps])
    assert 0 < sums.argmin() < 16
    assert paired_scale(matrix, one, shared).equal(steps[int(sums.argmin())])


def squared_errors(matrix: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    zero = torch.zeros_like(scale, dtype=torch.int8)
    rounded = quantize(matrix, scale, zero, scheme).dequantize()
    return (rounded - matrix).square().sum(1, dtype=torch.float64)


def test_a_weight_beyond_the_codes_counts_by_what_is_cut_off() -> None:
    row = torch.tensor([66.5, 66.5, 250.0])  # without the last, other steps err less
    scheme = replace(BYTES, paired=1)
    assert paired_scale(torch.stack([row, -row]), torch.ones(2, 1), scheme).tolist() == [[2], [2]]


def test_a_row_whose_pairs_just_fit_keeps_its_scale() -> None:
    row = torch.tensor([64.0, 64.0, *[2**0.5] * 10])  # steps of the root of 2 would err less
    ones = torch.ones(2, 1)
    assert paired_scale(torch.stack([row, row]), ones, replace(BYTES, paired=1)).equal(ones)


def test_rows_are_searched_alike_in_one_piece_or_several(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(9, 65, generator=torch.Generator().manual_seed(3))
    scheme = replace(BYTES, paired=5)
    scale, _ = absmax_parameters(matrix, scheme)
    widened = paired_scale(matrix, scale, scheme)
    for size in (1, 65 * 4, 65 * 9):
        monkeypatch.setattr("compressor.passes.quantize.maths.pairs._AT_ONCE", size)
        assert torch.equal(paired_scale(matrix, scale, scheme), widened)


def test_a_row_of_equal_weights_takes_seven_bits() -> None:
    matrix = torch.ones(2, 8)
    scheme = replace(BYTES, paired=1)
    scale, zero = absmax_parameters(matrix, scheme)
    codes = quantize(matrix, paired_scale(matrix, scale, scheme), zero, scheme)
    assert codes.codes.unique().tolist() == [64]
    assert codes.dequantize().sub(matrix).abs().max() < 0.01


@pytest.mark.parametrize("positions", [1, 9])
def test_each_rounding_keeps_to_the_limit_at_less_cost_than_seven_bits(positions: int) -> None:
    generator = torch.Generator().manual_seed(2)
    matrix = torch.randn(24, 36, generator=generator)
    mixed = torch.randn(36, 36, generator=generator)
    vectors = mixed @ torch.randn(36, 144, generator=generator)
    moment = vectors @ vectors.T
    scheme = replace(BYTES, paired=positions)
    full, zero = absmax_parameters(matrix, scheme)
    scale = paired_scale(matrix, full, scheme)
    made = {
        "nearest": quantize(matrix, scale, zero, scheme),
        "gptq": gptq(matrix, moment, scale, zero, scheme),
        "vectors": gptq_from_vectors(matrix, vectors, scale, zero, scheme),
        "fitted": without_overflow(gptq_weights(matrix, moment, scheme)),
    }
    assert all(fits(codes.codes, positions) for codes in made.values())
    errors = {name: output_error(matrix, codes, moment) for name, codes in made.items()}
    seven = gptq(matrix, moment, 2 * full, zero, BYTES)
    assert fits(seven.codes, positions)
    assert errors["gptq"] < 0.7 * output_error(matrix, seven, moment)
    assert errors["gptq"] < 0.8 * errors["nearest"]
    assert errors["vectors"] < 0.8 * errors["nearest"]
    careless = gptq(matrix, moment, full, zero, scheme)  # scales that are not widened
    assert fits(careless.codes, positions)
    assert errors["gptq"] < 0.1 * output_error(matrix, careless, moment)


@pytest.mark.parametrize(
    ("kind", "shape", "groups", "paired"),
    [
        ("Conv", (8, 4, 3, 3), 1, 9),
        ("Conv", (8, 1, 3, 3), 8, None),  # depthwise
        ("Conv", (16, 1, 3, 3), 8, 9),
        ("Conv", (8, 4, 5), 1, 5),
        ("ConvTranspose", (8, 4, 3, 3), 1, None),
        ("Gemm", (8, 4), 1, 1),
        ("MatMul", (8, 4), 1, 1),
        ("Gather", (8, 4), 1, None),
    ],
)
def test_which_layers_multiply_in_pairs(
    kind: str, shape: tuple[int, ...], groups: int, paired: int | None
) -> None:
    layer = Layer("x", kind, "x.weight", shape, groups=groups)  # type: ignore[arg-type]
    assert paired_positions(layer) == paired


class Peaked(nn.Module):
    """Two layers with rows of equal weights, the worst that pairs can be."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)
        for layer in (self.conv, self.head):
            nn.init.constant_(layer.weight, 0.25)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(image)).mean((2, 3)))


def static(overflow: str) -> QuantizeStatic:
    options = {"layers": [{"match": "*"}], "weights": {"overflow": overflow}}
    return QuantizeStatic.model_validate(options, strict=False)


@pytest.mark.parametrize(
    ("step", "context", "limited"),
    [
        (static("avoid"), ORT, {"conv", "head"}),
        (static("allow"), ORT, set()),
        (static("avoid"), TENSORRT, set()),
        (QuantizeDynamic(), ORT, {"head"}),
        (QuantizeDynamic(weights=DynamicWeights(overflow="allow")), ORT, set()),
    ],
)
def test_which_passes_limit_pairs(
    step: QuantizeStatic | QuantizeDynamic, context: PassContext, limited: set[str]
) -> None:
    model = TorchCarrier(Peaked(), [IMAGE])
    if isinstance(step, QuantizeStatic):
        after = quantized(step, model, context).carrier
    else:
        after = step.apply(model, context, {}).carrier
    for layer in after.layers():
        if layer.dtype == "int8":
            codes = layer.canonical(after.weight(layer))
            kept = fits(codes, 9 if layer.name == "conv" else 1)
            assert kept == (layer.name in limited), layer.name
