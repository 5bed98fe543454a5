"""channel-magnitude: means of absolute values, whatever the grouping of the data."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.calibration.collect import collect
from compressor.calibration.observers.channel_clips import ChannelClip
from compressor.calibration.observers.channels import ChannelMagnitude
from compressor.errors import DataError
from compressor.types.statistics import Request


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_means_of_absolute_values_along_each_axis(axis: int):
    values = torch.randn(3, 4, 5, 2, generator=torch.Generator().manual_seed(0))
    observer = ChannelMagnitude(axis=axis)
    found = observer.result(observer.update(observer.start(), values))
    rest = [i for i in range(4) if i != axis]
    assert found is not None
    assert torch.allclose(found, values.double().abs().mean(rest))


@given(sizes=st.lists(st.integers(0, 5), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_grouping_does_not_matter(sizes: list[int], seed: int):
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, 3, 4, generator=generator) for n in [*sizes, 1]]
    observer = ChannelMagnitude(axis=2)
    whole = observer.result(observer.update(observer.start(), torch.cat(parts)))
    state = observer.start()
    for part in parts:
        state = observer.merge(observer.update(observer.start(), part), state)
    found = observer.result(state)
    assert found is not None
    assert whole is not None
    assert torch.allclose(found, whole, rtol=1e-12, atol=0)


def test_half_precision_and_integers_are_summed_in_double():
    observer = ChannelMagnitude(axis=0)
    many = torch.full((1, 4096), 1.5, dtype=torch.float16)
    assert observer.result(observer.update(observer.start(), many)) == 1.5
    whole = torch.full((1, 3), -(2**20), dtype=torch.int64)
    assert observer.result(observer.update(observer.start(), whole)) == 2.0**20


@pytest.mark.parametrize("observer", [ChannelMagnitude(axis=1), ChannelClip(axis=1)])
def test_what_it_refuses(observer: ChannelMagnitude | ChannelClip):
    with pytest.raises(ValueError, match="no values"):
        observer.result(observer.start())
    with pytest.raises(ValueError, match="not finite"):
        observer.update(observer.start(), torch.tensor([[0.0, math.nan]]))
    with pytest.raises(ValueError, match="3 and 4 long"):
        observer.update(observer.update(observer.start(), torch.ones(1, 3)), torch.ones(1, 4))
    with pytest.raises(ValueError, match="rank 1"):
        observer.update(observer.start(), torch.ones(3))
    assert observer.placeholder() is None


def test_collection_finds_it_by_name_and_names_a_bad_tensor():
    request = Request("x", "channel-magnitude", {"axis": 1})
    batches = [{"x": torch.ones(2, 3).numpy()}, {"x": -2 * torch.ones(1, 3).numpy()}]
    found = collect(dict, batches, [request])
    assert found[request.key].tolist() == [4 / 3] * 3
    bad = [{"x": torch.full((2, 3), math.inf).numpy()}]
    with pytest.raises(DataError, match=r"tensor 'x'.*not finite"):
        collect(dict, bad, [request])
