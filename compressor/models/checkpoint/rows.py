"""Rows of weights: computed as they are read, and worked on block by block.

A weight may be stored in float8 with scales, or be changed by passes; neither result is ever held
as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import lcm
from typing import Any, TypeAlias, TypeVar

import torch

from compressor.errors import ModelError
from compressor.models.checkpoint.folder import Checkpoint
from compressor.models.checkpoint.reading import (
    FileTensor,
    ReadAhead,
    RowReader,
    Span,
)
from compressor.models.codec.headers import TensorHeader
from compressor.types.carrier import Carrier, WeightChange
from compressor.types.layers import Layer, StoredTensor
from compressor.types.parallel import WAITING, in_order, one_thread_each

_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("_scale_inv", "_scale")
_FLOATS = ("F32", "F16", "BF16", "F8_E8M0")
_CHUNK = 1 << 20  # elements widened at once
_UNSCALED = ("input_scale", "activation_scale")  # of activations, which are floats again
_FLOAT_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ResultT = TypeVar("ResultT")
_Results: TypeAlias = list[tuple["RowBlock", ResultT]]
_ELEMENTS = 4 << 20  # of a block; the work on one takes some 20 bytes for each


@dataclass(frozen=True, eq=False)
class ChangedRows:
    """Rows of a tensor in a file, changed a few at a time.

    Attributes:
        step: rows that the change takes together.
        count: rows of the tensor.
    """

    before: RowReader
    change: WeightChange
    step: int
    count: int

    @property
    def multiple(self) -> int:
        """Rows that are best read together."""
        return lcm(self.step, self.before.multiple)

    def __call__(self) -> torch.Tensor:
        """Return all of it."""
        return self.rows(0, self.count)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return some rows."""
        first, last = self._whole(start, stop)
        rows = self.before.rows(first, last)
        changed = self.change.compute(rows.flatten(1), first).reshape(rows.shape)
        return changed[start - first : stop - first]

    def span(self, start: int, stop: int) -> Span:
        """Return the bytes of the file that these rows are computed from."""
        return self.before.span(*self._whole(start, stop))

    def _whole(self, start: int, stop: int) -> tuple[int, int]:
        """Widen a range of rows to whole steps."""
        first = start // self.step * self.step
        return first, min(-(-stop // self.step) * self.step, self.count)


def changed(before: Callable[[], torch.Tensor], change: WeightChange) -> Callable[[], torch.Tensor]:
    """Return a reader of what a tensor becomes; it reads by rows where tensor and change allow."""
    layer = change.layer
    if change.multiple is None or not isinstance(before, RowReader) or not layer.rows_first:
        return lambda: change.stored(before())
    return ChangedRows(before, change, change.multiple, layer.rows)


@dataclass(frozen=True)
class Float8Tensor:
    """A float8 matrix, read as another dtype.

    Attributes:
        codes: ``[rows, columns]``.
        scale: ``[a, b]``, each for a block of ``block[0]`` by ``block[1]``; ``None`` for codes that
            are the values themselves.
        block: rows and columns of a block; the last ones may be cut.
        dtype: what the values are rounded to.
    """

    codes: FileTensor
    scale: FileTensor | None
    block: tuple[int, int]
    dtype: torch.dtype
    multiple = 1

    def __call__(self) -> torch.Tensor:
        """Return all of it."""
        return self.rows(0, self.codes.header.shape[0])

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return some rows."""
        codes = self.codes.rows(start, stop)
        if self.scale is None:
            return codes.to(self.dtype)
        height, width = self.block
        total, columns = self.codes.header.shape
        grid = -(-total // height), -(-columns // width)
        scales = self.scale().to(torch.float32).reshape(grid)
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(width, dim=1)[:, :columns]
        result = torch.empty(codes.shape, dtype=self.dtype)
        step = max(1, _CHUNK // max(columns, 1))
        for first in range(0, len(codes), step):
            part = slice(first, min(first + step, len(codes)))
            owners = torch.arange(start + part.start, start + part.stop) // height
            result[part] = (codes[part].to(torch.float32) * scales[owners]).to(self.dtype)
        return result

    def span(self, start: int, stop: int) -> Span:
        """Return the bytes of the codes of these rows."""
        return self.codes.span(start, stop)


def _block_of(
    weight: TensorHeader,
    scale: TensorHeader | None,
    declared: tuple[int, int] | None,
    subject: str,
) -> tuple[int, int]:
    """Return the block that shares one scale, in rows and columns.

    Args:
        weight: ``[rows, columns]``.
        scale: no axes or one element, ``[rows]``, or a grid ``[a, b]``.
    """
    rows, columns = weight.shape
    if scale is None:
        return rows, columns
    shape = scale.shape
    if scale.dtype in _FLOATS:
        if all(length == 1 for length in shape):
            return max(rows, 1), max(columns, 1)
        if shape in ((rows,), (rows, 1)):
            return 1, max(columns, 1)
        for height, width in (declared or (128, 128), (128, 128)):
            if shape == (-(-rows // height), -(-columns // width)):
                return height, width
    raise ModelError(
        subject,
        f"float8 weight {weight.name!r} {list(weight.shape)} has a scale of an unknown form, "
        f"{scale.dtype}{list(shape)}",
        "give the checkpoint in bfloat16",
    )


def widen_float8(source: Checkpoint, tensors: dict[str, StoredTensor], subject: str) -> None:
    """Replace float8 matrices by readers of wider floats, and drop their scales.

    Raises:
        ModelError: a scale has an unknown form.
    """
    headers = source.tensors
    named = source.config.get("dtype", source.config.get("torch_dtype"))
    dtype = _FLOAT_TYPES.get(str(named), torch.bfloat16)
    for name, header in headers.items():
        if header.dtype not in _FLOAT8 or len(header.shape) != 2 or not name.endswith(".weight"):
            continue
        scale = next((headers[name + s] for s in _SCALES if name + s in headers), None)
        block = _block_of(header, scale, _declared_block(source.config), subject)
        codes = tensors[name].read
        scales = None if scale is None else tensors.pop(scale.name).read
        assert isinstance(codes, FileTensor)
        assert scales is None or isinstance(scales, FileTensor)
        for suffix in _UNSCALED:
            tensors.pop(f"{name.removesuffix('weight')}{suffix}", None)
        read = Float8Tensor(codes, scales, block, dtype)
        tensors[name] = StoredTensor(name, header.shape, dtype, read)


def _declared_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    quantization = config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if not isinstance(block, list) or len(block) != 2:
        return None
    height, width = block
    usable = type(height) is int and type(width) is int and height > 0 and width > 0
    return (height, width) if usable else None


@dataclass(frozen=True)
class RowBlock:
    """Rows ``start`` to ``stop`` of a layer's weight in canonical form."""

    layer: Layer
    start: int
    stop: int


def row_blocks(layer: Layer, multiple: int = 1, elements: int = _ELEMENTS) -> list[RowBlock]:
    """Divide a weight's rows into blocks.

    Args:
        multiple: rows that stay together.
        elements: about how many of them make a block.
    """
    step = max(1, elements // max(layer.columns, 1) // multiple) * multiple
    starts = range(0, layer.rows, step)
    return [RowBlock(layer, start, min(start + step, layer.rows)) for start in starts]


def read_rows(carrier: Carrier, layer: Layer, start: int, stop: int) -> torch.Tensor:
    """Return some rows of a layer's float weight in canonical form.

    No others are read or computed where the weight lies in a file by rows. A view of the file
    must not be changed.
    """
    reader = _reader(carrier.tensors(), layer)
    if reader is not None:
        return reader.rows(start, stop).flatten(1)
    return layer.canonical(carrier.weight(layer))[start:stop]


def all_rows(carrier: Carrier, layer: Layer) -> Iterator[torch.Tensor]:
    """Yield all rows of a layer's float weight in canonical form, a block of them at a time."""
    reader = _reader(carrier.tensors(), layer)
    matrix = layer.canonical(carrier.weight(layer)) if reader is None else None
    for block in row_blocks(layer, 1 if reader is None else reader.multiple):
        if matrix is not None:
            yield matrix[block.start : block.stop]
        else:
            yield read_rows(carrier, layer, block.start, block.stop)


def scan(
    carrier: Carrier,
    blocks: Sequence[RowBlock],
    work: Callable[[torch.Tensor, RowBlock], ResultT],
) -> Iterator[tuple[RowBlock, ResultT]]:
    """Work on blocks of rows, several at a time, and yield the results in order.

    Files are read ahead of their use. Memory holds a few blocks; a weight that cannot be read by
    rows is held as a whole.

    Args:
        blocks: those of one layer follow each other.
        work: takes rows in canonical form, which it must neither keep nor change, and returns a
            result; called by several threads.
    """
    tensors = carrier.tensors()
    readers = {
        layer.weight: _reader(tensors, layer)
        for layer in {block.layer.weight: block.layer for block in blocks}.values()
    }
    of_files = [(block, reader) for block in blocks if (reader := readers[block.layer.weight])]
    spans = [reader.span(block.start, block.stop) for block, reader in of_files]
    with ReadAhead(spans) as ahead, one_thread_each() as threads:
        jobs: list[Callable[[], _Results[ResultT]]] = []
        for weight, of_layer in groupby(blocks, key=lambda block: block.layer.weight):
            reader = readers[weight]
            if reader is None:
                jobs.append(partial(_of_whole, carrier, list(of_layer), work))
            else:
                jobs += [partial(_of_file, ahead, reader, block, work) for block in of_layer]
        with ThreadPoolExecutor(threads, "scan", torch.set_num_threads, (1,)) as workers:
            for results in in_order(workers, lambda job: job(), jobs, threads + WAITING):
                yield from results


def _of_file(
    ahead: ReadAhead,
    reader: RowReader,
    block: RowBlock,
    work: Callable[[torch.Tensor, RowBlock], ResultT],
) -> _Results[ResultT]:
    with ahead.using(reader.span(block.start, block.stop)):
        rows = reader.rows(block.start, block.stop).flatten(1)
        return [(block, work(rows, block))]


def _of_whole(
    carrier: Carrier,
    blocks: Sequence[RowBlock],
    work: Callable[[torch.Tensor, RowBlock], ResultT],
) -> _Results[ResultT]:
    layer = blocks[0].layer
    matrix = layer.canonical(carrier.weight(layer))
    return [(block, work(matrix[block.start : block.stop], block)) for block in blocks]


def _reader(tensors: Mapping[str, StoredTensor], layer: Layer) -> RowReader | None:
    """Return the reader of a float weight's rows; ``None`` where it cannot be read by rows."""
    tensor = tensors.get(layer.weight)
    if tensor is None or tensor.codes is not None or not layer.rows_first:
        return None
    return tensor.read if isinstance(tensor.read, RowReader) else None
