"""Predict the peak memory of a run from shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import onnx_ir as ir

from compressor.calibration.portions import MOST
from compressor.graph.costs import model_bytes
from compressor.graph.plain import with_shapes
from compressor.graph.values import dims, main_values, static_shape
from compressor.models.transformers.block_checkpoint import BlockCheckpoint
from compressor.run.data import Data
from compressor.types.carrier import Capability, Carrier
from compressor.types.statistics import Request

# All are measured, on a ResNet-20, a ResNet-50, a BERT-base and a small Llama.
_RUNTIME_BYTES = 410_000_000  # PyTorch, ONNX Runtime and Python themselves
_TRANSFORMERS_BYTES = 300_000_000  # that library, and what lowering its models leaves
_COPIES = 2  # inside runtimes; those in files take memory only while they are read
_RUNNING = 7  # values of the largest size: some sessions are open at once, each with an arena
_LOOKED_AT = 3  # a portion that is run, one that is looked at, and the runtime's own
_BLOCK_VALUES = 4  # values of the largest size that a block observes at once
_OF_BLOCKS = 2  # of a checkpoint that is calibrated from its files: a moment and its factor
_SCORES = 2  # of all tokens at the places of a batch: as they come, and as they are compared
_STREAMED_BYTES = 250_000_000  # tensors on their way through, where none stays
_FLOAT = 4
_NO_WIDTH = (None, ir.DataType.UNDEFINED, ir.DataType.STRING)


def peak_memory(
    carrier: Carrier,
    data: Mapping[str, Data],
    passes: Sequence[tuple[Sequence[Request], bool, int]],
) -> int:
    """Return the bytes of memory that a run takes at most.

    Args:
        carrier: the float model.
        passes: what each pass asks for, whether it is calibrated block by block, and the bytes of
            statistics that it gathers by itself.
    """
    if isinstance(carrier, BlockCheckpoint):
        needs = [_STREAMED_BYTES, _scores(carrier, data), *(gathered for _, _, gathered in passes)]
        if any(r.observer == "second-moment" for requests, _, _ in passes for r in requests):
            columns = max(layer.shape[1] for layer in carrier.layers() if len(layer.shape) > 1)
            needs.append(_STREAMED_BYTES + _OF_BLOCKS * columns * columns * _FLOAT)
        return _RUNTIME_BYTES + _TRANSFORMERS_BYTES + max(needs)
    if Capability.GRAPH not in carrier.offers:
        return _RUNTIME_BYTES + _STREAMED_BYTES
    # A batch is not larger than the data are.
    batch = max((min(d.batch, d.samples or d.batch) for d in data.values()), default=1)
    sizes = _sizes(carrier, data)
    outputs = [sizes.get(layer.output, 0) for layer in carrier.layers()]
    needs = [
        _RUNNING * batch * max(sizes.values(), default=0),
        _LOOKED_AT * _portion(2 * sum(outputs), batch),
    ]
    for requests, blockwise, gathered in passes:
        needs.append(gathered + _RUNNING * batch * max(sizes.values(), default=0))
        taps = [sizes.get(name, 0) for name in {t for r in requests for t in r.tensors}]
        if blockwise:  # few values are there at once; which ones, the blocks decide
            needs.append(2 * batch * _BLOCK_VALUES * max(taps, default=0))
        else:
            moments = sum(_moment(carrier.graph(), r) for r in requests)
            needs.append(moments + _LOOKED_AT * _portion(sum(taps), batch))
    library = type(getattr(carrier, "module", None)).__module__.partition(".")[0]
    libraries = _RUNTIME_BYTES + (_TRANSFORMERS_BYTES if library == "transformers" else 0)
    return libraries + _COPIES * model_bytes(carrier) + max(needs)


def _scores(carrier: BlockCheckpoint, data: Mapping[str, Data]) -> int:
    """Return the bytes of what a decoder says of each place of a batch that it is judged on."""
    if "evaluation" not in data:
        return 0
    judged = data["evaluation"]
    places = max(prod(a.shape) for a in judged.first(1).values())
    batch = min(judged.batch, judged.samples or judged.batch)
    return _SCORES * batch * places * carrier.decoder.vocabulary * _FLOAT


def _portion(sample: int, batch: int) -> int:
    """Return the bytes of the values that are there at once, given those of a sample."""
    return min(batch * sample, max(sample, MOST))


def _sizes(carrier: Carrier, data: Mapping[str, Data]) -> dict[str, int]:
    """Return the bytes of each value for one sample that is as long as those of the data."""
    feeds = any(entry.feeds for entry in data.values())
    first = carrier.inputs[0].shape if carrier.inputs else ()
    dynamic = bool(first) and isinstance(first[0], str) and not feeds
    values = main_values(carrier.graph())
    shapes = _shapes(carrier, values, data)
    return {
        name: prod(shapes[name])
        * (-(-value.dtype.bitwidth // 8) if value.dtype not in _NO_WIDTH else _FLOAT)
        for name, value in values.items()
        # Of a dynamic batch, values of fixed size are computed from weights alone.
        if name in shapes and not (dynamic and static_shape(value) is not None)
    }


def _shapes(
    carrier: Carrier, values: Mapping[str, ir.Value], data: Mapping[str, Data]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of values for one sample, those of the largest where data differ."""
    known = {n: shape for n, value in values.items() if (shape := dims(value)) is not None}
    if not data or all(v.shape is not None and v.shape.is_static() for v in values.values()):
        return known
    samples = [entry.first(1) for entry in data.values()]
    given = {}
    for spec in carrier.inputs:
        largest = max((s[spec.name].shape for s in samples), key=prod)
        pairs = zip(spec.shape, largest, strict=True)
        given[spec.name] = tuple(d if isinstance(d, int) else n for d, n in pairs)
    inferred = main_values(with_shapes(carrier.graph(), given))
    return {name: s for name, v in inferred.items() if (s := static_shape(v)) is not None}


def _moment(graph: ir.Model, request: Request) -> int:
    """Return the bytes of a second moment; other statistics are small."""
    value = main_values(graph).get(request.tensor)
    if request.observer != "second-moment" or value is None or value.shape is None:
        return 0
    kernel, groups = request.options.get("kernel"), int(request.options.get("groups", 1))
    axis = value.shape[-1 if kernel is None else 1]
    columns = axis if isinstance(axis, int) else 0
    if kernel is not None:
        columns = columns * prod(kernel) // groups
    return groups * columns * columns * _FLOAT
