"""Inputs that are 8-bit images: their codes are the pixels, exactly."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from compressor.graph.layers import layers_with_nodes
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.quantize.static.pixels import (
    common_code,
    level_moments,
    pixel_inputs,
    read_pixels,
)
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.layers import Layer
from compressor.types.statistics import ChannelGrid, Moments
from compressor.types.tensors import Batch
from tests.compressor.passes.quantize.static_models import (
    IMAGE,
    ORT,
    TENSORRT,
    Residual,
    outputs,
    shared,
    sqnr,
    statistics,
)

STEP = np.array([0.0171, 0.0175, 0.0174])
OFFSET = np.array([-2.12, -2.04, -1.80])
GRID = ChannelGrid(tuple(STEP.tolist()), tuple(OFFSET.tolist()))

EVERY = {"layers": ({"match": "*"},)}  # small layers are faster as floats


def images(seed: int, batches: int = 4) -> list[Batch]:
    random = np.random.default_rng(seed)
    pixels = [random.integers(0, 256, (8, 3, 12, 12)) for _ in range(batches)]
    form = (1, 3, 1, 1)
    return [
        {"image": (p * STEP.reshape(form) + OFFSET.reshape(form)).astype(np.float32)}
        for p in pixels
    ]


def readers(graph: ir.Model) -> dict[ir.Node, Layer]:
    """The layer that each node multiplies with."""
    return {node: layer for layer, node in layers_with_nodes(graph)}


class First(nn.Module):
    """One convolution."""

    def __init__(self, bias: bool = True, padding: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=padding, bias=bias)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.conv(image)


@cache
def first(bias: bool, padding: int) -> TorchCarrier:
    torch.manual_seed(0)
    return TorchCarrier(First(bias, padding), [IMAGE])


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("padding", [0, 1])
def test_reading_pixels_leaves_the_function_as_it_is(signed, bias, padding):
    model = first(bias, padding)
    graph = model.graph().clone()
    (pixel,) = pixel_inputs(graph, readers(graph))
    name, grid = read_pixels(graph, pixel, GRID, signed=signed)
    after = model.with_graph(graph)
    batch = images(3)[0]
    assert sqnr(outputs(model, batch), outputs(after, batch)) > 100
    levels = after.runner([name]).run(batch)[name]
    (made,) = [v for node in graph.graph for v in node.outputs if v.name == name]
    assert made.shape is not None
    assert list(made.shape)[1:] == list(levels.shape[1:])  # LiteRT asks for all but the first
    inner = levels[:, :, padding:-padding, padding:-padding] if padding else levels
    assert np.abs(inner - np.rint(inner)).max() < 1e-3
    assert inner.min() >= (-128 if signed else 0) - 1e-3
    assert inner.max() <= (127 if signed else 255) + 1e-3
    assert np.allclose(grid.step, STEP)


@pytest.mark.parametrize("context", [ORT, TENSORRT])
def test_codes_of_images_lose_nothing(context):
    model = shared(First)
    declared = QuantizeStatic.model_validate({"weights": {"rounding": "nearest"}, **EVERY})
    rough = QuantizeStatic.model_validate(
        {"weights": {"rounding": "nearest"}, "activations": {"exact-pixels": False}, **EVERY}
    )
    batch = images(9)[0]
    found = []
    for option in (declared, rough):
        gathered = statistics(option, model, context, images(3))
        after = option.apply(model, context, gathered).carrier
        graph = after.graph()
        pixels = next(n for n in graph.graph if n.op_type == "QuantizeLinear").inputs[0]
        assert pixels is not None
        found.append(pixels.name)
        assert sqnr(outputs(model, batch), outputs(after, batch)) > 30
    assert found == ["image_levels", "image"]


@pytest.mark.parametrize(("step", "zero"), [(1 / 128, 127), (1 / 255, 0)])
def test_one_grid_for_all_channels_takes_no_operators(step: float, zero: int):
    random = np.random.default_rng(5)
    batches = [
        {"image": ((random.integers(0, 256, (8, 3, 12, 12)) - zero) * step).astype(np.float32)}
        for _ in range(4)
    ]
    model = shared(First)
    declared = QuantizeStatic.model_validate({"weights": {"rounding": "nearest"}, **EVERY})
    after = declared.apply(model, ORT, statistics(declared, model, ORT, batches)).carrier
    nodes = list(after.graph().graph)
    assert not [n.op_type for n in nodes if n.op_type in ("Pad", "Mul", "Add")]
    first = nodes[0]
    assert first.op_type == "QuantizeLinear"
    assert first.inputs[0] is after.graph().graph.inputs[0]
    codes = first.outputs[0].name or ""
    found = after.runner([codes]).run(batches[0])[codes]
    np.testing.assert_array_equal(found, np.rint(batches[0]["image"] / step + zero))


@pytest.mark.parametrize(
    ("step", "offset"),
    [
        ((0.01, 0.01, 0.0101), (-1.0, -1.0, -1.0)),
        ((0.01, 0.01, 0.01), (-1.0, -1.0, -0.99)),
        ((0.01, 0.01, 0.01), (-1.005, -1.005, -1.005)),
        ((0.01, 0.01, 0.01), (0.01, 0.01, 0.01)),
        ((0.01, 0.01, 0.01), (-2.56, -2.56, -2.56)),
    ],
    ids=["steps", "offsets", "zero-between", "zero-below", "zero-above"],
)
def test_grids_that_one_code_does_not_hold(step: tuple[float, ...], offset: tuple[float, ...]):
    assert common_code(ChannelGrid(step, offset)) is None


def test_values_off_any_grid_are_quantized_as_usual():
    model = shared(Residual)
    declared = QuantizeStatic.model_validate(EVERY)
    random = np.random.default_rng(0)
    batches = [{"image": random.standard_normal((8, 3, 12, 12), np.float32)}]
    gathered = statistics(declared, model, ORT, batches)
    names = {
        v.name
        for n in declared.apply(model, ORT, gathered).carrier.graph().graph
        for v in n.outputs
    }
    assert "image_levels" not in names
    assert "image_codes" in names


def test_an_input_with_two_readers_is_left_alone():
    class Two(First):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.conv(image) + image.mean()

    graph = TorchCarrier(Two(), [IMAGE]).graph()
    assert pixel_inputs(graph, readers(graph)) == ()


def test_moments_of_levels_are_those_of_the_levels():
    torch.manual_seed(0)
    levels = torch.randint(0, 256, (500, 3 * 9)).to(torch.float32)
    step = torch.tensor(GRID.step).repeat_interleave(9)
    offset = torch.tensor(GRID.offset).repeat_interleave(9)
    values = levels * step + offset
    moments = Moments((values.T @ values)[None], values.sum(0)[None], 500)
    found = level_moments(moments, GRID)
    assert torch.allclose(found.second[0], levels.T @ levels, rtol=2e-3)
    assert torch.allclose(found.first[0], levels.sum(0), rtol=1e-3)
