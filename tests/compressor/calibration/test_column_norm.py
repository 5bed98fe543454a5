"""Norms of columns: the diagonal of the second moment, merged in any grouping."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor import catalog
from compressor.calibration.observers.channels import ColumnNorm, SecondMoment


def test_it_is_the_root_of_the_second_moments_diagonal():
    values = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    norms, moments = ColumnNorm(), SecondMoment(rows_per_column=1000)
    found = norms.result(norms.update(norms.start(), values))
    whole = moments.result(moments.update(moments.start(), values))
    assert found is not None
    assert whole is not None
    assert found.shape == (1, 7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, whole.second.diagonal(dim1=1, dim2=2).sqrt())


@pytest.mark.parametrize("groups", [1, 2])
def test_patches_of_a_convolution(groups: int):
    values = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    window = {"kernel": (3, 2), "strides": (2, 1), "pads": (1, 0, 1, 2), "dilations": (1, 2)}
    norms = ColumnNorm(groups=groups, **window)
    moments = SecondMoment(groups=groups, rows_per_column=1000, **window)
    found = norms.result(norms.update(norms.start(), values))
    whole = moments.result(moments.update(moments.start(), values))
    assert found is not None
    assert whole is not None
    assert found.shape == (groups, 24 // groups)
    torch.testing.assert_close(found, whole.second.diagonal(dim1=1, dim2=2).sqrt())


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 4))
def test_any_grouping_gives_the_same(sizes: list[int], cut: int):
    values = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(1))
    observer = ColumnNorm()
    states = [observer.start(), observer.start()]
    for index, part in enumerate(values.split(sizes)):
        before = states[index >= cut]
        kept = None if before is None else before.clone()
        states[index >= cut] = observer.update(before, part)
        assert kept is None or torch.equal(before, kept), "states are values"
    merged = observer.result(observer.merge(*states))
    assert merged is not None
    torch.testing.assert_close(merged, values.norm(dim=0)[None])


def test_nothing_seen_is_an_error_and_planning_gets_nothing():
    observer = catalog.load("observer", "column-norm")()
    assert observer.placeholder() is None
    with pytest.raises(ValueError, match="no values were observed"):
        observer.result(observer.start())
