"""Weights that stay, solved row by row: against a solution of each row by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


def test_many_columns_are_solved_in_float32():
    torch.manual_seed(0)
    inputs = torch.randn(300, 1100)
    inputs = inputs + inputs.roll(1, 1)
    weight = torch.randn(2, 1100)
    start = weight * (torch.arange(1100) % 4 < 2)
    solved = solve_kept(weight, start, inputs.T @ inputs)
    before, after = (((w - weight) @ inputs.T).square().sum() for w in (start, solved))
    assert float(after) < 0.7 * float(before)
