"""Running statistics estimated anew, against what PyTorch estimates in training mode."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compressor.errors import DataError
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.batch_statistics import PooledMoments, batch_norms, re_estimated
from compressor.types.carrier import Carrier
from compressor.types.tensors import Batch, TensorSpec

IMAGE = TensorSpec("image", ("batch", 3, 8, 8), "float32")


class Normed(nn.Module):
    """Two normalizations, the second of which is the output too; one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.again = nn.Conv2d(4, 4, 1)
        self.flat = nn.Linear(4, 5)
        self.last = nn.BatchNorm1d(5, eps=1e-3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(image)))
        return self.last(self.flat(self.again(x).mean((2, 3))))


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    made = Normed()
    for norm in (made.norm, made.last):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return made.eval()


@pytest.fixture(scope="module")
def carrier(module: nn.Module) -> Carrier:
    return TorchCarrier(module, [IMAGE])


def batches(*sizes: int) -> list[Batch]:
    random = np.random.default_rng(0)
    return [{"image": 2 + 3 * random.standard_normal((n, 3, 8, 8), np.float32)} for n in sizes]


def statistics(carrier: Carrier) -> dict[str, torch.Tensor]:
    stored = carrier.tensors()
    return {n: stored[n].read() for n in stored if "running" in n}


def test_it_is_what_a_training_batch_estimates(module, carrier):
    (batch,) = batches(16)
    trained = deepcopy(module).train()
    for norm in (trained.norm, trained.last):
        norm.momentum = 1.0
    trained(torch.from_numpy(batch["image"]))
    found = statistics(re_estimated(carrier, [batch]))
    for name, count in (("norm", 16 * 64), ("last", 16)):
        wanted = trained.state_dict()
        assert torch.allclose(
            found[f"{name}.running_mean"], wanted[f"{name}.running_mean"], atol=1e-5
        )
        # PyTorch's running variance is that of a sample, ours that of the population.
        population = wanted[f"{name}.running_var"] * (count - 1) / count
        assert torch.allclose(found[f"{name}.running_var"], population, rtol=1e-4)


def test_the_model_then_normalizes_the_data(carrier):
    data = batches(64)
    after = re_estimated(carrier, data)
    (output,) = after.runner().run(data[0]).values()
    shift, scale, variance = (
        after.tensors()[f"last.{n}"].read().numpy() for n in ("bias", "weight", "running_var")
    )
    # With one batch the running statistics are those inside it, so the layers before it agree.
    assert output.mean(0) == pytest.approx(shift, abs=1e-3)
    assert output.std(0) == pytest.approx(
        np.abs(scale) * np.sqrt(variance / (variance + 1e-3)), rel=1e-3
    )


def test_all_carriers_agree_and_nothing_else_changes(carrier):
    data = batches(8, 8, 3)
    graph = OnnxCarrier(carrier.graph())
    ours, theirs = re_estimated(carrier, data), re_estimated(graph, data)
    for name, tensor in ours.tensors().items():
        if "tracked" in name:
            continue
        assert torch.equal(tensor.read(), theirs.tensors()[name].read()), name
        assert ("running" in name) != torch.equal(tensor.read(), carrier.tensors()[name].read())


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 99))
def test_pooled_moments_are_those_of_all_samples(sizes, seed):
    random = np.random.default_rng(seed)
    parts = [5 + random.standard_normal((n, 3)) for n in sizes]
    pooled = PooledMoments()
    for part in parts:
        pooled.add(len(part), part.mean(0), part.var(0))
    mean, variance = pooled.pooled()
    whole = np.concatenate(parts)
    assert mean == pytest.approx(whole.mean(0))
    assert variance == pytest.approx(whole.var(0), abs=1e-9)


def test_what_it_refuses(carrier):
    with pytest.raises(DataError, match="has no samples"):
        re_estimated(carrier, [])
    (bad,) = batches(2)
    bad["image"][0, 0, 0, 0] = np.inf
    with pytest.raises(DataError, match="is not finite on the calibration data"):
        re_estimated(carrier, [bad])


def test_a_model_without_normalizations_has_none(carrier):
    assert list(batch_norms(carrier.graph()))
    plain = TorchCarrier(nn.Linear(3, 2), [TensorSpec("input", ("batch", 3), "float32")])
    assert not list(batch_norms(plain.graph()))
