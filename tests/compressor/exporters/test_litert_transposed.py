"""Transposed convolutions in LiteRT files: of sounds and images, in floats and codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as fn
from torch import nn

from compressor.errors import SpecError
from compressor.exporters import LitertExporter
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static.static import QuantizeStatic
from tests.compressor.exporters.test_litert import (
    IMAGE,
    SOUND,
    TARGET,
    compare_losses,
    compare_outputs,
    noise,
    opened,
    written,
)
from tests.compressor.passes.quantize.small_models import graph
from tests.compressor.passes.quantize.static_models import statistics

BATCH = 2
SOUNDS: dict[str, nn.Module] = {
    "plain": nn.ConvTranspose1d(6, 4, 3),
    "without bias": nn.ConvTranspose1d(6, 4, 5, 2, bias=False),
    "cut": nn.ConvTranspose1d(6, 4, 4, 2, 1),
    "cut at one end": nn.ConvTranspose1d(6, 4, 3, 2, 1, 1),
    "beyond the kernel": nn.ConvTranspose1d(6, 4, 3, 2, 0, 1),
    "strides wider than the kernel": nn.ConvTranspose1d(6, 4, 2, 5, 1, 3),
    "groups": nn.ConvTranspose1d(6, 9, 4, 2, 1, groups=3),
    "all cut off": nn.ConvTranspose1d(6, 4, 1, 1, 3),
}
IMAGES: dict[str, nn.Module] = {
    "plain": nn.ConvTranspose2d(6, 4, 3, 2),
    "cut": nn.ConvTranspose2d(6, 4, 3, 2, 1),
    "cut at one end": nn.ConvTranspose2d(6, 4, (3, 4), (2, 1), 1, (1, 0)),
    "a group each": nn.ConvTranspose2d(6, 6, 3, 2, 1, 1, groups=6),
    "beyond the kernel": nn.ConvTranspose2d(6, 4, 2, (2, 3), 0, (0, 2)),
}
CASES = [
    pytest.param(module, shape, id=f"{kind}, {name}")
    for kind, shape, modules in (("sound", SOUND, SOUNDS), ("image", IMAGE, IMAGES))
    for name, module in modules.items()
]


@pytest.mark.parametrize(("module", "shape"), CASES)
def test_it_computes_what_pytorch_does(module: nn.Module, shape: tuple[int, ...], tmp_path: Path):
    carrier = opened(module, *shape, batch=BATCH)
    given = noise(BATCH, *shape)
    runner = LitertExporter().open(written(carrier, tmp_path))
    assert runner.operators()["TRANSPOSE_CONV"] == 1  # type: ignore[attr-defined]
    (ours,) = runner.run(given).values()
    with torch.no_grad():
        compare_outputs(ours, module(torch.from_numpy(given["x"])), "alone")


class Decoder(nn.Module):
    """Two transposed convolutions between convolutions, as in vocoders."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(6, 16, 3, padding=1), nn.Conv1d(5, 3, 1)
        self.wider = nn.ConvTranspose1d(16, 8, 4, 2, 1, groups=groups)
        self.widest = nn.ConvTranspose1d(8, 5, 2, 2, 0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = fn.leaky_relu(self.first(x), 0.1)
        return self.last(self.widest(self.wider(x).relu()).relu())


@pytest.mark.parametrize("groups", [1, 4])
def test_codes_are_computed_with(groups: int, tmp_path: Path):
    given, counted = noise(BATCH, *SOUND, seed=4), [noise(BATCH, *SOUND, seed=s) for s in range(8)]
    floats = Fuse().apply(opened(Decoder(groups), *SOUND, batch=BATCH), TARGET, {}).carrier
    declared = QuantizeStatic()
    model = declared.apply(floats, TARGET, statistics(declared, floats, TARGET, counted)).carrier
    runner = LitertExporter().open(written(model, tmp_path))
    counts = runner.operators()  # type: ignore[attr-defined]
    assert (counts["TRANSPOSE_CONV"], counts["DEQUANTIZE"]) == (2, 1)  # the result is a float
    compare_losses(floats, model, runner, given, 1e-2)


@pytest.mark.parametrize(
    ("module", "shape", "batch", "message"),
    [
        (nn.ConvTranspose1d(6, 4, 3, dilation=2), SOUND, 1, "is dilated, which"),
        (nn.ConvTranspose1d(6, 4, 3), SOUND, "n", "computes any number of samples"),
        (nn.ConvTranspose3d(6, 4, 3), (6, 3, 3, 3), 1, "has 3 axes, and LiteRT's"),
    ],
    ids=["dilated", "batch", "volume"],
)
def test_what_litert_cannot_take_is_named(
    module: nn.Module, shape: tuple[int, ...], batch: int | str, message: str
):
    with pytest.raises(SpecError, match=rf"\(ConvTranspose\): {message}"):
        LitertExporter().check(opened(module, *shape, batch=batch))


@pytest.mark.parametrize("length", [9, 10, 11])
@pytest.mark.parametrize("automatic", ["NOTSET", "SAME_UPPER", "SAME_LOWER"])
def test_pads_that_follow_from_the_length(automatic: str, length: int, tmp_path: Path):
    """As many as cut the result to its length; the odd one before it but for SAME_UPPER."""
    weight = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    carrier = graph(
        f"""g (float[1, 2, 5] x) => (float[1, 3, {length}] y) {{
            y = ConvTranspose <strides = [2], auto_pad = "{automatic}", output_shape = [{length}]>
                (x, weight)
        }}""",
        {"weight": weight},
    )
    given = noise(1, 2, 5)
    (ours,) = LitertExporter().open(written(carrier, tmp_path)).run(given).values()
    (theirs,) = carrier.runner().run(given).values()
    compare_outputs(ours, torch.from_numpy(theirs), "y")
