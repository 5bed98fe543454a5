"""What LiteRT has no operator for, written as several that it has, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as fn
from torch import nn

from compressor.errors import ArtifactError
from compressor.exporters import LitertExporter
from compressor.exporters.litert import file
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.carrier import Carrier
from tests.compressor.exporters.hand_made import FEATURES, Builder, entry
from tests.compressor.exporters.test_litert import (
    IMAGE,
    SOUND,
    TARGET,
    Function,
    compare_losses,
    compare_outputs,
    noise,
    opened,
    written,
)
from tests.compressor.passes.quantize.small_models import graph
from tests.compressor.passes.quantize.static_models import statistics

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "selu": fn.selu, "celu": lambda x: fn.celu(x, 0.7), "elu": lambda x: fn.elu(x, 0.5),
    "soft sign": lambda x: x / (1 + x.abs()), "sign": torch.sign, "tan": lambda x: (x / 9).tan(),
    "not a number": lambda x: torch.where(torch.isnan((x - 1).log()), 2.0, x),
    "infinite": lambda x: torch.where(torch.isinf(1 / x.relu()), 2.0, x),
    "either": lambda x: ((x > 0) ^ (x < 1)).float(), "norm": lambda x: x.norm(dim=(2, 3)),
    "of length one": lambda x: fn.normalize(x, dim=1), "sum of magnitudes": lambda x: x.norm(1, 1),
    "soft greatest": lambda x: (x * 90).logsumexp(1),
    "soft greatest, kept": lambda x: x.logsumexp(3, keepdim=True),
    "greatest": lambda x: x.argmax(1), "least": lambda x: x.argmin(3, keepdim=True),
    "greatest three": lambda x: x.topk(3)[0] + x.topk(3)[1],
    "greatest channels": lambda x: x.topk(2, dim=1)[0], "sum so far": lambda x: x.cumsum(1),
    "triangle": lambda x: x.tril(1), "other triangle": lambda x: x.triu(),
    "repeated": lambda x: x.repeat(1, 2, 1, 3), "spread": lambda x: x[:, :1].expand(-1, 6, -1, -1),
    "each twice": lambda x: x.repeat_interleave(2, 1), "softmax": lambda x: x.softmax(2),
    "log softmax": lambda x: x.log_softmax(2), "backwards": lambda x: x.flip((2, 3)),
    "places": lambda x: x[:, [0, -1]], "pad": lambda x: fn.pad(x, (1, 3, 0, 2), "replicate"),
    "pad around": lambda x: fn.pad(x, (1, 3, 0, 2), "circular"),
    "pixels": lambda x: fn.pixel_shuffle(x[:, :4], 2),
}  # fmt: skip
MODULES: dict[str, Callable[[], nn.Module]] = {
    "groups": lambda: nn.GroupNorm(3, 6), "two axes": lambda: nn.LayerNorm((9, 8)),
    "pixels of a layer": lambda: nn.Sequential(
        nn.Conv2d(6, 12, 3, padding=1), nn.LeakyReLU(0.2), nn.PixelShuffle(2), nn.Conv2d(3, 2, 1)
    ),
    "pixels of groups": lambda: nn.Sequential(nn.Conv2d(6, 12, 3, groups=2), nn.PixelShuffle(2)),
}  # fmt: skip
OF_ROWS: dict[str, Callable[[], nn.Module]] = {
    "pool": lambda: nn.MaxPool1d(3, 2, 1), "average": lambda: nn.AvgPool1d(3, 2, 1),
    "twice as long": lambda: nn.Upsample(scale_factor=2),
    "smooth": lambda: nn.Upsample(scale_factor=2, mode="linear"),
}  # fmt: skip


class Many(nn.Module):
    """Several modules on one input, each with an output of its own."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part(x) for part in self.parts)


@pytest.mark.parametrize("shape", [IMAGE, SOUND])
def test_compositions_compute_what_pytorch_does(shape: tuple[int, ...], tmp_path: Path):
    named: dict[str, nn.Module] = {name: build() for name, build in OF_ROWS.items()}
    if shape == IMAGE:
        named = {name: Function(function) for name, function in FUNCTIONS.items()}
        named |= {name: build() for name, build in MODULES.items()}
    module = Many(list(named.values()))
    runner = LitertExporter().open(written(opened(module, *shape), tmp_path))
    for count in (1, 3):
        given = noise(count, *shape, seed=count)
        with torch.no_grad():
            theirs = module(torch.from_numpy(given["x"]))
        for name, ours, other in zip(named, runner.run(given).values(), theirs, strict=True):
            assert ours.shape == tuple(other.shape), name
            compare_outputs(ours, other, name)


def test_what_pytorch_does_not_write(tmp_path: Path):
    """Operators that other exporters write, against ONNX Runtime."""
    carrier = graph(
        """g (float[N, 4, 6, 8] x) => (float[N, 4, 6, 8] rms, float[N, 4, 6, 8] unit,
                                       float[N, 16, 3, 4] blocks, float[N, 4, 8] logs) {
            rms = RMSNormalization <axis = -1> (x, scale)
            unit = LpNormalization <axis = 1> (x)
            blocks = SpaceToDepth <blocksize = 2> (x)
            positive = Abs (x)
            logs = ReduceLogSum <keepdims = 0> (positive, axes)
        }""",
        {
            "scale": np.linspace(0.5, 2, 8, dtype=np.float32),
            "axes": np.array([2]),
        },
        opset=23,
    )
    given = noise(3, 4, 6, 8)
    ours = LitertExporter().open(written(carrier, tmp_path)).run(given)
    for name, other in carrier.runner().run(given).items():
        compare_outputs(ours[name], torch.from_numpy(other), name)


@pytest.mark.parametrize("axes", [(0, 2), (0, 3), (0, 1), (1, 2), (0,), (2,)])
def test_reductions_leave_the_other_axes_in_order(axes: tuple[int, ...], tmp_path: Path):
    module = nn.Sequential(nn.Conv2d(6, 7, 3), Function(lambda x: x.amax(axes)))
    carrier = opened(module, *IMAGE, batch=2)
    given = noise(2, *IMAGE)
    (ours,) = LitertExporter().open(written(carrier, tmp_path)).run(given).values()
    with torch.no_grad():
        compare_outputs(ours, module(torch.from_numpy(given["x"])), str(axes))


class Pooled(nn.Module):
    """A layer that reads a sound beside its own mean, spread over its length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(6, 8, 3, padding=1), nn.Conv1d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        return self.second(torch.cat([x, x.mean(-1, keepdim=True).expand_as(x)], 1))


def test_a_value_is_spread_where_the_batch_is_fixed(tmp_path: Path):
    carrier = opened(Pooled(), *SOUND, batch=2)
    runner = LitertExporter().open(written(carrier, tmp_path))
    assert runner.operators()["BROADCAST_TO"]  # type: ignore[attr-defined]
    given = noise(2, *SOUND)
    np.testing.assert_allclose(
        *(next(iter(r.run(given).values())) for r in (runner, carrier.runner())), atol=1e-4
    )


def test_an_error_names_what_litert_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(file, "_FLOAT_VERSIONS", {"BROADCAST_TO": 1})
    path = written(opened(Pooled(), *SOUND, batch=2), tmp_path)
    with pytest.raises(ArtifactError, match=r"'BROADCAST_TO' version '1'.*; update ai-edge-litert"):
        LitertExporter().open(path)


def in_codes(module: nn.Module, *shape: int) -> tuple[Carrier, Carrier]:
    floats = Fuse().apply(opened(module, *shape), TARGET, {}).carrier
    declared = QuantizeStatic()
    found = statistics(declared, floats, TARGET, [noise(16, *shape, seed=3)])
    return floats, declared.apply(floats, TARGET, found).carrier


@pytest.mark.parametrize(
    "between",
    [
        nn.PixelShuffle(2),
        Function(lambda x: x.flip(2)),
        Function(lambda x: fn.pad(x, (2, 1, 0, 3), "replicate")),
        Function(lambda x: x.softmax(2)),
        Function(lambda x: fn.normalize(x, dim=1)),
    ],
    ids=["pixels", "backwards", "pad", "softmax", "of length one"],
)
def test_compositions_among_codes(between: nn.Module, tmp_path: Path):
    channels = 3 if isinstance(between, nn.PixelShuffle) else 12
    module = nn.Sequential(
        nn.Conv2d(6, 12, 3), nn.ReLU(), between, nn.Conv2d(channels, 4, 1), nn.ReLU()
    )
    floats, model = in_codes(module, *IMAGE)
    runner = LitertExporter().open(written(model, tmp_path))
    given = noise(20, *IMAGE, seed=4)
    compare_losses(floats, model, runner, given, 1e-2)


def test_a_layer_before_a_shuffle_needs_no_operator_more(tmp_path: Path):
    module = nn.Sequential(nn.Conv2d(6, 12, 3), nn.ReLU(), nn.PixelShuffle(2))
    for carrier in (opened(module, *IMAGE), in_codes(module, *IMAGE)[1]):
        counts = LitertExporter().open(written(carrier, tmp_path)).operators()  # type: ignore[attr-defined]
        assert counts["DEPTH_TO_SPACE"] == counts["CONV_2D"] == 1
        assert not counts["GATHER"]


def test_a_matrix_used_both_ways_is_stored_both_ways(tmp_path: Path):
    made = Builder()
    matrix = np.random.default_rng(0).standard_normal((FEATURES, FEATURES)).astype(np.float32)
    x, weight = entry(), made.constant("weight", matrix)
    value = made.node("Gemm", [x, weight], "there")
    value.shape = x.shape
    value = made.node("Gemm", [value, weight], "back", transB=1)
    carrier = OnnxCarrier(made.model([x], value, FEATURES))
    given = {"x": np.random.default_rng(1).standard_normal((3, FEATURES)).astype(np.float32)}
    (ours,) = LitertExporter().open(written(carrier, tmp_path)).run(given).values()
    np.testing.assert_allclose(ours, given["x"] @ matrix @ matrix.T, rtol=1e-3, atol=1e-2)
