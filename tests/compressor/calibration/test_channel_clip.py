"""channel-clip: thresholds of least squared error, whatever the grouping of the data."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressor.calibration.observers.channel_clips import ChannelClip


def found(observer: ChannelClip, *parts: Tensor) -> Tensor:
    state = observer.start()
    for part in parts:
        state = observer.merge(state, observer.update(observer.start(), part))
    result = observer.result(state)
    assert result is not None
    return result


def error(values: Tensor, threshold: Tensor, bits: int) -> Tensor:
    """Return the squared error of each column's values, rounded symmetrically."""
    last = 2 ** (bits - 1) - 1
    steps = threshold / last
    return ((values / steps).round().clamp(-last, last) * steps - values).square().sum(0)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_the_error_is_the_least_that_a_search_over_the_values_themselves_finds(bits: int):
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4000, 4, generator=generator)
    tails = normal[:, :2] ** 3
    values = torch.cat([normal * torch.tensor([1e-3, 1.0, 7.0, 1e3]), tails, normal[:, :1] + 5], 1)
    threshold = found(ChannelClip(bits=bits), values)
    largest = values.abs().amax(0)
    tried = torch.stack([error(values, largest * s, bits) for s in torch.linspace(0.05, 1, 400)])
    near = 1.08 if bits == 8 else 1.02  # 8 bits clip next to nothing: the best is a matter of luck
    assert (error(values, threshold, bits) <= near * tried.amin(0)).all()
    assert (threshold <= largest).all()


def test_few_bits_clip_what_is_rare_and_8_bits_do_not():
    values = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0))
    values[0] = 12.0
    assert found(ChannelClip(bits=4), values) < 4
    assert found(ChannelClip(bits=8), values[1:]) > 3
    even = torch.linspace(-1, 1, 4001)[:, None]
    assert found(ChannelClip(bits=4), even) > 0.9


@given(sizes=st.lists(st.integers(0, 5), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_grouping_does_not_matter(sizes: list[int], seed: int):
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, 3, 4, generator=generator) for n in [*sizes, 1]]
    observer = ChannelClip(axis=2)
    assert torch.equal(found(observer, *parts), found(observer, torch.cat(parts)))


def test_channels_of_zeros_and_of_extreme_magnitudes():
    values = torch.tensor([[0.0, 1e-30, 1e30], [0.0, -1e-30, -1e30]])
    assert found(ChannelClip(), values)[0] == 0
    assert found(ChannelClip(), values).isfinite().all()
    assert torch.equal(found(ChannelClip(), torch.zeros(2, 3)), torch.zeros(3))
