"""What files for devices have in common: stored tensors, counted, beside an operator list."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from compressor.errors import ModelError
from compressor.lab.inspect.contents import (
    GraphFacts,
    ModelContents,
    TensorRow,
    count_array,
    not_finite_note,
    percent,
)
from compressor.types.tensors import Array, TensorSpec

SCALE, ZERO_POINT = "scale", "zero point"
"""What belongs to another tensor."""

SIDE = (SCALE, ZERO_POINT)
SMALL = 16  # elements: shorter integers are arguments of operators, not weights


@dataclass(frozen=True)
class Stored:
    """A tensor of a file.

    Attributes:
        dtype: the name of its type.
        values: its elements, in any shape; ``None`` where they are packed, or have no form that is
            known.
        quantization: how real numbers are represented; :data:`SCALE` or :data:`ZERO_POINT` for
            what belongs to another tensor; empty if as they are.
        zero: the code of zero.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    values: Array | None
    quantization: str = ""
    zero: int = 0

    @property
    def weight(self) -> bool:
        """Whether it holds real numbers: floats or codes of them."""
        return not self.side and (bool(self.quantization) or "float" in self.dtype)

    @property
    def side(self) -> bool:
        """Whether it belongs to another tensor."""
        return self.quantization in SIDE


def elements(data: memoryview, dtype: str, shape: tuple[int, ...]) -> Array | None:
    """Return numbers, which are not copied; ``None`` if the bytes do not hold that many."""
    try:
        held = np.dtype(getattr(ml_dtypes, dtype, dtype))
    except TypeError:
        return None
    if held.hasobject or prod(shape) * held.itemsize != len(data):
        return None
    return np.frombuffer(data, held)


def described(
    kind: str,
    path: Path,
    files: Mapping[str, int],
    stored: Iterable[Stored],
    graph: GraphFacts,
    metadata: Mapping[str, Any] | None = None,
) -> ModelContents:
    """Return the contents of a model file: its tensors are counted here."""
    rows: list[TensorRow] = []
    notes: list[str] = []
    weights = zeros = counted = 0
    for tensor in stored:
        count, size = prod(tensor.shape), None
        if tensor.values is not None and not tensor.side:
            found = count_array(tensor.values, tensor.zero)
            size = found.zeros
            if found.not_finite:
                notes.append(not_finite_note(tensor.name, found.not_finite))
            if tensor.weight:
                zeros, counted = zeros + size, counted + count
        weights += count if tensor.weight else 0
        rows.append(
            TensorRow(
                name=tensor.name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                bytes=tensor.bytes,
                zeros=None if size is None else percent(size, count),
                quantization=tensor.quantization,
            )
        )
    return ModelContents(
        kind=kind,
        path=str(path),
        files=files,
        tensors=tuple(rows),
        parameters=weights,
        zeros=percent(zeros, counted),
        notes=tuple(notes),
        graph=graph,
        metadata=metadata or {},
    )


def facts(
    operators: Iterable[str], ends: Iterable[Iterable[TensorSpec]], producer: str = ""
) -> GraphFacts:
    """Return what a file says of its graph; its MACs are not counted.

    Args:
        ends: its inputs, and its outputs.
    """
    inputs, outputs = (tuple(end) for end in ends)
    counts = Counter(operators)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return GraphFacts({}, inputs, outputs, dict(ordered), None, producer, {})


def scheme(dtype: str, scales: int, zero: int = 0) -> str:
    """Return how codes stand for numbers, such as ``int8/channel``."""
    return f"{dtype}/{'channel' if scales > 1 else 'tensor'}" + (" asym" if zero else "")


@contextmanager
def mapped(path: Path, kind: str) -> Iterator[memoryview]:
    """Map a file into memory, and refuse it where what reads it raises ``ValueError``.

    Args:
        kind: what it should be, for messages.

    Raises:
        ModelError: it is empty, cut, damaged or of another kind.
    """
    with refused(path, kind), path.open("rb") as file:
        # It is unmapped when the last array of it is gone.
        yield memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


@contextmanager
def refused(path: Path, kind: str) -> Iterator[None]:
    """Refuse a file where what reads it raises ``ValueError``.

    Raises:
        ModelError: it is cut, damaged or of another kind.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        raise ModelError(
            f"model {str(path)!r}", f"cannot be read as {kind} ({error})",
            "copy it again, or export it again",
        ) from error  # fmt: skip
