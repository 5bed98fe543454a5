"""Learning rates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.passes.train.recipe import Schedule, rate_factor


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


@pytest.mark.parametrize(("step", "warm_up"), [(-1, 0), (5, 0), (0, 5)])
def test_steps_outside_are_refused(step: int, warm_up: int) -> None:
    with pytest.raises(ValueError, match="5 steps"):
        rate_factor(step, 5, "linear", warm_up)
