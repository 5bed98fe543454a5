"""ExecuTorch files: every operator against PyTorch, codes against the graph, bad input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as fn
from torch import nn

from compressor.errors import ArtifactError, ModelError, SpecError
from compressor.exporters import ExecutorchExporter, LitertExporter
from compressor.exporters.torch_program.recording import Recorder
from compressor.models.executorch import ExecutorchRunner
from compressor.models.torch.carrier import open_module
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.dynamic import QuantizeDynamic
from compressor.passes.quantize.static.options import WeightOptions
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types import exporter as exporters
from compressor.types.carrier import Carrier
from compressor.types.tensors import TensorSpec
from tests.compressor.exporters.hand_made import CONTEXT
from tests.compressor.exporters.test_litert import (
    IMAGE,
    TARGET,
    Among,
    Function,
    Many,
    Network,
    compare_outputs,
    noise,
    opened,
)
from tests.compressor.passes.quantize.static_models import statistics

SIZE = (3, 24, 24)


def written(carrier: Carrier, folder: Path) -> Path:
    exporter = ExecutorchExporter()
    exporter.check(carrier)
    return exporter.write(carrier, folder, CONTEXT)[0]


def quantized(carrier: Carrier, declared: QuantizeStatic, *shape: int) -> Carrier:
    found = statistics(declared, carrier, TARGET, [noise(16, *shape, seed=3)])
    return declared.apply(carrier, TARGET, found).carrier


def share_lost(exact: np.ndarray, other: np.ndarray) -> float:
    return float(np.square(exact - other).sum() / np.square(exact).sum())


@pytest.mark.slow
def test_operators_compute_what_pytorch_does(tmp_path: Path):
    module = Many()
    carrier = opened(module, *IMAGE)
    runner = ExecutorchExporter().open(written(carrier, tmp_path))
    for count in (1, 3):
        given = noise(count, *IMAGE, seed=count)
        ours = list(runner.run(given).values())
        with torch.no_grad():
            theirs = module(torch.from_numpy(given["x"]))
        for name, mine, other in zip(module.names, ours, theirs, strict=True):
            compare_outputs(mine, other, name)


@pytest.fixture(scope="module")
def network() -> Carrier:
    return Fuse().apply(opened(Network(), *SIZE), TARGET, {}).carrier


@pytest.fixture(scope="module")
def in_codes(network: Carrier) -> Carrier:
    return quantized(network, QuantizeStatic(), *SIZE)


@pytest.fixture(scope="module")
def file(in_codes: Carrier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(in_codes, tmp_path_factory.mktemp("executorch"))


def test_codes_are_computed_with_as_they_are(network: Carrier, in_codes: Carrier, file: Path):
    runner = ExecutorchExporter().open(file)
    assert isinstance(runner, ExecutorchRunner)
    assert [(x.name, x.shape, x.dtype) for x in runner.inputs] == [("x", (None, *SIZE), "float32")]
    given = noise(40, *SIZE, seed=4)
    exact, ours = (next(iter(r.run(given).values())) for r in (network.runner(), runner))
    assert share_lost(exact, ours) < 1e-3
    assert file.stat().st_size == pytest.approx(ExecutorchExporter().predict(in_codes), rel=0.3)


@pytest.mark.slow
def test_the_same_model_gives_the_same_bytes(in_codes: Carrier, file: Path, tmp_path: Path):
    assert written(in_codes, tmp_path).read_bytes() == file.read_bytes()


def replayed(model: Carrier, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what a model's own runner and its recorded calls give, one sample at a time."""
    given = noise(6, *shape, seed=4)
    module = Recorder(model.graph()).record([torch.zeros(1, *shape)])
    with torch.no_grad():
        rows = [module(torch.from_numpy(x[None]))[0].numpy() for x in given["x"]]
    (exact,) = model.runner().run(given).values()
    return exact, np.concatenate(rows)


def test_constants_among_codes():
    network = Fuse().apply(opened(Among(), 3, 9, 9), TARGET, {}).carrier
    model = quantized(network, QuantizeStatic(), 3, 9, 9)
    (exact,) = network.runner().run(noise(6, 3, 9, 9, seed=4)).values()
    assert share_lost(exact, replayed(model, 3, 9, 9)[1]) < 1e-3


@pytest.mark.parametrize("slopes", [1, 8])
def test_a_prelu_among_codes(slopes: int, tmp_path: Path):
    """XNNPACK's own gave axes in another order than its readers expect, and nothing ran."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.PReLU(slopes), nn.Conv2d(8, 4, 3))
    with torch.no_grad():
        module[1].weight += torch.linspace(0.1, 0.9, slopes)
    network = Fuse().apply(opened(module, *SIZE), TARGET, {}).carrier
    file = written(quantized(network, QuantizeStatic(), *SIZE), tmp_path)
    given = noise(6, *SIZE, seed=4)
    runners = network.runner(), ExecutorchExporter().open(file)
    exact, ours = (next(iter(runner.run(given).values())) for runner in runners)
    assert share_lost(exact, ours) < 1e-3


def test_weights_alone_become_floats():
    """XNNPACK computes with codes only if activations are codes, too."""
    module = nn.Sequential(nn.Conv2d(6, 64, 3), nn.ReLU(), nn.Conv2d(64, 8, 3))
    model = QuantizeWeights(bits=8, group=None).apply(opened(module, *IMAGE), TARGET, {}).carrier
    exact, ours = replayed(model, *IMAGE)
    np.testing.assert_allclose(ours, exact, atol=1e-4)
    assert ExecutorchExporter().predict(model) > 4 * (6 * 64 * 9 + 64 * 8 * 9)
    (remark,) = ExecutorchExporter().remarks(model)
    assert "2 layers have their quantized weights in float32" in remark


def test_weights_with_zero_points_become_floats(network: Carrier):
    model = quantized(network, QuantizeStatic(weights=WeightOptions(symmetric=False)), *SIZE)
    (exact,) = network.runner().run(noise(6, *SIZE, seed=4)).values()
    assert share_lost(exact, replayed(model, *SIZE)[1]) < 1e-3


def test_a_bounded_activation_keeps_its_bounds():
    """Also where codes reach beyond them."""

    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).clamp(-0.3, 0.4)).clamp(-0.05, 0.05)

    model = quantized(Fuse().apply(opened(Bounded(), *SIZE), TARGET, {}).carrier, QuantizeStatic(),
                      *SIZE)  # fmt: skip
    exact, ours = replayed(model, *SIZE)
    assert np.abs(ours).max() <= 0.0502
    assert share_lost(exact, ours) < 0.02


@pytest.mark.parametrize("exporter", [LitertExporter(), ExecutorchExporter()])
@pytest.mark.parametrize("dense", [False, True])
def test_scales_that_no_kernel_multiplies_by_leave_a_layer_float(
    exporter: LitertExporter | ExecutorchExporter, dense: bool, tmp_path: Path
):
    """A channel with large weights is always zero by its bias: one code is many of the result."""
    wide = nn.Linear(8, 8) if dense else nn.Conv2d(6, 6, 1)
    module = nn.Sequential(wide, nn.ReLU(), nn.Conv2d(6, 4, 1)).eval()
    carrier = opened(module, *IMAGE)
    with torch.no_grad():
        wide.weight[3] *= 1e5
        wide.bias[3] = -1e6
    carrier = open_module(lambda: module, {}, list(carrier.inputs), "model")
    floats = Fuse().apply(carrier, TARGET, {}).carrier
    codes = quantized(floats, QuantizeStatic(prepare="none"), *IMAGE)
    exporter.check(codes)
    (path,) = exporter.write(codes, tmp_path, CONTEXT)
    given = noise(3, *IMAGE)
    ours, exact = (
        next(iter(x.run(given).values())) for x in (exporter.open(path), floats.runner())
    )
    assert share_lost(exact, ours) < 1e-3


def test_what_executorch_cannot_take_is_named():
    any_height = open_module(
        lambda: Function(fn.relu), {}, [TensorSpec("x", ("n", 3, "height", 8), "float32")], "model"
    )
    grouped = QuantizeWeights(bits=4, group=8).apply(opened(nn.Linear(16, 4), 16), TARGET, {})
    dynamic = QuantizeDynamic().apply(opened(nn.Linear(64, 64), 64), TARGET, {})
    both_ways = opened(nn.LSTM(12, 6, batch_first=True, bidirectional=True), 5, 12)
    both_ways = Fuse().apply(both_ways, TARGET, {}).carrier
    recurrent = QuantizeDynamic().apply(both_ways, TARGET, {})
    volumes = opened(nn.Sequential(nn.Conv3d(1, 4, 3), nn.MaxPool3d(2)), 1, 6, 6, 6)
    for model, message in (
        (volumes, "no kernel for aten::max_pool3d.*; export onnx instead, try litert, or change"),
        (any_height, "'x': has a length that is not fixed; .* only samples may be many"),
        (grouped.carrier, "has scales for groups of a row.*set granularity: channel"),
        (recurrent.carrier, r"groups of a row.*leave its LSTM in floats \(skip: true\)"),
        (dynamic.carrier, "ExecuTorch does not take it; use quantize-static"),
    ):
        with pytest.raises(SpecError, match=message):
            ExecutorchExporter().check(model)


def test_a_batch_of_another_shape_is_refused(file: Path):
    with pytest.raises(ModelError, match="check the inputs' shapes and dtypes"):
        ExecutorchExporter().open(file).run(noise(2, 3, 24, 23))


@pytest.mark.parametrize("kept", [0, 7, 100, 5000])
def test_a_damaged_file_is_refused(file: Path, tmp_path: Path, kept: int):
    path = tmp_path / "model.pte"
    path.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ArtifactError, match="ExecuTorch does not load it"):
        ExecutorchExporter().open(path)


def test_executorch_has_to_be_installed(network: Carrier, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exporters, "find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r'run pip install "compressor\[executorch\]"'):
        ExecutorchExporter().check(network)
