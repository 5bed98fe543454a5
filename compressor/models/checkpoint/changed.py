"""Tensors of a checkpoint that are computed as they are read: changed by passes, or float8 with
scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lcm

import torch

from compressor.errors import ModelError
from compressor.models.checkpoint.reading import FileTensor, RowReader, Span
from compressor.models.codec.headers import TensorHeader
from compressor.types.carrier import WeightChange


@dataclass(frozen=True, eq=False)
class ChangedRows:
    """Rows of a tensor in a file, changed a few at a time.

    Attributes:
        before: the tensor as it was.
        change: what becomes of it.
        step: rows that the change wants together.
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
        """Widen a range of rows to those that the change wants together."""
        first = start // self.step * self.step
        return first, min(-(-stop // self.step) * self.step, self.count)


@dataclass(frozen=True, eq=False)
class ChangedWhole:
    """A tensor that is changed as a whole whenever it is read."""

    before: Callable[[], torch.Tensor]
    change: WeightChange

    def __call__(self) -> torch.Tensor:
        """Return all of it."""
        return self.change.stored(self.before())


def changed(before: Callable[[], torch.Tensor], change: WeightChange) -> Callable[[], torch.Tensor]:
    """Return a reader of what a tensor becomes; by rows, where both sides can be had so."""
    layer = change.layer
    if change.multiple is None or not isinstance(before, RowReader) or not layer.rows_first:
        return ChangedWhole(before, change)
    return ChangedRows(before, change, change.multiple, layer.rows)


FLOAT8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("_scale_inv", "_scale")
_FLOATS = ("F32", "F16", "BF16", "F8_E8M0")
_CHUNK = 1 << 20  # elements widened at once


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
        scales = self.scale().to(torch.float32).reshape(self._grid())
        columns = codes.shape[1]
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

    def _grid(self) -> tuple[int, int]:
        rows, columns = self.codes.header.shape
        return -(-rows // self.block[0]), -(-columns // self.block[1])


def scale_of(name: str, tensors: Mapping[str, TensorHeader]) -> TensorHeader | None:
    """Return the scale that lies beside a float8 weight, if there is one."""
    return next((tensors[name + s] for s in _SCALES if name + s in tensors), None)


def block_of(
    weight: TensorHeader,
    scale: TensorHeader | None,
    declared: tuple[int, int] | None,
    subject: str,
) -> tuple[int, int]:
    """Find out what one scale belongs to, in rows and columns.

    Args:
        weight: ``[rows, columns]``.
        scale: no axes or one element, ``[rows]``, or a grid ``[a, b]``.
        declared: the blocks that ``config.json`` speaks of.
        subject: what a message is about.

    Raises:
        ModelError: the form is not known.
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
