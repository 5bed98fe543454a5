"""LiteRT files keep axes and types: columns that are taken out, scalars, negative places, bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from compressor.errors import SpecError
from compressor.exporters import LitertExporter
from compressor.models.torch.carrier import open_module
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.tensors import TensorSpec
from tests.compressor.exporters.test_litert import TARGET, Function, noise, opened, written

SHAPE = (5, 6, 7)
TAKEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a number each": lambda x: x[:, 1, 2, 3],
    "channel": lambda x: x[:, 0] * 2,
    "row": lambda x: (x * 2)[:, :, 2],
    "column": lambda x: x[..., 3],
    "last channel": lambda x: x[:, -1],
    "last but one of each row": lambda x: (x * 2)[..., -2] * 2,
}


@pytest.mark.parametrize("function", TAKEN.values(), ids=TAKEN.keys())
def test_what_is_taken_out_loses_its_axis(
    function: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
):
    runner = LitertExporter().open(written(opened(Function(function), *SHAPE), tmp_path))
    for count in (1, 3):
        given = noise(count, *SHAPE)
        (ours,) = runner.run(given).values()
        theirs = function(torch.from_numpy(given["x"])).numpy()
        assert ours.shape == theirs.shape
        np.testing.assert_array_equal(ours, theirs)


class Table(nn.Module):
    """Categories in int64, each with a table of its own, beside numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 4) for n in (3, 9))
        self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(13, 2)

    def forward(self, kinds: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        looked_up = [table(kinds[:, i]) for i, table in enumerate(self.tables)]
        return self.head(torch.cat([*looked_up, self.norm(x)], 1))


def test_columns_of_categories(tmp_path: Path):
    torch.manual_seed(0)
    module = Table().eval()
    specs = [
        TensorSpec("kinds", ("batch", 2), "int64"),
        TensorSpec("x", ("batch", 5), "float32"),
    ]
    path = written(open_module(lambda: module, {}, specs, "model"), tmp_path)
    given = noise(6, 5) | {"kinds": np.array([[0, 8], [1, 7], [2, 0], [0, 1], [1, 2], [2, 3]])}
    (ours,) = LitertExporter().open(path).run(given).values()
    with torch.no_grad():
        theirs = module(*(torch.from_numpy(given[name]) for name in ("kinds", "x")))
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-6)


def test_codes_of_tables_are_looked_up(tmp_path: Path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(4000, 8), nn.Flatten(), nn.Linear(24, 2)).eval()
    specs = [TensorSpec("x", ("batch", 3), "int64")]
    floats = open_module(lambda: module, {}, specs, "model")
    declared = QuantizeWeights(bits=8, group=None, embeddings=True)
    model = declared.apply(floats, TARGET, {}).carrier
    path = written(model, tmp_path)
    assert path.stat().st_size < 2 * 4000 * 8
    given = {"x": np.arange(12).reshape(4, 3) * 300}
    (ours,), (theirs,) = (
        r.run(given).values() for r in (LitertExporter().open(path), model.runner())
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


class Scaled(nn.Module):
    """An input without axes, and a sum without axes among what computes."""

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * by, x.sum() * by


def test_scalars_have_no_axis(tmp_path: Path):
    specs = [TensorSpec("x", (2, 3), "float32"), TensorSpec("by", (), "float32")]
    path = written(open_module(Scaled, {}, specs, "model"), tmp_path)
    given = noise(2, 3) | {"by": np.array(3, np.float32)}
    scaled, total = LitertExporter().open(path).run(given).values()
    np.testing.assert_allclose(scaled, 3 * given["x"], rtol=1e-6)
    assert total.shape == ()
    np.testing.assert_allclose(total, 3 * given["x"].sum(), rtol=1e-5)


def test_the_last_of_any_number_of_samples_is_refused():
    last = opened(Function(lambda x: x[-1]), *SHAPE)
    with pytest.raises(SpecError, match=r"\(Gather\): counts samples from the end"):
        LitertExporter().check(last)


class Shown(nn.Module):
    """Bytes to bytes, channels last on both sides, as cameras and screens have them."""

    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.Conv2d(3, 12, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown = nn.functional.pixel_shuffle(self.grow(x.permute(0, 3, 1, 2).float() / 255), 2)
        return (grown.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


def test_images_of_bytes_stay_bytes(tmp_path: Path):
    torch.manual_seed(0)
    module = Shown().eval()
    specs = [TensorSpec("x", ("batch", 6, 5, 3), "uint8")]
    runner = LitertExporter().open(
        written(open_module(lambda: module, {}, specs, "model"), tmp_path)
    )
    image = np.random.default_rng(0).integers(0, 256, (2, 6, 5, 3), np.uint8)
    (ours,) = runner.run({"x": image}).values()
    with torch.no_grad():
        theirs = module(torch.from_numpy(image)).numpy()
    assert ours.dtype == np.uint8
    assert np.abs(ours.astype(int) - theirs).max() <= 1  # halves may round either way
