"""Complex parameters and buffers: pairs of real numbers in the graph, as complex values are."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from compressor.models.executor import GraphModule
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.passes import PassContext
from compressor.types.tensors import Batch, TensorSpec
from tests.compressor.models.smaller_modules import worst
from tests.compressor.passes.prune.structured_models import Given, declared, output, pruned
from tests.zoo_pruning import reload_errors

INPUTS = (TensorSpec("x", ("batch", 128), "float32"),)


class Spectrum(nn.Module):
    """Energies of frames by a Fourier matrix that is a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        steps = torch.arange(17.0)[:, None] * torch.arange(32.0)
        self.register_buffer("dft", torch.polar(torch.ones(17, 32), -2 * torch.pi * steps / 32))
        self.first, self.second = nn.Conv1d(17, 12, 3), nn.Conv1d(12, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.matmul(x.unfold(-1, 32, 16).to(torch.complex64), self.dft.T)
        frames = torch.log1p(z.abs() ** 2).transpose(1, 2)
        scores: Tensor = self.head(self.second(torch.relu(self.first(frames))).relu().mean(-1))
        return scores


class Modulated(nn.Module):
    """Features with a complex factor each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 24), nn.Linear(24, 4)
        self.factor = nn.Parameter(torch.randn(24, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.relu(self.first(x)).to(torch.complex64) * self.factor
        scores: Tensor = self.second(turned.abs())
        return scores


@cache
def carrier(kind: type[nn.Module]) -> TorchCarrier:
    torch.manual_seed(0)
    return TorchCarrier(kind(), INPUTS)


def batch() -> Batch:
    return {"x": np.random.default_rng(0).standard_normal((3, 128)).astype(np.float32)}


@pytest.mark.parametrize(("kind", "name"), [(Spectrum, "dft"), (Modulated, "factor")])
def test_they_are_pairs_in_the_graph(kind: type[nn.Module], name: str) -> None:
    """They were complex there, beside operators that take pairs, and the run failed."""
    model = carrier(kind)
    held = model.module.state_dict()[name]
    stored = model.graph().graph.initializers[name].const_value
    assert stored is not None
    assert stored.dtype == ir.DataType.FLOAT
    assert tuple(stored.shape.numpy()) == (*held.shape, 2)
    (wanted,) = model.module_outputs(batch())
    assert worst(output(model, batch()), wanted) < 1e-5
    with torch.inference_mode():
        (executed,) = GraphModule(model.graph())(x=torch.from_numpy(batch()["x"])).values()
    assert worst(executed.numpy(), wanted) < 1e-5
    turned = model.with_weights({name: held * (0.6 + 0.3j)})
    assert isinstance(turned, TorchCarrier)
    assert worst(output(turned, batch()), turned.module_outputs(batch())[0]) < 1e-5
    assert worst(output(turned, batch()), wanted) > 0.01


@pytest.mark.parametrize("kind", [Spectrum, Modulated])
def test_networks_with_them_are_pruned_and_reload(kind: type[nn.Module], tmp_path: Path) -> None:
    model = carrier(kind)
    step = declared(target={"ratio": 0.5})
    small = pruned(step, model, Given((batch(),))).carrier
    assert isinstance(small, TorchCarrier)
    assert worst(output(small, batch()), small.module_outputs(batch())[0]) < 1e-5
    preview = step.preview(model, PassContext(), {})
    assert [x.shape for x in preview.layers()] == [x.shape for x in small.layers()]
    assert max(reload_errors(small, batch(), tmp_path).values()) < 1e-6


def test_a_complex_parameter_loses_channels_in_the_module() -> None:
    small = pruned(declared(target={"ratio": 0.5}), carrier(Modulated), Given((batch(),))).carrier
    assert isinstance(small, TorchCarrier)
    assert not small.executes_graph
    factor = small.module.state_dict()["factor"]
    assert factor.shape == (12,)
    assert factor.dtype == torch.complex64
