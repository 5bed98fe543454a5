"""Pools with windows of several sizes or a divisor, and instance norms with own statistics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from tests.compressor.models.test_translations import agree, normal

pytestmark = pytest.mark.usefixtures("lowered_each_time")


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (nn.AdaptiveMaxPool1d(4), (4, 10)),
        (nn.AdaptiveMaxPool2d((3, 5)), (4, 16, 16)),
        (nn.AdaptiveMaxPool2d((None, 5)), (4, 16, 16)),
        (nn.AdaptiveMaxPool3d(3), (2, 4, 5, 6)),
        (nn.AdaptiveAvgPool3d((2, 3, None)), (2, 6, 8, 5)),
    ],
)
def test_windows_of_several_sizes_are_pooled(pool: nn.Module, shape: tuple[int, ...]) -> None:
    """They were refused: the exporter has no function for them."""
    agree(pool, normal(3, *shape))


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (partial(nn.AvgPool2d, 3, 2, 1), (8, 8)),
        (partial(nn.AvgPool2d, (3, 2), None, (1, 0), count_include_pad=False), (7, 9)),
        (partial(nn.AvgPool2d, 2, 3, 1), (6, 7)),
        (partial(nn.AvgPool3d, 2, (1, 2, 3), 1), (4, 5, 6)),
    ],
)
def test_an_average_pool_keeps_its_divisor(
    pool: Callable[..., nn.Module], shape: tuple[int, ...], ceil: bool
) -> None:
    """The exporter divides by the number of elements; the run blamed random numbers."""
    agree(pool(ceil_mode=ceil, divisor_override=5), normal(2, 3, *shape))


def test_windows_of_one_size_stay_a_pool() -> None:
    carrier = agree(nn.AdaptiveMaxPool2d((4, 1)), normal(2, 3, 8, 6))
    assert [node.op_type for node in carrier.graph().graph] == ["MaxPool"]


@pytest.mark.parametrize("kept", [True, False])
def test_an_instance_norm_with_statistics_is_a_batch_norm(kept: bool) -> None:
    """The exporter repeats statistics for each sample, so that no channel could be followed."""
    norm = nn.InstanceNorm2d(6, affine=True, track_running_stats=kept)
    for statistic in norm.buffers():
        if statistic.is_floating_point():
            torch.nn.init.uniform_(statistic, 0.5, 1.5)
    carrier = agree(nn.Sequential(nn.Conv2d(3, 6, 3), norm).eval(), normal(2, 3, 8, 8))
    kinds = [node.op_type for node in carrier.graph().graph]
    assert kinds == ["Conv", "BatchNormalization" if kept else "InstanceNormalization"]
