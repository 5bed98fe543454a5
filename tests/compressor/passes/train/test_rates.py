"""Learning rates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.passes.train.rates import Schedule, rate_factor


@given(st.integers(1, 40), st.sampled_from(["cosine", "linear", "constant"]), st.data())
def test_rates_rise_once_and_never_after(steps: int, how: Schedule, data: st.DataObject) -> None:
    warm_up = data.draw(st.integers(0, steps - 1))
    rates = [rate_factor(step, steps, how, warm_up) for step in range(steps)]
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[:warm_up] == sorted(rates[:warm_up])
    assert rates[warm_up] == 1
    assert rates[warm_up:] == sorted(rates[warm_up:], reverse=True)


def test_the_cosine_is_pytorchs() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    for step in range(9):
        assert rate_factor(step, 9, "cosine") == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(("steps", "warm_up"), [(10, 0), (40, 0), (40, 4), (11, 7), (4, 3)])
def test_one_cycle_is_pytorchs(steps: int, warm_up: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    rise = warm_up / steps if warm_up else 0.3
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, total_steps=steps, pct_start=rise, cycle_momentum=False
    )
    for step in range(steps):
        rate = optimizer.param_groups[0]["lr"]
        assert rate_factor(step, steps, "one-cycle", warm_up) == pytest.approx(rate, abs=1e-12)
        optimizer.step()
        if step < steps - 1:
            schedule.step()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_one_cycle_of_few_steps_stays_in_range(steps: int) -> None:
    rates = [rate_factor(step, steps, "one-cycle") for step in range(steps)]
    assert all(0 < rate <= 1 for rate in rates)


def test_steps_are_pytorchs() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [6, 9])
    for step in range(12):
        rate = rate_factor(step, 12, "step")
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"])
        assert rate_factor(step, 12, "step", milestones=(0.25,)) == (1.0 if step < 3 else 0.1)
        optimizer.step()
        schedule.step()
    assert rate_factor(0, 12, "step", 2) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("step", "warm_up"), [(-1, 0), (5, 0), (0, 5)])
def test_steps_outside_are_refused(step: int, warm_up: int) -> None:
    with pytest.raises(ValueError, match="5 steps"):
        rate_factor(step, 5, "linear", warm_up)
