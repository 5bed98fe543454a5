"""Batches of named arrays, and the descriptions of named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

ValueT = TypeVar("ValueT")
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Batch: TypeAlias = dict[str, Array]
"""Arrays by name, each with the batch as its first axis, unless it is a :class:`Feed`."""
_TOLERANCES = {2: 2e-2}
"""Share of the largest output that is tolerated, by the bytes of an output's element."""
_TOLERANCE = 1e-4  # for other sizes


class Feed(dict[str, Array]):
    """One sample that holds all inputs of a model, in arrays of any rank."""


def samples_in(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    return 1 if isinstance(batch, Feed) else len(next(iter(batch.values())))


def cut(batch: Batch, start: int, stop: int | None) -> Batch:
    """Return a batch's samples from ``start`` to ``stop``; a feed stays whole."""
    if isinstance(batch, Feed):
        return batch
    return {name: array[start:stop] for name, array in batch.items()}


def picked(batch: Batch, names: Iterable[str]) -> Batch:
    """Return some of a batch's arrays."""
    return type(batch)((name, batch[name]) for name in names)


@dataclass(frozen=True)
class TensorSpec:
    """A model input or output.

    Attributes:
        name: its name in the graph.
        shape: one entry an axis; a string names a dynamic axis, ``None`` is unknown.
        dtype: a numpy dtype name such as ``float32``.
    """

    name: str
    shape: tuple[int | str | None, ...]
    dtype: str

    def __str__(self) -> str:
        axes = ", ".join("?" if d is None else str(d) for d in self.shape)
        return f"{self.name} {self.dtype}[{axes}]"

    def mismatch(self, shape: tuple[int, ...], dtype: str) -> str | None:
        """Return why an array of this shape and dtype does not match, or ``None``."""
        if not may_agree(self.shape, shape):
            return f"shape is {list(shape)}, the model expects {self}"
        return None if dtype == self.dtype else f"dtype is {dtype}, the model expects {self.dtype}"

    def fits(self, other: TensorSpec) -> bool:
        """Whether both can describe one tensor, regardless of its name."""
        return self.dtype == other.dtype and may_agree(self.shape, other.shape)


def may_agree(first: Sequence[object], second: Sequence[object]) -> bool:
    """Whether two shapes can be equal; a dynamic axis can have any length."""
    pairs = zip(first, second, strict=False)
    differ = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
    return len(first) == len(second) and not differ


def below(prefix: str, values: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """Return the values whose names begin with a prefix, by the rest of their names."""
    return {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}


def answers(arrays: Mapping[str, Any], target: str) -> Any:
    """Return the right answers among arrays by name, or ``None`` if they are not there.

    Several that a program gave as a dictionary are arrays ``target.key``; they come back as a
    dictionary.

    >>> answers({"x": 1, "target.box": 2, "target.kind": 3}, "target")
    {'box': 2, 'kind': 3}
    """
    if target in arrays:
        return arrays[target]
    return below(f"{target}.", arrays) or None


def filled(*arrays: Array) -> tuple[Array, ...]:
    """Return arrays of one rank in the shape that holds them all, filled with zeros.

    So arrays compare whose rows the data decide, such as the boxes that two models see: a row that
    one of them lacks counts as a whole.
    """
    shape = tuple(map(max, zip(*(a.shape for a in arrays), strict=True)))
    if all(a.shape == shape for a in arrays):
        return arrays
    gaps = ([(0, n - have) for n, have in zip(shape, a.shape, strict=True)] for a in arrays)
    return tuple(np.pad(a, gap) for a, gap in zip(arrays, gaps, strict=True))


def fixed_batch(inputs: Sequence[TensorSpec]) -> int | None:
    """Return the fixed batch size of a model; ``None`` if it is dynamic."""
    lengths = [s.shape[0] for s in inputs if s.shape and not _begins_otherwise(s, inputs)]
    first = lengths[0] if lengths else None
    fixed = all(isinstance(length, int) for length in lengths)
    return first if fixed and isinstance(first, int) else None


def made_batch(inputs: Sequence[TensorSpec], arrays: Batch) -> Batch:
    """Return synthetic arrays as a batch, or as a feed if inputs have no sample axis."""
    return arrays if inputs and unstackable(inputs) is None else Feed(arrays)


def unstackable(inputs: Sequence[TensorSpec], batch: int | None = None) -> TensorSpec | None:
    """Return the first input whose first axis cannot be that of samples; ``None`` if all can.

    An axis named batch, after one that is not, has the samples: recurrent networks
    often take ``[time, batch, features]``. Without such a name, an axis that begins one input and
    stands later in another is not the first of both: ``[N, units]`` and ``[time, N, units]``.

    Args:
        batch: how many samples are to be stacked, if that is known.
    """
    size = fixed_batch(inputs) or batch
    for spec in inputs:
        apart = not spec.shape or _begins_otherwise(spec, inputs)
        if apart or (isinstance(spec.shape[0], int) and spec.shape[0] != size):
            return spec
    return None


def samples_apart(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """Whether samples stack in the inputs, and come after another axis in each output.

    Recognizers of text often give ``[time, batch, classes]``.
    """
    if fixed_batch(inputs) is not None or unstackable(inputs) is not None or not outputs:
        return False
    both = [*inputs, *outputs]
    return all(s.shape and (type(s.shape[0]) is int or _begins_otherwise(s, both)) for s in outputs)


def _begins_otherwise(spec: TensorSpec, inputs: Sequence[TensorSpec]) -> bool:
    """Return whether the names of axes show that the first one is not that of samples."""
    if not spec.shape or _is_batch(first := spec.shape[0]):
        return False
    starts = {other.shape[0] for other in inputs if other.shape}
    if any(map(_is_batch, (d for other in inputs for d in other.shape))):
        behind = {d for other in inputs for d in other.shape[1:] if _is_batch(other.shape[0])}
        later = any(map(_is_batch, spec.shape))
        return later or (isinstance(first, str) and first in behind)
    return any(isinstance(d, str) and d in starts and d != first for d in spec.shape[1:])


def _is_batch(axis: int | str | None) -> bool:
    return isinstance(axis, str) and "batch" in axis.lower()


def tolerated(reference: Array) -> float:
    """Return the share of its largest value that runtimes may differ in an output, by its type."""
    return _TOLERANCES.get(reference.itemsize, _TOLERANCE)


def worst_difference(reference: Batch, other: Batch) -> tuple[float, float]:
    """Return the largest difference of float outputs, over their largest value, and its limit.

    Of several outputs that with the largest share of its limit counts. Where the reference is
    not finite, the other must be just that. Outputs pair by position.
    """
    worst, limit = 0.0, _TOLERANCE
    for ours, theirs in zip(reference.values(), other.values(), strict=True):
        if ours.shape != theirs.shape:
            return np.inf, limit
        if ours.dtype.kind != "f":
            continue
        tolerance = tolerated(ours)
        share = _relative(ours.astype(np.float64), theirs.astype(np.float64))
        if share / tolerance >= worst / limit:
            worst, limit = share, tolerance
    return worst, limit


def _relative(reference: Array, other: Array) -> float:
    finite = np.isfinite(reference)
    if not np.array_equal(reference[~finite], other[~finite], equal_nan=True):
        return np.inf
    ours, theirs = reference[finite], other[finite]
    if not ours.size:
        return 0.0
    scale = float(np.abs(ours).max())
    difference = float(np.abs(ours - theirs).max())
    if not np.isfinite(difference):
        return np.inf
    return difference / scale if scale > 0 else difference
