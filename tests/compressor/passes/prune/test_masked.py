"""Weights that stay, solved row by row: against a solution of each row by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.passes.prune.maths import masked
from compressor.passes.prune.maths.masked import solve_kept


@given(st.integers(0, 999), st.integers(1, 24), st.integers(1, 40), st.floats(0.0, 0.9))
def test_each_row_is_solved_and_never_worse(seed, columns, samples, sparsity):
    """With fewer samples than columns, and inputs that are always zero, too."""
    torch.manual_seed(seed)
    inputs = torch.randn(samples, columns, dtype=torch.float64)
    inputs[:, ::5] = 0.0
    moment = inputs.T @ inputs
    weight = torch.randn(4, columns, dtype=torch.float64)
    start = weight * (torch.rand(4, columns) >= sparsity)
    solved = solve_kept(weight, start, moment).double()
    assert torch.equal(solved != 0, start != 0) or bool((solved[start == 0] == 0).all())
    before, after = (((w - weight) @ inputs.T).square().sum(1) for w in (start, solved))
    assert bool((after <= before * (1 + 1e-5) + 1e-9).all())
    if columns == 1 or not bool((moment.diagonal() > 0).any()):
        return
    mean = moment.diagonal()[moment.diagonal() > 0].mean()
    damped = moment + 0.01 * mean * torch.eye(columns)
    for row in range(4):
        stays = start[row] != 0
        wanted = torch.zeros(columns, dtype=torch.float64)
        cross = (weight[row] @ damped)[stays]
        wanted[stays] = torch.linalg.solve(damped[stays][:, stays], cross)
        error = ((wanted - weight[row]) @ inputs.T).square().sum()
        assert float(after[row]) == pytest.approx(float(error), rel=1e-3, abs=1e-5)


def test_without_inputs_nothing_changes():
    weight, start = torch.ones(2, 3), torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    assert torch.equal(solve_kept(weight, start, torch.zeros(3, 3)), start)
    assert solve_kept(weight, start.double(), torch.zeros(3, 3)).dtype is torch.float32


@pytest.mark.parametrize(("columns", "dtype"), [(3, torch.float64), (4, torch.float32)])
@pytest.mark.parametrize("given_in", [torch.float16, torch.float64])
def test_few_columns_are_solved_in_float64(
    monkeypatch: pytest.MonkeyPatch, columns: int, dtype: torch.dtype, given_in: torch.dtype
):
    seen: list[torch.dtype] = []

    def descended(*tensors: torch.Tensor) -> torch.Tensor:
        seen.extend(t.dtype for t in tensors)
        return tensors[1]

    monkeypatch.setattr(masked, "_WIDE", 3)
    monkeypatch.setattr(masked, "_descended", descended)
    weight = torch.ones(2, columns, dtype=given_in)
    solved = solve_kept(weight, weight, torch.eye(columns, dtype=given_in))
    assert (solved.dtype, set(seen)) == (torch.float32, {dtype})


def test_a_row_that_damping_would_make_worse_stays():
    """Of two inputs that are always alike, the weight that stays has the sum of both."""
    moment, weight = torch.ones(2, 2), torch.tensor([[1.0, 1.0]])
    start = torch.tensor([[2.0, 0.0]])
    assert torch.equal(solve_kept(weight, start, moment, damping=10.0), start)
    assert solve_kept(weight, start / 2, moment, damping=10.0)[0, 0] == pytest.approx(12 / 11)


def test_inputs_of_their_own_power_are_solved_in_one_step(monkeypatch: pytest.MonkeyPatch):
    """The preconditioner is the diagonal, which is all there is; one step asks for two shares."""
    asked = []
    share = masked._share
    monkeypatch.setattr(masked, "_share", lambda *a: asked.append(None) or share(*a))
    weight = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    start = torch.tensor([[5.0, 7.0, 0.0], [0.0, 1.0, 1.0]])
    solved = solve_kept(weight, start, torch.diag(torch.tensor([1.0, 10.0, 1000.0])))
    assert solved.numpy() == pytest.approx((weight * (start != 0)).numpy(), rel=1e-6)
    assert len(asked) == 1


def test_small_weights_are_solved_as_well():
    """What is close enough is a share of where it begins."""
    torch.manual_seed(0)
    inputs = torch.randn(30, 12).double()
    moment, weight = inputs.T @ inputs, torch.randn(3, 12).double()
    start = weight * (torch.arange(12) % 3 > 0)
    solved = solve_kept(weight, start, moment)
    small = solve_kept(1e-7 * weight, 1e-7 * start, moment)
    assert (1e7 * small).numpy() == pytest.approx(solved.numpy(), rel=1e-4, abs=1e-5)


def test_many_columns_are_solved_in_float32():
    torch.manual_seed(0)
    inputs = torch.randn(300, 1100)
    inputs = inputs + inputs.roll(1, 1)
    weight = torch.randn(2, 1100)
    start = weight * (torch.arange(1100) % 4 < 2)
    solved = solve_kept(weight, start, inputs.T @ inputs)
    before, after = (((w - weight) @ inputs.T).square().sum() for w in (start, solved))
    assert float(after) < 0.7 * float(before)
