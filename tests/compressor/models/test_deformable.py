"""The deformable convolution of ``torchvision``, which need not be installed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import floor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compressor.models.torch.carrier import TorchCarrier
from tests.compressor.models.sample_modules import spec

pytestmark = pytest.mark.usefixtures("lowered_each_time")
_STEPS = ("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w")
_STEPS += ("groups", "offset_groups")
_SCHEMA = (
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    f"{', '.join(f'SymInt {step}' for step in _STEPS)}, bool use_mask) -> Tensor"
)


def _value(plane: Tensor, row: float, column: float) -> float:
    """Return what lies between four pixels; those outside of the plane are 0."""
    total = 0.0
    for i, j in product((floor(row), floor(row) + 1), (floor(column), floor(column) + 1)):
        if 0 <= i < plane.shape[0] and 0 <= j < plane.shape[1]:
            total += (1 - abs(row - i)) * (1 - abs(column - j)) * float(plane[i, j])
    return total


def _deformed(x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, *steps: Any) -> Tensor:
    """Sum products tap by tap, of one group."""
    bias, (stride, pad, dilation) = steps[0], steps[1:7:2]
    made = x.new_zeros(x.shape[0], weight.shape[0], *offset.shape[2:])
    for n, out, row, column in product(*map(range, made.shape)):
        total = float(bias[out])
        for channel, i, j in product(*map(range, weight.shape[1:])):
            tap = i * weight.shape[3] + j
            down, right = (float(v) for v in offset[n, 2 * tap : 2 * tap + 2, row, column])
            place = (
                row * stride - pad + i * dilation + down,
                column * stride - pad + j * dilation + right,
            )
            factor = float(weight[out, channel, i, j] * mask[n, tap, row, column])
            total += factor * _value(x[n, channel], *place)
        made[n, out, row, column] = total
    return made


@pytest.fixture
def operator() -> Iterator[Any]:
    """Define the operator; the library that has it is no dependency."""
    with torch.library._scoped_library("torchvision", "FRAGMENT") as library:
        if not hasattr(torch.ops.torchvision, "deform_conv2d"):
            library.define(_SCHEMA)
            library.impl("deform_conv2d", _deformed, "CPU")
            library.impl("deform_conv2d", _shape, "Meta")
        yield torch.ops.torchvision.deform_conv2d


def _shape(x: Tensor, weight: Tensor, offset: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], *offset.shape[2:])


def test_a_deformable_convolution_is_lowered(operator: Any) -> None:
    """It was refused: PyTorch's exporter has no function for it."""

    class Deformed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offset, self.mask = nn.Conv2d(2, 12, (3, 2)), nn.Conv2d(2, 6, (3, 2))
            self.weight, self.bias = (
                nn.Parameter(torch.randn(3, 2, 3, 2)),
                nn.Parameter(torch.ones(3)),
            )

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.sigmoid(self.mask(x))
            steps = (1, 1, 0, 0, 1, 1, 1, 1)
            made: Tensor = operator(x, self.weight, self.offset(x), mask, self.bias, *steps, True)
            return made

    with torch.random.fork_rng():
        torch.manual_seed(1)
        carrier = TorchCarrier(Deformed(), [spec("x", "batch", 2, 6, 5)])
    batch = {"x": np.random.default_rng(2).standard_normal((2, 2, 6, 5)).astype(np.float32)}
    (have,), (want,) = carrier.runner().run(batch).values(), carrier.module_outputs(batch)
    np.testing.assert_allclose(have, want, atol=1e-5)
    assert {node.op_type for node in carrier.graph().graph} >= {"DeformConv"}
