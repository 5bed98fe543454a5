"""Products and windows in LiteRT's operators: convolutions, pools, dense layers, resampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from compressor.exporters.litert.file import Quantization, Tensor
from compressor.exporters.litert.lowering import FIXED_SAMPLES, Call
from compressor.exporters.litert.store import Weight
from compressor.types.tensors import Array

_SAME, _VALID = schema.Padding.SAME, schema.Padding.VALID
_LEAST_CODE = -128
_BIAS_LIMIT = 2**31 - 1
_PLANE = 2  # axes of an image


def conv(call: Call) -> None:
    """Write a Conv of one or two axes; more are refused."""
    weight = call.weight(1)
    source, weight, strides, dilations, pads = _as_image(call, weight)
    group = call.node.attributes.get_int("group", 1)
    inputs = source.shape[-1]
    order = call.graph.orders.get(call.node)
    if order is not None:
        weight = weight.taken(order)
    out_channels, kernel = weight.array.shape[0], weight.array.shape[2:]
    result = _result_plane(call)
    padding, source = _padded(call, source, kernel, strides, dilations, pads, result)
    bias = _bias(call, source, weight, out_channels, 2)
    if group == inputs and weight.array.shape[1] == 1 and group > 1:
        options: Any = schema.DepthwiseConv2DOptionsT(depthMultiplier=out_channels // inputs)
        name, weight = "DEPTHWISE_CONV_2D", weight.turned((1, 2, 3, 0))
    else:
        options, name = schema.Conv2DOptionsT(), "CONV_2D"
        weight = weight.turned((0, 2, 3, 1))
    options.padding, options.fusedActivationFunction = padding, call.fused
    options.strideH, options.strideW = strides
    options.dilationHFactor, options.dilationWFactor = dilations
    _give(call, name, [source, _operand(call, weight, 1), bias], options)


def conv_transpose(call: Call) -> None:
    """Write a ConvTranspose of one or two axes as one without padding, whose border is cut off."""
    source, weight, strides, dilations, pads = _as_image(call, call.weight(1))
    attributes = call.node.attributes
    weight = _ungrouped(weight, attributes.get_int("group", 1))
    if any(d != 1 for d in dilations):
        raise call.refusal("is dilated, which LiteRT's is not")
    samples = call.shape[0]
    if samples < 0:
        raise call.refusal(
            "computes any number of samples, and LiteRT's needs a fixed one", FIXED_SAMPLES
        )
    channels, kernel = weight.array.shape[1], weight.array.shape[2:]
    plane, wanted = source.shape[1:3], _result_plane(call)
    automatic = attributes.get_string("auto_pad", "NOTSET")
    if "output_shape" in attributes or automatic.startswith("SAME"):
        extra = [0, *call.ints("output_padding", (0, 0))][-_PLANE:]
        whole = zip(plane, strides, kernel, extra, wanted, strict=True)
        pads = [max(0, (n - 1) * s + k + more - w) for n, s, k, more, w in whole]
        pads = [(n + (automatic != "SAME_UPPER")) // 2 for n in pads]
    ends = [p + n for p, n in zip(pads, wanted, strict=False)]
    axes = zip(plane, strides, kernel, ends, strict=True)
    # What goes on beyond the kernels is the bias alone, as zeros behind the input make it.
    behind = [max(0, -(((n - 1) * s + k - end) // s)) for n, s, k, end in axes]
    if any(behind):
        source = _bordered(call, source, [[0, n] for n in (0, *behind, 0)])
    height, width = (
        (n - 1) * s + k for n, s, k in zip(source.shape[1:3], strides, kernel, strict=True)
    )
    shape = (samples, height, width, channels)
    options = schema.TransposeConvOptionsT()
    options.padding, options.fusedActivationFunction = _VALID, call.fused
    options.strideH, options.strideW = strides
    bias = _bias(call, source, weight, channels, 2)
    operand = _operand(call, weight.turned((1, 2, 3, 0)), 1)
    operands = [call.graph.numbers(shape), operand, source, bias]
    begin, end = [0, *pads[:2], 0], [samples, *ends, channels]
    if not any(begin) and list(shape) == end:
        _give(call, "TRANSPOSE_CONV", operands, options)
        return
    dtype = "int8" if call.codes else "float32"
    made = call.graph.emit(
        "TRANSPOSE_CONV", operands, shape, dtype, options, True, None, call.codes
    )
    cut = [made, *(call.graph.numbers(x) for x in (begin, end, [1] * 4))]
    _give(call, "STRIDED_SLICE", cut, schema.StridedSliceOptionsT())


def _ungrouped(weight: Weight, groups: int) -> Weight:
    """Return a kernel ``[in, out / groups, ...]`` as ``[in, out, ...]``, zero between groups."""
    if groups == 1:
        return weight
    inputs, rows, *kernel = weight.array.shape
    array = np.zeros((groups, inputs // groups, groups, rows, *kernel), weight.array.dtype)
    each = np.arange(groups)
    array[each, :, each] = weight.array.reshape(groups, -1, rows, *kernel)
    array = array.reshape(inputs, groups * rows, *kernel)
    scale = weight.scale
    if scale is not None and scale.size > 1:
        scale = np.tile(scale, groups)
    return replace(weight, array=array, scale=scale)


def dense(call: Call) -> None:
    """Write a Gemm or a MatMul with a constant matrix; others are products of two batches."""
    node = call.node
    attributes = node.attributes
    scaled = any(attributes.get_float(key, 1.0) != 1 for key in ("alpha", "beta"))
    weight = call.graph.weight(node.inputs[1])  # type: ignore[arg-type]
    if scaled or attributes.get_int("transA", 0) != 0:
        raise call.refusal("is scaled or transposed, which LiteRT's has not", "put fuse first")
    if weight is None or weight.array.ndim != 2:
        if call.has(2):
            raise call.refusal("adds to a product of two computed matrices", "put fuse first")
        options = schema.BatchMatMulOptionsT()
        operands = [call.operand(0, last=False), call.operand(1, last=False)]
        call.give("BATCH_MATMUL", operands, options)
        return
    if not attributes.get_int("transB", 0):
        weight = weight.turned((1, 0))
    source = call.operand(0, last=False)
    options = schema.FullyConnectedOptionsT(
        fusedActivationFunction=call.fused, keepNumDims=len(call.shape) > 2
    )
    bias = _bias(call, source, weight, weight.array.shape[0], 2)
    call.give("FULLY_CONNECTED", [source, _operand(call, weight, 1), bias], options)


def max_pool(call: Call) -> None:
    """Write a MaxPool; what it pads with is below everything else."""
    source, kernel, strides, pads = _window(call)
    result = _result_plane(call)
    padding, source = _padded(call, source, kernel, strides, (1, 1), pads, result, least=True)
    _pool(call, "MAX_POOL_2D", source, kernel, strides, padding)


def average_pool(call: Call) -> None:
    """Write an AveragePool; padding that does not count is allowed where LiteRT has the same."""
    source, kernel, strides, pads = _window(call)
    result = _result_plane(call)
    padding = _padding(source.shape[1:3], kernel, strides, (1, 1), pads, result)
    counted = call.node.attributes.get_int("count_include_pad", 0)
    if padding is None and any(pads):
        if not counted:
            raise call.refusal("averages over a border that does not count, as LiteRT's cannot")
        padding, source = _padded(call, source, kernel, strides, (1, 1), pads, result, forced=True)
    elif padding == _SAME and any(pads) and counted:
        padding, source = _padded(call, source, kernel, strides, (1, 1), pads, result, forced=True)
    _pool(call, "AVERAGE_POOL_2D", source, kernel, strides, _VALID if padding is None else padding)


def resize(call: Call) -> None:
    """Write a Resize whose modes LiteRT has."""
    attributes = call.node.attributes
    mode = attributes.get_string("mode", "nearest")
    place = attributes.get_string("coordinate_transformation_mode", "half_pixel")
    rounding = attributes.get_string("nearest_mode", "round_prefer_floor")
    source = call.operand(0, last=True)
    wanted = call.shape
    if len(wanted) not in (3, 4) or wanted[:2] != (source.shape[0], source.shape[-1]):
        raise call.refusal("changes other axes than those of an image or a row")
    if len(wanted) < _PLANE + 2:
        source = _row(call, source)
    plane = _result_plane(call)
    whole = all(n % m == 0 for n, m in zip(plane, source.shape[1:3], strict=True))
    operands = [source, call.graph.numbers(plane)]
    options: Any
    if mode == "linear" and place in (
        "half_pixel",
        "pytorch_half_pixel",
        "align_corners",
        "asymmetric",
    ):
        options, name = schema.ResizeBilinearOptionsT(), "RESIZE_BILINEAR"
        options.alignCorners = place == "align_corners"
        options.halfPixelCenters = place.endswith("half_pixel")
    elif mode == "nearest" and (
        (place == "asymmetric" and rounding == "floor")
        or (whole and place != "align_corners" and rounding.endswith("floor"))
    ):
        options, name = schema.ResizeNearestNeighborOptionsT(), "RESIZE_NEAREST_NEIGHBOR"
    else:
        raise call.refusal(
            f"its mode {mode} with {place} and {rounding} is not supported by LiteRT"
        )
    _give(call, name, operands, options, source.quantization)


def _operand(call: Call, weight: Weight, index: int) -> Tensor:
    """Return a weight as the kernel wants it: codes if it computes with them, else floats."""
    value = call.node.inputs[index]
    name = (value.name if value is not None else None) or "weight"
    if call.codes is None or weight.scale is None:
        return call.graph.constant(weight, name)
    return call.graph.stored(weight.array, name, Quantization(weight.scale, axis=weight.axis))


def _bias(call: Call, source: Tensor, weight: Weight, channels: int, index: int) -> Tensor:
    """Return a bias, zeros where there is none; as int32 where the product is of integers."""
    given = call.constant(index)
    values = np.zeros(channels, np.float32) if given is None else given.reshape(-1)
    values = np.broadcast_to(values.astype(np.float32), (channels,))
    if call.node in call.graph.orders:
        values = values[call.graph.orders[call.node]]
    value = call.node.inputs[index] if call.has(index) else None
    name = (value.name if value is not None else None) or "no_bias"
    if call.codes is None:
        return call.graph.stored(values, name)
    assert source.quantization is not None
    assert weight.scale is not None
    scale = source.quantization.scale.astype(np.float64) * weight.scale
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(scale > 0, np.rint(values / scale), 0)
    codes = codes.clip(-_BIAS_LIMIT, _BIAS_LIMIT).astype(np.int32)
    return call.graph.stored(codes, name, Quantization(scale.astype(np.float32)))


def _as_image(call: Call, weight: Weight) -> tuple[Tensor, Weight, list[int], list[int], list[int]]:
    """Return a convolution's parts with two axes; one of one axis becomes a row of pixels."""
    axes = weight.array.ndim - 2
    if axes not in (1, _PLANE):
        raise call.refusal(f"has {axes} axes, and LiteRT's convolutions have one or two")
    source = call.operand(0, last=True)
    strides = call.ints("strides", (1,) * axes)
    dilations = call.ints("dilations", (1,) * axes)
    pads = _pads(call, source.shape[1:-1], weight.array.shape[2:], strides, dilations)
    if axes == _PLANE:
        return source, weight, strides, dilations, pads
    source = _row(call, source)
    array = weight.array[:, :, None]
    axis = weight.axis + (weight.axis >= _PLANE)
    weight = replace(weight, array=array, axis=axis)
    return source, weight, [1, *strides], [1, *dilations], [0, pads[0], 0, pads[1]]


def _row(call: Call, source: Tensor) -> Tensor:
    """Return what has one axis as an image of one row."""
    samples, length, channels = source.shape
    return call.graph.reshaped(source, (samples, 1, length, channels), last=True)


def _result_plane(call: Call) -> tuple[int, ...]:
    lengths = call.shape[2:]
    return lengths if len(lengths) == _PLANE else (1, *lengths)


def _give(
    call: Call,
    name: str,
    operands: Sequence[Tensor | None],
    options: Any,
    written: Quantization | None = None,
) -> None:
    """Write the result of a window; that of a row of pixels loses the axis that was put in."""
    if len(call.shape) == _PLANE + 2:
        call.give(name, operands, options, last=True, written=written)
        return
    samples, channels, length = call.shape
    codes = written or call.codes
    dtype = "int8" if codes else "float32"
    made = call.graph.emit(
        name, operands, (samples, 1, length, channels), dtype, options, True, None, codes
    )
    call.graph.keep(call.result, call.graph.reshaped(made, (samples, length, channels), last=True))


def _pads(
    call: Call,
    plane: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> list[int]:
    """Return the zeros before each axis, and then those after it."""
    automatic = call.node.attributes.get_string("auto_pad", "NOTSET")
    if automatic in ("NOTSET", "VALID"):
        return call.ints("pads", (0,) * (2 * len(plane)))
    front, behind = [], []
    for n, k, s, d in zip(plane, kernel, strides, dilations, strict=True):
        total = max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
        small, large = total // 2, total - total // 2
        front.append(large if automatic == "SAME_LOWER" else small)
        behind.append(small if automatic == "SAME_LOWER" else large)
    return front + behind


def _window(call: Call) -> tuple[Tensor, list[int], list[int], list[int]]:
    """Return what a pool reads, its kernel, strides and pads, with two axes."""
    kernel = call.ints("kernel_shape")
    axes = len(kernel)
    if axes not in (1, _PLANE) or any(d != 1 for d in call.ints("dilations", (1,) * axes)):
        raise call.refusal("is dilated, or has more than two axes, unlike LiteRT's pools")
    source = call.operand(0, last=True)
    strides = call.ints("strides", (1,) * axes)
    pads = _pads(call, source.shape[1:-1], kernel, strides, (1,) * axes)
    if axes == _PLANE:
        return source, kernel, strides, pads
    return _row(call, source), [1, *kernel], [1, *strides], [0, pads[0], 0, pads[1]]


def _padding(
    plane: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    result: Sequence[int],
) -> int | None:
    """Return the padding that LiteRT has itself; ``None`` where zeros must be put around."""
    same, valid = True, True
    for axis, (n, k, s, d) in enumerate(zip(plane, kernel, strides, dilations, strict=True)):
        reach = (k - 1) * d + 1
        front, wanted = pads[axis], result[axis]
        needed = max(0, (wanted - 1) * s + reach - n - front)
        total = max(0, (-(-n // s) - 1) * s + reach - n)
        same &= wanted == -(-n // s) and (front, needed) == (total // 2, total - total // 2)
        valid &= front == needed == 0 and wanted == (n - reach) // s + 1
    return _VALID if valid else _SAME if same else None


def _padded(
    call: Call,
    source: Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    result: Sequence[int],
    *,
    least: bool = False,
    forced: bool = False,
) -> tuple[int, Tensor]:
    """Return LiteRT's padding, and what is read, with its border put around where need be.

    Args:
        least: the border is below everything else, and not zero.
        forced: do it even where LiteRT has the padding.
    """
    plane = source.shape[1:3]
    padding = _padding(plane, kernel, strides, dilations, pads, result)
    if padding is not None and not forced:
        return padding, source
    borders = [[0, 0]]
    for axis, (n, k, s, d) in enumerate(zip(plane, kernel, strides, dilations, strict=True)):
        reach = (k - 1) * d + 1
        behind = max(0, (result[axis] - 1) * s + reach - n - pads[axis])
        if forced:
            behind = max(behind, pads[axis + _PLANE])
        borders.append([pads[axis], behind])
    borders.append([0, 0])
    return _VALID, _bordered(call, source, borders, least=least)


def _bordered(
    call: Call, source: Tensor, borders: Sequence[Sequence[int]], *, least: bool = False
) -> Tensor:
    """Return a tensor with so much before and behind each axis."""
    lengths = call.graph.stored(np.array(borders, np.int32), "borders")
    shape = tuple(
        n + sum(border) if n >= 0 else n for n, border in zip(source.shape, borders, strict=True)
    )
    operands, name = [source, lengths], "PAD"
    codes = source.quantization
    if least and not (codes is not None and codes.zero_point == _LEAST_CODE):
        name = "PADV2"
        operands.append(_least(call, source))
    return call.graph.emit(name, operands, shape, source.dtype, None, True, "padded", codes)


def _least(call: Call, source: Tensor) -> Tensor:
    if source.quantization is None:
        return call.graph.scalar(float(np.finfo(np.float32).min))
    array: Array = np.array(_LEAST_CODE, np.int8)
    return call.graph.stored(array, "least", source.quantization)


def _pool(
    call: Call,
    name: str,
    source: Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: int,
) -> None:
    options = schema.Pool2DOptionsT()
    options.padding, options.fusedActivationFunction = padding, call.fused
    options.filterHeight, options.filterWidth = kernel
    options.strideH, options.strideW = strides
    _give(call, name, [source], options, source.quantization)
