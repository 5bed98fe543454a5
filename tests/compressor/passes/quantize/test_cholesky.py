"""Factors of damped moments, their inverses, and the memory that they take."""

import pytest
import torch
from torch import Tensor

from compressor.passes.quantize.maths import cholesky
from compressor.passes.quantize.maths.cholesky import (
    costs_of_columns,
    inverse_factor,
    upper_factor,
)
from tests.peak_memory import growth


def indefinite(least: float) -> Tensor:
    """Return a matrix of mean diagonal one with a negative eigenvalue: that of rounding."""
    generator = torch.Generator().manual_seed(5)
    turned, _ = torch.linalg.qr(torch.randn(32, 32, generator=generator, dtype=torch.float64))
    values = torch.full((32,), 1.0 + (1.0 + least) / 31, dtype=torch.float64)
    values[7] = -least
    return (turned * values) @ turned.T


@pytest.mark.parametrize("columns", [512, 513, 1100])
def test_the_inverse_is_computed_in_blocks(columns: int) -> None:
    values = torch.randn(2 * columns, columns, generator=torch.Generator().manual_seed(0))
    moment = values.T @ values
    factor = inverse_factor(moment, damping=0.01)
    assert factor is not None
    assert torch.equal(factor, factor.triu())
    damped = moment.double()
    damped.diagonal().add_(0.01 * moment.diagonal().mean())
    product = factor.double() @ damped @ factor.double().T
    torch.testing.assert_close(product, torch.eye(columns).double(), rtol=0, atol=1e-4)


def test_the_factor_is_that_of_the_damped_moment() -> None:
    values = torch.randn(90, 40, generator=torch.Generator().manual_seed(0))
    values[:, 3] = 0  # no input: any power serves
    moment = values.T @ values
    factor = upper_factor(moment, damping=0.05)
    assert factor is not None
    assert torch.equal(factor, factor.triu())
    mean = float(moment.diagonal().sum() / 39)
    damped = moment + 0.05 * mean * torch.eye(40)
    damped[3, 3] += mean
    torch.testing.assert_close(factor @ factor.T, damped, rtol=0, atol=1e-4)


@pytest.mark.parametrize("columns", [63, 64, 65, 200])
def test_the_factor_is_in_the_order_that_is_asked_for(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2 * columns, columns, generator=generator)
    moment, order = values.T @ values, torch.randperm(columns, generator=generator)
    factor = upper_factor(moment, 0.05, order)
    assert factor is not None
    damped = moment[order[:, None], order]
    damped.diagonal().add_(0.05 * moment.diagonal().mean())
    torch.testing.assert_close(factor @ factor.T, damped, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize(("least", "retry"), [(0.005, 1.0), (0.05, 10.0), (0.5, 100.0)])
def test_damping_grows_until_the_moment_factors(least: float, retry: float) -> None:
    moment = indefinite(least)
    factor = inverse_factor(moment.float(), damping=0.01)
    assert factor is not None
    assert torch.equal(factor, factor.triu())
    damped = moment + retry * 0.01 * torch.eye(32, dtype=torch.float64)
    expected = torch.linalg.inv(damped).float()
    torch.testing.assert_close(factor.T @ factor, expected, rtol=1e-3, atol=1e-3)


def test_what_float32_cannot_factor_is_factored_in_float64() -> None:
    moment = torch.ones(48, 48)  # one direction; beside it, the damping is lost in float32
    factor = inverse_factor(moment, damping=1e-9)
    assert factor is not None
    assert factor.dtype == torch.float32
    weak = torch.randn(48, generator=torch.Generator().manual_seed(0)).double()
    weak -= weak.mean()  # where there is no input, only damping is inverted
    product = factor.double() @ weak
    assert float(product @ product) == pytest.approx(float(weak @ weak) / 1e-9, rel=1e-2)


def test_costs_are_those_of_the_inverse() -> None:
    values = torch.randn(1300, 1100, generator=torch.Generator().manual_seed(0))
    moment = values.T @ values
    order = torch.argsort(moment.diagonal(), descending=True)
    factor = upper_factor(moment, 0.01, order)
    assert factor is not None
    damped = moment[order][:, order].double()
    damped.diagonal().add_(0.01 * moment.diagonal().mean())
    expected = 1 / torch.linalg.inv(damped).diagonal()
    torch.testing.assert_close(costs_of_columns(factor).double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("inverse", [False, True])
def test_there_is_one_matrix_beside_the_moment(*, inverse: bool) -> None:
    """What is checked, turned, inverted or solved is not copied."""
    values = torch.randn(256, 3072, generator=torch.Generator().manual_seed(0))
    moment = values.T @ values
    moment.diagonal().add_(1.0)

    def made(moment: Tensor) -> None:
        if inverse:
            assert inverse_factor(moment, 0.01) is not None
            return
        factor = upper_factor(moment, 0.01, torch.arange(len(moment)).flip(0))
        assert factor is not None
        costs_of_columns(factor)

    made(moment[:600, :600])  # what the libraries take for themselves when they are first called
    assert growth(lambda: made(moment)) < 1.8 * moment.nbytes


def test_what_no_damping_helps_has_no_factor() -> None:
    assert inverse_factor(indefinite(1.5).float(), damping=0.01) is None


@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_a_matrix_is_turned_in_place(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cholesky, "_TURNED", 3)
    matrix = torch.arange(float(size * size)).reshape(size, size)
    for each in (matrix.clone(), matrix.clone().mT):
        expected, place = each.flip(0, 1), each.data_ptr()
        found = cholesky._turned(each)
        assert torch.equal(found, expected)
        assert found.data_ptr() == place
