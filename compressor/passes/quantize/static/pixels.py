"""Exact codes for images: the codes of a network's input are the pixels it was made from.

Normalized 8-bit images lie on a grid of 256 values a channel, but on a different one in each
channel, and an activation has one scale for all. Rounding to a common grid costs more accuracy
than any other activation of a small network. Moving the normalization's inverse into the graph,
``levels = (image - offset) / step`` for each channel, and its forward part into the first
convolution's weights, makes the codes exact: scale 1, code ``k`` for pixel ``k``. Where all
channels share one grid, a scale and zero point suffice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from compressor.graph.editing import Chain, Editor
from compressor.types.layers import Layer
from compressor.types.statistics import ChannelGrid, Moments, Request
from compressor.types.tensors import Array

_SIGNED_ZERO = 128  # the level that becomes code 0 where codes are signed
_MOST_LEVEL = 255
_OFF_GRID = 0.05  # of a step: rounding brings a level this far off back


@dataclass(frozen=True)
class PixelInput:
    """An input of the graph that one convolution alone reads."""

    value: str
    layer: Layer
    node: ir.Node
    pads: tuple[int, ...]  # beginnings, then ends

    @property
    def request(self) -> Request:
        """Ask for the grid of its channels, which is there if they hold pixels."""
        return Request(self.value, "channel-grid")


def pixel_inputs(model: ir.Model, readers: Mapping[ir.Node, Layer]) -> tuple[PixelInput, ...]:
    """Return the inputs that may hold images: ``[batch, channels, ...]``, read by a convolution."""
    pixels = []
    for value in model.graph.inputs:
        uses = list(value.uses())
        node = uses[0].node if len(uses) == 1 else None
        if node is None or node not in readers:
            continue
        layer = readers[node]
        if not layer.is_convolution or layer.is_transposed_convolution:
            continue
        explicit = node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
        plain = layer.groups == 1 and layer.dtype == "float32" and value.dtype == ir.DataType.FLOAT
        unshared = all(v is None or _is_read_once(v) for v in node.inputs[1:])
        if unshared and explicit and plain and node.graph is model.graph:
            pads = node.attributes.get_ints("pads", [0] * 2 * (len(layer.shape) - 2))
            pixels.append(PixelInput(value.name or "", layer, node, tuple(pads)))
    return tuple(pixels)


def _is_read_once(value: ir.Value) -> bool:
    return value.is_initializer() and len(list(value.uses())) == 1


def read_pixels(
    model: ir.Model, pixel: PixelInput, grid: ChannelGrid, *, signed: bool
) -> tuple[str, ChannelGrid]:
    """Make the convolution read pixel levels, in place; the graph computes the same function.

    Zero padding moves in front of the rescaling, since zero is another level in each channel.

    Signed levels run from -128 to 127 in place of 0 to 255.

    Returns:
        The name of the value that holds the levels, and the grid that maps them back.
    """
    editor = Editor(model)
    chain = Chain(editor, pixel.value)
    used = levels_of(grid, signed=signed)
    step, offset = np.asarray(used.step), np.asarray(used.offset)
    node, source = pixel.node, pixel.node.inputs[0]
    assert source is not None
    spatial = len(pixel.layer.shape) - 2
    value = source
    if any(pixel.pads):
        pads = [0, 0, *pixel.pads[:spatial], 0, 0, *pixel.pads[spatial:]]
        amounts = editor.constant(f"{pixel.value}_pads", np.asarray(pads, np.int64))
        value = chain.add("Pad", [source, amounts], "_padded")
        value.shape = _grown(source.shape, pads)
        node.attributes["pads"] = ir.AttrInt64s("pads", [0] * 2 * spatial)
    form = (1, -1, *[1] * spatial)
    factor = editor.constant(f"{pixel.value}_factor", (1 / step).astype(np.float32).reshape(form))
    shift = editor.constant(
        f"{pixel.value}_shift", (-offset / step).astype(np.float32).reshape(form)
    )
    scaled = chain.add("Mul", [value, factor], "_scaled")
    levels = chain.add("Add", [scaled, shift], "_levels")
    scaled.shape = levels.shape = value.shape
    node.prepend(chain.nodes)
    node.replace_input_with(0, levels)
    _rescale(editor, node, pixel.layer, step, offset)
    return levels.name or "", used


def _grown(shape: ir.Shape | None, pads: Sequence[int]) -> ir.Shape | None:
    """Return a shape with its pads, beginnings and then ends, where its lengths are known."""
    if shape is None:
        return None
    more = [begin + end for begin, end in zip(pads[: len(shape)], pads[len(shape) :], strict=True)]
    lengths: list[int | str | None] = []
    for length, grown in zip(shape, more, strict=True):
        known = length if isinstance(length, int) else length.value
        lengths.append(known + grown if isinstance(known, int) else None if grown else known)
    return ir.Shape(lengths)


def levels_of(grid: ChannelGrid, *, signed: bool) -> ChannelGrid:
    """Return the grid whose ``k = 0`` is code 0."""
    step = np.asarray(grid.step)
    offset = np.asarray(grid.offset) + (_SIGNED_ZERO * step if signed else 0.0)
    return ChannelGrid(tuple(step.tolist()), tuple(offset.tolist()))


def common_code(grid: ChannelGrid) -> tuple[float, int] | None:
    """Return scale and unsigned zero point that hold every channel's levels, if there are any.

    Images normalized alike in all channels, such as ``(x - 127) / 128`` or ``x / 255``, have one
    grid with zero on it. Plain quantization is exact for them, and takes no operators.
    """
    step, offset = np.asarray(grid.step), np.asarray(grid.offset)
    scale = float(np.float32(step.mean()))
    zeros = -offset / scale
    zero = int(np.rint(zeros[0]))
    ends = np.abs((offset + _MOST_LEVEL * step) / scale - (_MOST_LEVEL - zero))
    near = np.abs(zeros - zero).max() <= _OFF_GRID and ends.max() <= _OFF_GRID
    return (scale, zero) if near and 0 <= zero <= _MOST_LEVEL else None


def level_moments(moments: Moments, grid: ChannelGrid) -> Moments:
    """Return the moments of levels from those of the values they stand for.

    With ``y = D (x - o)``: ``Σ y yᵀ = D (Σ x xᵀ - m oᵀ - o mᵀ + n o oᵀ) D``, ``m = Σ x``.
    """
    columns = moments.second.shape[-1]
    repeat = columns // len(grid.step)
    scale = torch.tensor(grid.step, dtype=torch.float64).repeat_interleave(repeat).reciprocal()
    offset = torch.tensor(grid.offset, dtype=torch.float64).repeat_interleave(repeat)
    second, first = moments.second[0].to(torch.float64), moments.first[0].to(torch.float64)
    cross = torch.outer(first, offset)
    centred = second - cross - cross.T + moments.rows * torch.outer(offset, offset)
    return Moments(
        (centred * torch.outer(scale, scale)).to(torch.float32)[None],
        ((first - moments.rows * offset) * scale).to(torch.float32)[None],
        moments.rows,
    )


def _rescale(editor: Editor, node: ir.Node, layer: Layer, step: Array, offset: Array) -> None:
    """Fold ``x = step * level + offset`` into a convolution's weight and bias."""
    weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    assert weight is not None
    tensor = weight.const_value
    assert tensor is not None
    form = (1, -1, *[1] * (len(layer.shape) - 2))

    def scaled() -> ir.TensorProtocol:
        return ir.tensor((tensor.numpy() * step.reshape(form)).astype(np.float32))

    weight.const_value = ir.LazyTensor(
        scaled, ir.DataType.FLOAT, ir.Shape(layer.shape), name=weight.name, cache=True
    )
    old = None if bias is None else bias.const_value
    axes = tuple(range(1, len(layer.shape)))

    def shifted() -> ir.TensorProtocol:
        constant = (tensor.numpy().astype(np.float64) * offset.reshape(form)).sum(axis=axes)
        before = 0.0 if old is None else old.numpy().astype(np.float64)
        return ir.tensor((before + constant).astype(np.float32))

    form_of_bias = ir.Shape((layer.rows,))
    if bias is not None:
        bias.const_value = ir.LazyTensor(
            shifted, ir.DataType.FLOAT, form_of_bias, name=bias.name, cache=True
        )
        return
    made = ir.LazyTensor(shifted, ir.DataType.FLOAT, form_of_bias, cache=True)
    node.resize_inputs(3)
    node.replace_input_with(2, editor.initializer(f"{layer.name}.bias", made))
