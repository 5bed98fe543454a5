"""LiteRT files: every operator against PyTorch, codes against the graph, bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as fn
from torch import nn

from compressor.errors import ArtifactError, SpecError
from compressor.exporters import LitertExporter
from compressor.models.litert import LitertRunner
from compressor.models.onnx.ort_runner import graph_runner
from compressor.models.torch.carrier import TorchCarrier, open_module
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static.options import WeightOptions
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types import exporter as exporters
from compressor.types.carrier import Carrier, Runner
from compressor.types.passes import PassContext
from compressor.types.tensors import Batch, TensorSpec
from tests.compressor.exporters.hand_made import CONTEXT
from tests.compressor.passes.quantize.small_models import graph
from tests.compressor.passes.quantize.static_models import statistics

TARGET = PassContext(0, frozenset({"litert"}))


class Function(nn.Module):
    """A function of one tensor as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def opened(module: nn.Module, *shape: int, batch: str | int = "batch") -> TorchCarrier:
    torch.manual_seed(5)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    module.eval()
    return open_module(lambda: module, {}, [TensorSpec("x", (batch, *shape), "float32")], "model")


def noise(count: int, *shape: int, seed: int = 0) -> dict[str, np.ndarray]:
    values = np.random.default_rng(seed).standard_normal((count, *shape))
    return {"x": values.astype(np.float32)}


def written(carrier: Carrier, folder: Path) -> Path:
    exporter = LitertExporter()
    exporter.check(carrier)
    return exporter.write(carrier, folder, CONTEXT)[0]


IMAGE, SOUND, ROWS = (6, 9, 8), (6, 20), (5, 12)
UNARY = {
    "relu": fn.relu, "relu6": fn.relu6, "leaky": lambda x: fn.leaky_relu(x, 0.3), "elu": fn.elu,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "hard-swish": fn.hardswish,
    "hard-sigmoid": fn.hardsigmoid, "swish": fn.silu, "gelu": fn.gelu,
    "gelu-tanh": lambda x: fn.gelu(x, approximate="tanh"), "softplus": fn.softplus, "mish": fn.mish,
    "clip": lambda x: x.clamp(-0.5, 0.7), "at least": lambda x: x.clamp(min=-0.5),
    "abs": torch.abs, "neg": torch.neg, "exp": torch.exp, "sqrt": lambda x: x.abs().sqrt(),
    "log": lambda x: (x.abs() + 1).log(), "floor": torch.floor, "reciprocal": lambda x: 1 / (x + 9),
    "power": lambda x: (x.abs() + 1) ** 1.5, "sine": torch.sin, "round": torch.round,
}  # fmt: skip
FUNCTIONS = {
    "softmax of channels": lambda x: x.softmax(1), "softmax of rows": lambda x: x.softmax(-1),
    "log softmax": lambda x: x.log_softmax(-1),
    "mean": lambda x: x.mean((2, 3)), "mean kept": lambda x: x.mean((2, 3), keepdim=True) * x,
    "mean of channels": lambda x: x.mean(1, keepdim=True) + x, "mean of rows": lambda x: x.mean(2),
    "sum": lambda x: x.sum(-1), "max": lambda x: x.amax((2, 3)), "min": lambda x: x.amin(1),
    "transpose": lambda x: x.transpose(1, 3), "flatten": lambda x: x.flatten(1),
    "view": lambda x: x.reshape(x.shape[0], 3, -1), "cut": lambda x: x[:, 1:5:2, :, 2:-1],
    "pad": lambda x: fn.pad(x, (1, 2, 0, 3)),
    "pad with": lambda x: fn.pad(x, (1, 2, 0, 3), value=2),
    "concat": lambda x: torch.cat([x, x * 2], 1), "concat rows": lambda x: torch.cat([x, -x], -1),
    "split": lambda x: x.split([2, 4], 1)[1] * 2, "chunk": lambda x: x.chunk(2, -1)[0] + 1,
    "where": lambda x: torch.where(x > 0.2, x, x * 0.1), "least": lambda x: torch.minimum(x, -x),
    "twice as large": lambda x: fn.interpolate(x, scale_factor=2, mode="nearest"),
    "smooth": lambda x: fn.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
    "corners": lambda x: fn.interpolate(x, size=(13, 15), mode="bilinear", align_corners=True),
    "attention": lambda x: fn.scaled_dot_product_attention(x, x, x),
    "squeezed": lambda x: x.mean((2, 3), keepdim=True).squeeze(3).squeeze(2),
    "product": lambda x: x @ x.transpose(2, 3), "as it is": lambda x: x,
    "a constant each": lambda x: x * torch.arange(1, 7).reshape(1, 6, 1, 1) + torch.ones(8),
}  # fmt: skip
MODULES = {
    "conv": lambda: nn.Conv2d(6, 7, 3), "same": lambda: nn.Conv2d(6, 7, 3, padding=1),
    "strided": lambda: nn.Conv2d(6, 7, 3, padding=1, stride=2),
    "even kernel": lambda: nn.Conv2d(6, 7, (2, 4), padding=(1, 2), stride=(2, 1)),
    "dilated": lambda: nn.Conv2d(6, 7, 3, padding=2, dilation=2, bias=False),
    "depthwise": lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6),
    "depthwise, twice": lambda: nn.Conv2d(6, 12, 3, stride=2, groups=6),
    "grouped": lambda: nn.Conv2d(6, 9, 3, padding=1, groups=3),
    "pool": lambda: nn.MaxPool2d(2), "pool, padded": lambda: nn.MaxPool2d(3, 2, 1),
    "pool, whole": lambda: nn.MaxPool2d(2, ceil_mode=True),
    "average": lambda: nn.AvgPool2d(2), "average, padded": lambda: nn.AvgPool2d(3, 2, 1),
    "average, same": lambda: nn.AvgPool2d(3, 1, 1, count_include_pad=False),
    "global": lambda: nn.AdaptiveAvgPool2d(1), "global max": lambda: nn.AdaptiveMaxPool2d(1),
    "batch norm": lambda: nn.BatchNorm2d(6), "instance": lambda: nn.InstanceNorm2d(6, affine=True),
    "layer norm": lambda: nn.LayerNorm(8), "dense": lambda: nn.Linear(8, 5),
    "prelu": lambda: nn.PReLU(6),
    "gated": lambda: nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU6(), nn.Conv2d(6, 4, 3), nn.ReLU()),
}  # fmt: skip
APART = ("as it is", "relu", "flatten", "softmax of rows", "conv", "depthwise", "dense")
"""Written alone by default, too: a graph's ends are laid out as what lies there wants it."""


def on_images() -> dict[str, nn.Module]:
    """Return all operators on an image by name."""
    functions = {name: Function(function) for name, function in {**UNARY, **FUNCTIONS}.items()}
    return functions | {name: build() for name, build in MODULES.items()}


class Many(nn.Module):
    """Every operator on one image, each with an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        named = on_images()
        self.names = list(named)
        self.parts = nn.ModuleList(named.values())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part(x) for part in self.parts)


def compare_losses(
    floats: Carrier, codes: Carrier, runner: Runner, given: Batch, most: float
) -> None:
    """Check that a file loses about what its graph does, and at most this share of the power."""
    graph = graph_runner(codes.graph(), optimize=False)
    exact, ours, theirs = (
        next(iter(r.run(given).values())) for r in (floats.runner(), runner, graph)
    )
    lost, lost_by_graph = (np.square(exact - x).sum() for x in (ours, theirs))
    assert lost < 1.5 * lost_by_graph
    assert lost < most * np.square(exact).sum()


def compare_outputs(ours: np.ndarray, theirs: torch.Tensor, name: str) -> None:
    want = theirs.numpy()
    np.testing.assert_allclose(ours, want, rtol=1e-4, atol=1e-4 * np.abs(want).max(), err_msg=name)


def test_operators_compute_what_pytorch_does(tmp_path: Path):
    module = Many()
    runner = LitertExporter().open(written(opened(module, *IMAGE), tmp_path))
    for count in (1, 3, 2):
        given = noise(count, *IMAGE, seed=count)
        ours = runner.run(given).values()
        with torch.no_grad():
            theirs = module(torch.from_numpy(given["x"]))
        for name, mine, other in zip(module.names, ours, theirs, strict=True):
            compare_outputs(mine, other, name)


CASES = [
    *((name, module, IMAGE) for name, module in on_images().items()),
    ("sound", nn.Conv1d(6, 4, 5, stride=2, padding=2), SOUND),
    ("sound, dilated", nn.Conv1d(6, 6, 3, dilation=2, groups=6), SOUND),
    ("rows", nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 3)), ROWS),
    ("row", nn.Linear(12, 7), ROWS[1:]),
]


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        pytest.param(
            *case, id=name, marks=[pytest.mark.slow] * (case[1] == IMAGE and name not in APART)
        )
        for name, *case in CASES
    ],
)
def test_an_operator_alone_computes_what_pytorch_does(
    module: nn.Module, shape: tuple[int, ...], tmp_path: Path
):
    carrier = opened(module, *shape)
    runner = LitertExporter().open(written(carrier, tmp_path))
    for count in (1, 3, 2):
        given = noise(count, *shape, seed=count)
        (ours,) = runner.run(given).values()
        with torch.no_grad():
            compare_outputs(ours, module(torch.from_numpy(given["x"])), "alone")


class Network(nn.Module):
    """What codes meet: residual sums, activations of all kinds, joins, pools, one of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv2d(8, 8, 1)
        self.gate = nn.Conv2d(8, 8, 1)
        self.wide = nn.Conv2d(16, 12, 3)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = fn.max_pool2d(fn.relu6(self.stem(x)), 3, 2, 1)
        y = fn.hardswish(self.deep(x))
        x = fn.relu(x + self.point(y))
        gate = torch.sigmoid(self.gate(fn.adaptive_avg_pool2d(x, 1)))
        x = torch.cat([x * gate, fn.avg_pool2d(y, 3, 1, 1)], 1)
        x = fn.leaky_relu(self.wide(x), 0.1)
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def network() -> Carrier:
    return Fuse().apply(opened(Network(), 3, 24, 24), TARGET, {}).carrier


@pytest.fixture(scope="module")
def in_codes(network: Carrier) -> Carrier:
    declared = QuantizeStatic()
    found = statistics(declared, network, TARGET, [noise(16, 3, 24, 24, seed=3)])
    return declared.apply(network, TARGET, found).carrier


def test_codes_are_computed_with_as_they_are(network: Carrier, in_codes: Carrier, tmp_path: Path):
    """Integers from the first layer to the last, and as near to the floats as ONNX Runtime's."""
    path = written(in_codes, tmp_path)
    runner = LitertExporter().open(path)
    assert isinstance(runner, LitertRunner)
    counts = runner.operators()
    assert (counts["CONV_2D"], counts["DEPTHWISE_CONV_2D"], counts["FULLY_CONNECTED"]) == (4, 1, 1)
    assert counts["DEQUANTIZE"] == 1  # of the result
    given = noise(40, 3, 24, 24, seed=4)
    compare_losses(network, in_codes, runner, given, 1e-3)


class Among(nn.Module):
    """Constants of several ranks among codes, and a class token for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)
        self.rows = nn.Linear(8, 6)
        self.token = nn.Parameter(torch.ones(1, 1, 8))
        self.register_buffer("shift", torch.linspace(-1, 1, 8).reshape(8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = fn.relu(self.second(self.first(x) * 0.5 + self.shift))
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.rows(x).softmax(-1)


def test_constants_among_codes(tmp_path: Path):
    network = Fuse().apply(opened(Among(), 3, 9, 9), TARGET, {}).carrier
    declared = QuantizeStatic()
    found = statistics(declared, network, TARGET, [noise(16, 3, 9, 9, seed=3)])
    model = declared.apply(network, TARGET, found).carrier
    given = noise(7, 3, 9, 9, seed=4)
    runner = LitertExporter().open(written(model, tmp_path))
    exact, ours = (next(iter(r.run(given).values())) for r in (network.runner(), runner))
    assert np.square(exact - ours).sum() < 1e-3 * np.square(exact).sum()


def test_weights_with_a_zero_point_are_refused(network: Carrier, tmp_path: Path):
    declared = QuantizeStatic(weights=WeightOptions(symmetric=False))
    found = statistics(declared, network, TARGET, [noise(16, 3, 24, 24, seed=3)])
    model = declared.apply(network, TARGET, found).carrier
    with pytest.raises(SpecError, match="has a zero point, and LiteRT's weights have none"):
        written(model, tmp_path)


def test_the_size_is_predicted(network: Carrier, in_codes: Carrier, tmp_path: Path):
    for model in (network, in_codes):
        size = written(model, tmp_path).stat().st_size
        assert LitertExporter().predict(model) == pytest.approx(size, rel=0.02)


def test_the_same_model_gives_the_same_bytes(in_codes: Carrier, tmp_path: Path):
    first = written(in_codes, tmp_path).read_bytes()
    assert written(in_codes, tmp_path).read_bytes() == first


def test_weights_alone_stay_codes(tmp_path: Path):
    """They are dequantized when the file is opened."""
    module = nn.Sequential(nn.Conv2d(6, 64, 3), nn.ReLU(), nn.Conv2d(64, 8, 3))
    floats = opened(module, *IMAGE)
    declared = QuantizeWeights(bits=8, group=None)
    model = declared.apply(floats, TARGET, {}).carrier
    path = written(model, tmp_path)
    weights = 6 * 64 * 9 + 64 * 8 * 9
    assert weights < path.stat().st_size < 2 * weights
    given = noise(3, *IMAGE)
    ours, theirs = (
        next(iter(r.run(given).values())) for r in (LitertExporter().open(path), model.runner())
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_what_litert_cannot_take_is_named(network: Carrier, tmp_path: Path):
    erf = opened(Function(torch.erf), *IMAGE)
    any_height = open_module(
        lambda: Function(fn.relu),
        {},
        [TensorSpec("x", ("n", 3, "height", 8), "float32")],
        "model",
    )
    grouped = QuantizeWeights(bits=4, group=8).apply(opened(nn.Linear(16, 4), 16), TARGET, {})
    recurrent = opened(nn.LSTM(12, 6, batch_first=True), *ROWS)
    counts = graph(
        "g (float[N, 4] x) => (float[N, 4] y) { s = Shape(x) i = Constant<value_int = 0>() "
        "n = Gather(s, i) f = Cast<to = 1>(n) y = Mul(x, f) }"
    )
    for model, message in (
        (counts, r"\(Shape\): .*give the inputs a fixed number of samples"),
        (recurrent, r"\(LSTM\): LiteRT has no operator for ONNX's LSTM"),
        (erf, r"node '.*' \(Erf\): LiteRT has no operator for ONNX's Erf"),
        (
            any_height,
            r"'x': has the shape \[n, 3, height, 8\]; .*only the axis of samples may",
        ),
        (grouped.carrier, "has scales for groups of a row.*set granularity: channel"),
    ):
        with pytest.raises(SpecError, match=message):
            LitertExporter().check(model)


@pytest.mark.parametrize("kept", [0, 7, 100, 5000])
def test_a_damaged_file_is_refused(in_codes: Carrier, tmp_path: Path, kept: int):
    path = written(in_codes, tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ArtifactError, match="LiteRT does not load it"):
        LitertExporter().open(path)


def test_litert_has_to_be_installed(network: Carrier, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exporters, "find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r'run pip install "compressor\[litert\]"'):
        LitertExporter().check(network)
