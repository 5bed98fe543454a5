"""Bags of embeddings, which the exporter writes as a loop that no runtime loads."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor, nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.types.tensors import Batch
from tests.compressor.models.sample_modules import spec

pytestmark = pytest.mark.usefixtures("lowered_each_time")
NUMBERS = np.array([[1, 2, 4, 3], [3, 3, 3, 3], [0, 9, 3, 1]])


class Bags(nn.Module):
    """A bag for each sample, with and without a row that is left out."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.all = nn.EmbeddingBag(10, 6, mode=mode)
        self.some = nn.EmbeddingBag(10, 6, mode=mode, padding_idx=3)

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        return self.all(a), self.some(a)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 6, mode="sum", padding_idx=3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = self.bag(a, per_sample_weights=b)
        return result


class Ragged(nn.Module):
    """Bags of different lengths, one of which is empty."""

    def __init__(self, mode: str, include_last_offset: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 6, mode=mode, include_last_offset=include_last_offset)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = self.bag(a, b)
        return result


def agree(module: nn.Module, axes: dict[str, tuple[str | int, ...]], batch: Batch) -> None:
    inputs = [spec(name, *axes[name], dtype=array.dtype.name) for name, array in batch.items()]
    carrier = TorchCarrier(module, inputs)
    graph, wanted = carrier.runner().run(batch).values(), carrier.module_outputs(batch)
    for have, want in zip(graph, wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)
    assert not {"Loop", "SequenceInsert"} & {n.op_type for n in carrier.graph().graph}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_for_each_sample(mode: str):
    agree(Bags(mode), {"a": ("batch", 4)}, {"a": NUMBERS})


def test_weighted_bags():
    factors = np.random.default_rng(0).random((3, 4)).astype(np.float32)
    axes: dict[str, tuple[str | int, ...]] = {"a": ("batch", 4), "b": ("batch", 4)}
    agree(Weighted(), axes, {"a": NUMBERS, "b": factors})


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(("starts", "last"), [([0, 2, 2, 7], False), ([0, 2, 2, 7, 12], True)])
def test_bags_of_different_lengths(mode: str, starts: list[int], last: bool):
    axes: dict[str, tuple[str | int, ...]] = {"a": ("numbers",), "b": ("bags",)}
    agree(Ragged(mode, last), axes, {"a": NUMBERS.ravel(), "b": np.array(starts)})
