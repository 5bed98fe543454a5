"""Codes that are trained: the maths alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.passes.quantize.code_training import Recipe, train_codes
from compressor.passes.quantize.maths.affine import absmax_parameters, mse_parameters, quantize
from compressor.passes.quantize.maths.reconstruct import (
    TrainedCodes,
    mixed,
    rate_share,
    relative_error,
)
from compressor.types.layers import Layer, QuantizedTensor, Scheme

SCHEMES = [
    Scheme(2, narrow=False),
    Scheme(3),
    Scheme(2, granularity="group", group=8, narrow=False, signed_scale=True),
    Scheme(4, granularity="tensor"),
    Scheme(4, False, False),
    Scheme(8),
    Scheme(2, False, False, "group", 4),
    Scheme(4, granularity="group", group=8, scale_type="bfloat16"),
]


def started(scheme: Scheme, seed: int) -> tuple[torch.Tensor, QuantizedTensor]:
    """A weight with some zeros, and its codes in a range that cuts some of it off."""
    random = torch.Generator().manual_seed(seed)
    matrix = torch.randn(5, 16, generator=random)
    matrix[torch.rand(5, 16, generator=random) < 0.2] = 0
    find = mse_parameters if seed % 2 else absmax_parameters
    return matrix, quantize(matrix, *find(matrix, scheme), scheme)


@settings(max_examples=40, deadline=None)
@given(scheme=st.sampled_from(SCHEMES), seed=st.integers(0, 1000))
def test_training_starts_from_the_codes_that_were_given(scheme: Scheme, seed: int) -> None:
    matrix, start = started(scheme, seed)
    trained = TrainedCodes(matrix, start)
    assert torch.equal(trained.quantized().codes, start.codes)
    assert torch.equal(trained.quantized().scale, start.scale)
    assert torch.equal(trained.weight(), start.dequantize())


@settings(max_examples=40, deadline=None)
@given(
    scheme=st.sampled_from(SCHEMES), seed=st.integers(0, 1000), reach=st.sampled_from([0.3, 2, 50])
)
def test_what_is_trained_is_what_is_stored(scheme: Scheme, seed: int, reach: float) -> None:
    matrix, start = started(scheme, seed)
    trained = TrainedCodes(matrix, start)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        trained.latent += reach * torch.randn(matrix.shape, generator=random)
        trained.size *= 1 + 0.2 * torch.rand(trained.size.shape, generator=random)
    stored = trained.quantized()
    assert int(stored.codes.min()) >= scheme.low
    assert int(stored.codes.max()) <= scheme.high
    assert not stored.dequantize()[matrix == 0].any()
    assert torch.equal(stored.zero_point, start.zero_point)
    if scheme.scale_type == "float32":
        assert torch.allclose(trained.weight(), stored.dequantize(), rtol=1e-6)
    else:
        assert torch.equal(stored.scale.to(torch.bfloat16).to(torch.float32), stored.scale)


def test_it_starts_beside_the_code_on_the_side_of_the_weight() -> None:
    matrix = torch.tensor([[0.3, -1.2, 1.45, 7.0, 0.0]])
    one, zero = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int8)
    scheme = Scheme(4)
    codes = torch.tensor([[0, -1, 2, 7, 0]], dtype=torch.int8)  # the third is not the nearest
    trained = TrainedCodes(matrix, QuantizedTensor(codes, one, zero, scheme))
    assert trained.latent.tolist() == [pytest.approx([0.15, -1.1, 1.775, 7.0, 0.0])]


def test_it_starts_in_units_of_the_step_and_near_the_code_where_the_range_was_cut() -> None:
    matrix = torch.tensor([[0.6, 9.0, -9.0]], dtype=torch.float64)
    half, zero = torch.full((1, 1), 0.5), torch.zeros(1, 1, dtype=torch.int8)
    codes = torch.tensor([[1, 7, -7]], dtype=torch.int8)
    trained = TrainedCodes(matrix, QuantizedTensor(codes, half, zero, Scheme(4)))
    assert trained.latent.dtype == torch.float32
    assert trained.latent.tolist() == [pytest.approx([1.1, 7.225, -7.225])]


def test_gradients_pass_rounding_as_they_are_and_stop_beyond_the_codes() -> None:
    matrix = torch.tensor([[1.0, 2.0, -1.0, 0.0]])
    scheme, zero = Scheme(2, narrow=False), torch.zeros(1, 1, dtype=torch.int8)
    start = quantize(matrix, torch.full((1, 1), 0.5), zero, scheme)  # codes from -2 to 1
    trained = TrainedCodes(matrix, start)
    with torch.no_grad():
        trained.latent.copy_(torch.tensor([[1.4, 1.6, -2.4, 0.3]]))
    trained.weight().sum().backward()
    assert trained.latent.grad is not None
    assert trained.latent.grad.tolist() == [[0.5, 0.0, 0.5, 0.0]]
    assert trained.size.grad is not None
    assert float(trained.size.grad) == pytest.approx(0.5 * (1 + 1 - 2))
    trained.latent.grad = None
    with torch.no_grad():
        trained.latent.copy_(torch.tensor([[1.5, -2.5, -3.2, 0.3]]))
    trained.weight().sum().backward()
    assert not any(trained.latent.grad.tolist()[0])


def test_samples_come_whole_from_one_or_the_other() -> None:
    random = torch.Generator().manual_seed(0)
    first, second = torch.ones(4000, 3), torch.zeros(4000, 3)
    drawn = mixed(first, second, 0.25, random)
    assert bool((drawn == drawn[:, :1]).all())
    assert float(drawn.mean()) == pytest.approx(0.25, abs=0.03)  # four standard deviations
    assert torch.equal(mixed(first, second, 1.0, random), first)
    assert torch.equal(mixed(first, second, 0.0, random), second)
    assert float(mixed(torch.tensor(1.0), torch.tensor(2.0), 1.0, random)) == 2
    again = [mixed(first, second, 0.25, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*again)


def test_errors_are_shares_of_what_was_wanted() -> None:
    wanted = [torch.tensor([3.0, 4.0]), torch.tensor([10.0])]
    given_ = [torch.tensor([3.0, 3.0]), torch.tensor([8.0])]
    assert float(relative_error(given_, wanted)) == pytest.approx(1 / 25 + 4 / 100)
    assert float(relative_error(wanted, wanted)) == 0
    zero = [torch.zeros(3)]
    assert torch.isfinite(relative_error(zero, zero))
    with pytest.raises(ValueError, match="shorter"):
        relative_error(given_, wanted[:1])


def test_rates_fall_along_half_a_cosine() -> None:
    assert [rate_share(step, 4) for step in (0, 2, 4)] == pytest.approx([1, 0.5, 0])
    assert rate_share(1, 4) + rate_share(3, 4) == pytest.approx(1)


def test_a_short_memory_forgets_large_first_gradients() -> None:
    def moved(memory: float) -> float:
        matrix, start = started(Scheme(3), 0)
        codes = TrainedCodes(matrix, start)
        weights = {"w": (Layer("w", "MatMul", "w", tuple(matrix.shape)), codes)}
        seen: list[torch.Tensor] = []

        def backward(_: Sequence[int]) -> None:
            codes.latent.grad = torch.full_like(codes.latent, 1.0 if seen else 100.0)
            codes.size.grad = torch.zeros_like(codes.size)
            seen.append(codes.latent.detach().clone())

        train_codes(weights, Recipe(steps=60, memory=memory), repeat([0]), backward)
        return float((seen[-1] - seen[30]).abs().mean())

    assert moved(0.95) > 1.5 * moved(0.999)
