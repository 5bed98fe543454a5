"""Grids of levels: found where they are, and not where they are not."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.calibration.moments import fit_grid
from compressor.calibration.observers.channels import ChannelGridObserver

GRID = ChannelGridObserver()


def levels(*batches: torch.Tensor):
    return reduce(GRID.update, batches, GRID.start())


def image(steps: list[float], offsets: list[float], seed: int = 0, most: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, most, (4, len(steps), 16, 16), generator=generator)
    form = (1, -1, 1, 1)
    return (pixels * torch.tensor(steps).view(form) + torch.tensor(offsets).view(form)).float()


@given(
    st.lists(st.floats(1e-4, 10), min_size=1, max_size=4),
    st.floats(-3, 3),
    st.integers(0, 100),
)
def test_a_grid_is_found_again(steps, shift, seed):
    offsets = [shift * 100 * s for s in steps]
    grid = GRID.result(levels(image(steps, offsets, seed)))
    assert grid is not None
    assert grid.step == pytest.approx(steps, rel=1e-3)
    for found, wanted, step in zip(grid.offset, offsets, steps, strict=True):
        assert abs(found - wanted) < 1.01 * step + 1e-6 * abs(wanted), "a level at either end"


def test_levels_of_all_batches_count():
    parts = [image([0.1], [0.0], seed=s) for s in range(3)]
    one = levels(*parts)
    other = GRID.merge(levels(parts[0]), levels(parts[1], parts[2]))
    assert torch.equal(one[0], other[0])


@pytest.mark.parametrize(
    "values",
    [
        torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
        image([0.1], [0.0], most=8),
        image([0.1], [0.0]) ** 2,
        torch.zeros(4, 3, 16, 16),
        torch.zeros(7),
    ],
    ids=["noise", "few levels", "uneven", "constant", "vector"],
)
def test_other_data_have_no_grid(values):
    assert GRID.result(levels(values)) is None


def test_one_channel_off_the_grid_is_enough():
    values = image([0.1, 0.2], [0.0, 0.0])
    values[:, 1] += torch.rand(4, 16, 16, generator=torch.Generator().manual_seed(1)) * 0.1
    assert GRID.result(levels(values)) is None


def test_unseen_levels_are_left_at_both_ends():
    grid = GRID.result(levels(image([1.0], [0.0], most=200)))
    assert grid is not None
    assert -30 < grid.offset[0] < -20


@pytest.mark.parametrize(
    ("count", "spare"), [(31, None), (32, 112), (33, 111), (255, 0), (256, 0), (257, None)]
)
def test_grids_have_32_to_256_levels(count, spare):
    levels = torch.cat([torch.tensor([3.0]), 3 + torch.arange(1, count) / 2])
    found = fit_grid(levels)
    assert found == (None if spare is None else (0.5, 3 - spare / 2))


def test_a_level_may_be_a_hundredth_of_a_step_off():
    levels = torch.arange(40.0)
    levels[7] += 0.009
    assert fit_grid(levels) is not None
    levels[7] += 0.002
    assert fit_grid(levels) is None
