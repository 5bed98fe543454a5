"""What moves elements, in LiteRT's operators: joins, cuts, borders, other orders and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from compressor.exporters.litert.file import Tensor
from compressor.exporters.litert.lowering import Call
from compressor.exporters.litert.store import Weight, back, forth, shape_of, turned, type_of

_TURNED = 3
_TO_THE_END = 2**31 - 1  # the end of a slice that keeps all


def is_last(call: Call) -> bool:
    """Whether the operands of single elements lie with their channels last, as the result then."""
    shapes = []
    for index, value in enumerate(call.node.inputs):
        if value is None or call.graph.weight(value) is not None:
            continue
        tensor = call.operand(index)
        shapes.append((tensor.last, len(tensor.shape)))
    rank = len(call.shape)
    return any(last for last, _ in shapes) and all(n == rank for _, n in shapes) and rank >= _TURNED


def elements(call: Call, last: bool, indices: Sequence[int] | None = None) -> list[Tensor]:
    """Return operands of single elements, constants in the same layout."""
    rank, operands = len(call.shape), []
    for index in range(len(call.node.inputs)) if indices is None else indices:
        value = call.node.inputs[index]
        assert value is not None
        weight = call.graph.weight(value)
        if weight is None:
            operands.append(call.operand(index, last))
        else:
            operands.append(call.graph.constant(weight, value.name or "constant", last, rank))
    return operands


def axis_at(axis: int, rank: int, last: bool) -> int:
    """Return where an axis of ONNX's order lies."""
    if not last or rank < _TURNED or axis == 0:
        return axis
    return rank - 1 if axis == 1 else axis - 1


def reshape(call: Call) -> None:
    """Write what leaves the order of elements as it is."""
    source = call.operand(0, last=False)
    options = schema.ReshapeOptionsT(newShape=np.array(call.shape, np.int32))
    call.give("RESHAPE", [source, call.graph.numbers(call.shape)], options)


def transpose(call: Call) -> None:
    """Write a Transpose; one that undoes what a layout does needs no operator."""
    source = call.operand(0)
    rank = len(source.shape)
    order = call.ints("perm", range(rank)[::-1])
    if rank >= _TURNED and order == (forth(rank) if source.last else back(rank)):
        call.graph.keep(call.result, replace(source, last=not source.last))
        return
    source = call.operand(0, last=False)
    call.give("TRANSPOSE", [source, call.graph.numbers(order)], schema.TransposeOptionsT())


def concat(call: Call) -> None:
    """Write a Concat; codes of another scale are quantized again."""
    last = is_last(call)
    operands = elements(call, last)
    if call.codes is not None:
        operands = [call.graph.requantized(x, call.codes) for x in operands]
    rank = len(call.shape)
    options = schema.ConcatenationOptionsT(
        axis=axis_at(call.node.attributes.get_int("axis", 0) % rank, rank, last)
    )
    call.give("CONCATENATION", operands, options, last=last)


def split(call: Call) -> None:
    """Write a Split; each part is a value of its own."""
    source = call.operand(0)
    rank, last = len(source.shape), source.last
    axis = call.node.attributes.get_int("axis", 0) % rank
    parts = [shape_of(value) for value in call.node.outputs]
    lengths = call.graph.numbers([shape[axis] for shape in parts])
    place = call.graph.stored(np.array(axis_at(axis, rank, last), np.int32), "axis")
    options = schema.SplitVOptionsT(numSplits=len(parts))
    made = [
        call.graph.file.tensor(
            value.name or "", turned(shape) if last else shape, source.dtype,
            quantization=source.quantization, last=last,
        )
        for value, shape in zip(call.node.outputs, parts, strict=True)
    ]  # fmt: skip
    call.graph.file.operator("SPLIT_V", [source, lengths, place], made, options)
    for value, tensor in zip(call.node.outputs, made, strict=True):
        call.graph.keep(value, tensor)


def cut_out(call: Call) -> None:
    """Write a Slice of constant ends."""
    source = call.operand(0)
    rank, last = len(source.shape), source.last
    starts, ends = (_integers(call, index) for index in (1, 2))
    axes = _integers(call, 3) or list(range(len(starts)))
    steps = _integers(call, 4) or [1] * len(starts)
    begin, end, stride = [0] * rank, [0] * rank, [1] * rank
    open_begin = open_end = (1 << rank) - 1
    backwards: list[int] = []
    for start, stop, axis, step in zip(starts, ends, axes, steps, strict=True):
        place = axis_at(axis % rank, rank, last)
        length = source.shape[place]
        if length < 0 and (start, step) == (0, 1) and stop >= _TO_THE_END:
            continue
        if length < 0:
            raise call.refusal("cuts the axis of samples, whose number is chosen later")
        kept = range(length)[slice(start, stop, step)]
        if step < 0:
            kept = kept[::-1]
            backwards.append(place)
        begin[place], end[place], stride[place] = kept.start, kept.stop, kept.step
        open_begin &= ~(1 << place)
        open_end &= ~(1 << place)
    options = schema.StridedSliceOptionsT()
    options.beginMask, options.endMask = open_begin, open_end
    name, operands = "STRIDED_SLICE", [source, *map(call.graph.numbers, (begin, end, stride))]
    shape = turned(call.shape) if last else call.shape
    for place in backwards:
        made = call.graph.emit(
            name, operands, shape, source.dtype, options, last, None, source.quantization
        )
        name, operands, options = "REVERSE_V2", [made, call.graph.numbers([place])], None
    call.give(name, operands, options, last=last)


def pad(call: Call) -> None:
    """Write a Pad of zeros, of another constant, or of what is reflected."""
    attributes = call.node.attributes
    mode = attributes.get_string("mode", "constant")
    source = call.operand(0)
    rank, last = len(source.shape), source.last
    pads = _integers(call, 1)
    axes = [axis % rank for axis in _integers(call, 3)] or list(range(rank))
    if mode in ("edge", "wrap"):
        _repeat_border(call, source, axes, pads, wraps=mode == "wrap")
        return
    if min(pads) < 0:
        raise call.refusal("cuts elements off, which LiteRT's does not")
    borders = np.zeros((rank, 2), np.int32)
    for axis, front, behind in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        borders[axis_at(axis, rank, last)] = front, behind
    operands = [source, call.graph.stored(borders, "borders")]
    if mode == "reflect":
        call.give("MIRROR_PAD", operands, schema.MirrorPadOptionsT(), last=last)
        return
    fill = call.constant(2)
    if fill is None or not np.any(fill) or source.quantization is not None:
        call.give("PAD", operands, last=last)
        return
    call.give("PADV2", [*operands, call.graph.scalar(float(fill.reshape(-1)[0]))], last=last)


def _repeat_border(
    call: Call, source: Tensor, axes: Sequence[int], pads: Sequence[int], *, wraps: bool
) -> None:
    """Write a Pad whose border is the nearest element, or what lies at the other end."""
    for axis, front, behind in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        if not front and not behind:
            continue
        options = schema.GatherOptionsT(axis=axis_at(axis, len(source.shape), source.last))
        length = source.shape[options.axis]
        if length < 0:
            raise call.refusal("adds samples, whose number is chosen later")
        places = np.arange(-front, length + behind, dtype=np.int32)
        places = places % length if wraps else places.clip(0, length - 1)
        shape = list(source.shape)
        shape[options.axis] = len(places)
        operands = [source, call.graph.stored(places, "places")]
        source = call.graph.emit(
            "GATHER", operands, shape, source.dtype, options, source.last, None, source.quantization
        )
    call.graph.keep(call.result, source)


def gather(call: Call) -> None:
    """Write a Gather; constant places are counted from the front, as LiteRT wants them."""
    options = schema.GatherOptionsT()
    value = call.node.inputs[1]
    assert value is not None
    source, places = call.operand(0, last=False), call.graph.weight(value)
    options.axis = call.node.attributes.get_int("axis", 0) % len(source.shape)
    length = source.shape[options.axis]
    if places is None or not np.any(places.array < 0):
        indices = call.operand(1, last=False)
    elif length < 0:
        raise call.refusal("counts samples from the end, and their number is chosen later")
    else:
        indices = call.graph.stored(places.array % length, value.name or "places")
    call.give("GATHER", [source, indices], options)


def gather_each(call: Call) -> None:
    """Write a GatherND of constant places, which are counted from the front."""
    value, given = call.node.inputs[0], call.constant(1)
    assert value is not None
    assert given is not None
    shape, places = shape_of(value), given.astype(np.int32)
    lengths = np.array(shape[: places.shape[-1]], np.int32)
    if call.node.attributes.get_int("batch_dims", 0) or any(lengths < 0):
        raise call.refusal("takes other places of each sample, or counts samples")
    places = np.where(places < 0, places + lengths, places).astype(np.int32)
    operands = [call.operand(0, last=False), call.graph.stored(places, "places")]
    call.give("GATHER_ND", operands, schema.GatherNdOptionsT())


def greatest(call: Call) -> None:
    """Write a TopK of the greatest along the channels or the last axis."""
    source, attributes, graph = call.operand(0), call.node.attributes, call.graph
    rank, count = len(source.shape), call.constant(1)
    axis = attributes.get_int("axis", -1) % rank
    last = rank >= _TURNED and axis == 1
    if count is None or not attributes.get_int("largest", 1) or not (last or axis == rank - 1):
        raise call.refusal("takes the least, or not along the channels or the last axis")
    source = call.operand(0, last)
    shape = (*source.shape[:-1], int(count.reshape(-1)[0]))
    made = [
        graph.file.tensor(name, shape, dtype, last=last)
        for name, dtype in (("values", source.dtype), ("places", "int32"))
    ]
    number = graph.stored(np.array(shape[-1], np.int32), "number")
    graph.file.operator("TOPK_V2", [source, number], made, schema.TopKV2OptionsT())
    graph.keep(call.node.outputs[0], made[0])
    graph.keep(call.node.outputs[1], graph.typed(made[1], "int64"))


def triangle(call: Call) -> None:
    """Write a Trilu as a choice between what is read and zeros."""
    diagonal = call.constant(1)
    source, graph = call.operand(0, last=False), call.graph
    offset = 0 if diagonal is None else int(diagonal.reshape(-1)[0])
    upper = bool(call.node.attributes.get_int("upper", 1))
    ones = np.ones(source.shape[-2:], np.bool_)
    kept = np.triu(ones, offset) if upper else np.tril(ones, offset)
    kept = kept.reshape((1,) * (len(source.shape) - 2) + kept.shape)
    zero = graph.stored(np.array(0, source.dtype), "zero")
    call.give("SELECT_V2", [graph.stored(kept, "kept"), source, zero])


def tile(call: Call) -> None:
    """Write a Tile of constant counts."""
    source = call.operand(0, last=False)
    counts = _integers(call, 1)
    if any(n < 0 and count != 1 for n, count in zip(source.shape, counts, strict=True)):
        raise call.refusal("repeats samples, whose number is chosen later")
    call.give("TILE", [source, call.graph.numbers(counts)], schema.TileOptionsT())


def expand(call: Call) -> None:
    """Write an Expand; what is repeated for each sample is added to a zero for each."""
    value = call.node.inputs[0]
    assert value is not None
    weight = call.graph.weight(value)
    source = call.operand(0, last=False)
    if any(length < 0 for length in call.shape):
        if source.shape == call.shape:
            call.graph.keep(call.result, source)
            return
        if [n < 0 for n in source.shape] == [n < 0 for n in call.shape]:  # not along samples
            counts = [max(1, n // m) for n, m in zip(call.shape, source.shape, strict=True)]
            call.give("TILE", [source, call.graph.numbers(counts)], schema.TileOptionsT())
            return
        one = tuple(max(1, length) for length in call.shape)
        if weight is not None:
            array = np.broadcast_to(weight.floats, one)
            source = call.graph.constant(Weight(array), value.name or "repeated")
        if source.shape != one or source.dtype != "float32" or call.graph.counted is None:
            raise call.refusal("repeats along the axis of samples, whose number is chosen later")
        zeros = call.graph.zeros_for_samples([min(1, length) for length in call.shape])
        call.give("ADD", [source, zeros], schema.AddOptionsT())
        return
    call.give("BROADCAST_TO", [source, call.graph.numbers(call.shape)])


def cast(call: Call) -> None:
    """Write a Cast, or a CastLike."""
    call.graph.keep(call.result, call.graph.typed(call.operand(0), type_of(call.result)))


def _integers(call: Call, index: int) -> list[int]:
    given = call.constant(index)
    return [] if given is None else [int(x) for x in given.reshape(-1)]
