"""A model whose activations are rounded by codes that a run is given."""

from functools import partial

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from compressor.models.onnx.ort_runner import graph_runner
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static import simulation
from compressor.passes.quantize.static.placement import ActivationCode
from compressor.passes.quantize.static.simulation import Codes, Simulation
from compressor.types.tensors import Array, TensorSpec
from tests.compressor.passes.quantize.static_models import ORT, Residual, data, shared


class Pooled(nn.Module):
    """Two values that are rounded with nothing but a pooling between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(torch.relu(self.first(x)), 2)


def rounded(values: Array, code: ActivationCode) -> Array:
    levels = np.clip(np.rint(values / np.float32(code.scale)) + code.zero_point, 0, 255)
    return ((levels - code.zero_point) * np.float32(code.scale)).astype(np.float32)


@pytest.mark.parametrize("scales", [(0.05, 0.2), (0.2, 0.05), (0.01, 0.4)])
def test_each_value_is_rounded_by_its_own_scale(scales: tuple[float, float]):
    """The runtime optimizes the graph, but joins no two roundings, nor moves one."""
    torch.manual_seed(0)
    spec = TensorSpec("x", ("batch", 3, 8, 8), "float32")
    model = Fuse().apply(TorchCarrier(Pooled(), [spec]), ORT, {}).carrier
    graph = model.graph().graph
    pooled = next(node for node in graph if node.op_type == "MaxPool")
    names = [value.name or "" for value in (pooled.inputs[0], pooled.outputs[0]) if value]
    uint8 = ir.DataType.UINT8
    codes: Codes = {n: ActivationCode(s, 3, uint8) for n, s in zip(names, scales, strict=True)}
    batch = {"x": np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)}
    inner = model.runner((names[0],)).run(batch)[names[0]]
    first = rounded(inner, codes[names[0]])
    largest = first.reshape(2, 8, 4, 2, 4, 2).max((3, 5))
    found = Simulation(model.graph(), codes).run(batch, codes)[0]
    # Sums in another order may round to the neighbouring level, in few places.
    assert np.mean(np.abs(found - rounded(largest, codes[names[1]])) > 1e-5) < 0.01


def test_optimizing_keeps_what_is_computed(monkeypatch: pytest.MonkeyPatch):
    """Integer kernels, which the runtime would make of it, round sums that stay floats here."""
    model, batch = shared(Residual), data()[0]
    values = [v.name or "" for node in model.graph().graph for v in node.outputs]
    codes: Codes = {name: ActivationCode(0.07, 100, ir.DataType.UINT8) for name in values}
    (found,) = Simulation(model.graph(), codes).run(batch, codes)
    plain = partial(graph_runner, optimize=False)
    monkeypatch.setattr(simulation, "graph_runner", plain)
    (wanted,) = Simulation(model.graph(), codes).run(batch, codes)
    assert np.mean(np.abs(found - wanted) > 1e-5) < 0.03  # those that round to another level
