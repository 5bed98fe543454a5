"""What an inspection finds, as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from compressor.lab.verify.files import FileState
from compressor.types.tensors import Array, TensorSpec


@dataclass(frozen=True)
class TensorRow:
    """One stored tensor.

    Attributes:
        shape: its shape; that of the elements where several are packed into one byte.
        dtype: numpy dtype name.
        bytes: bytes as stored.
        zeros: share of elements that stand for zero, in percent; ``None`` for text, scales and
            zero points.
        quantization: how real numbers are represented, such as ``int8/channel``; ``scale`` or
            ``zero point`` for what belongs to another tensor; empty if as they are.
        macs: multiply-accumulates that use it, for one sample; ``None`` where nobody can tell.
        storage: the form in which a compressed model stores it, such as ``bitmask``; empty for all
            elements one after the other.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    zeros: float | None
    quantization: str = ""
    macs: int | None = None
    storage: str = ""


@dataclass(frozen=True)
class GraphFacts:
    """What a graph says of itself.

    Attributes:
        opsets: versions by domain; the default domain is ``ai.onnx``. Formats other than ONNX have
            none.
        operators: how many nodes there are of each operator, the most frequent first.
        macs: multiply-accumulates for one sample; dynamic axes count as 1. ``None`` in formats
            whose operators are not known here.
        producer: name and version of what wrote it.
    """

    opsets: Mapping[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    operators: Mapping[str, int]
    macs: int | None
    producer: str
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class ModelContents:
    """A model file, or several that belong together.

    Attributes:
        tensors: everything stored, in the file's order.
        parameters: number of weights; scales, zero points and other integers are not counted.
        zeros: share of the parameters that are zero, in percent; ``None`` without parameters.
        quantization: what the checkpoint's configuration says; empty without one.
        notes: what the reader should know, one sentence each.
        metadata: what a file says of itself, beside its graph; of long arrays, how many values
            they have.
    """

    kind: str
    path: str
    files: Mapping[str, int]
    tensors: tuple[TensorRow, ...]
    parameters: int
    zeros: float | None
    quantization: str = ""
    notes: tuple[str, ...] = ()
    graph: GraphFacts | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(row.bytes for row in self.tensors)

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of the tensors of each dtype, the greatest first."""
        sums = Counter[str]()
        for row in self.tensors:
            sums[row.dtype] += row.bytes
        return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))

    @property
    def intact(self) -> bool:
        """Whether it is as it was written; a model alone has nothing to be compared with."""
        return True


@dataclass(frozen=True)
class RunContents:
    """The output folder of a run.

    Attributes:
        files: every file of the manifest, compared with it.
        report: the content of ``report.json``; ``None`` where that is not what the run wrote.
    """

    path: str
    name: str
    seed: int
    versions: Mapping[str, str]
    files: tuple[FileState, ...]
    report: Mapping[str, Any] | None

    @property
    def intact(self) -> bool:
        """Whether every file is as the run wrote it."""
        return all(file.state == "unchanged" for file in self.files)


@dataclass(frozen=True)
class EngineContents:
    """A TensorRT engine, by the manifest beside it; the engine itself only a GPU can open.

    Attributes:
        intact: the engine is the one that the manifest is about.
    """

    path: str
    files: Mapping[str, int]
    manifest: Mapping[str, Any]
    intact: bool


Contents = ModelContents | RunContents | EngineContents


def contents_json(contents: Contents) -> dict[str, Any]:
    """Return the document."""
    if isinstance(contents, RunContents):
        return {"kind": "run output", "intact": contents.intact, **asdict(contents)}
    if isinstance(contents, EngineContents):
        return {"kind": "TensorRT engine", **asdict(contents)}
    return {
        **asdict(contents),
        "bytes": contents.bytes,
        "bytes_by_dtype": contents.bytes_by_dtype,
    }


_PART = 8 << 20  # bytes looked at together, so that memory does not grow with the tensor
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True)
class Counts:
    """Elements of some kinds; those of parts of a tensor can be added."""

    zeros: int = 0
    not_finite: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Return the counts of two parts together."""
        return Counts(self.zeros + other.zeros, self.not_finite + other.not_finite)


def parts_of(count: int, itemsize: int) -> list[tuple[int, int]]:
    """Return begin and end of the parts in which elements of so many bytes are looked at."""
    step = _PART // itemsize
    return [(start, min(start + step, count)) for start in range(0, count, step)]


def count_array(values: Array, zero: int = 0) -> Counts:
    """Count the elements of an array that stand for zero, and floats that are NaN or infinite.

    Args:
        zero: the code of zero.
    """
    flat, total = values.reshape(-1), Counts()
    real = np.issubdtype(flat.dtype, np.floating) or "float" in flat.dtype.name
    for start, stop in parts_of(flat.size, flat.itemsize):
        part = flat[start:stop]
        bad = int(np.count_nonzero(~np.isfinite(part))) if real else 0
        total += Counts(int(np.count_nonzero(part == part.dtype.type(zero))), bad)
    return total


def count_elements(values: torch.Tensor, *, pairs: bool = False) -> Counts:
    """Count zeros, and values that are NaN or infinite.

    Args:
        pairs: they are bytes that each hold two floats of four bits.
    """
    if pairs:
        low, high = (int(((values & half) == 0).sum()) for half in (0x07, 0x70))
        return Counts(low + high)
    if values.dtype in _SIGNED:
        values = values.view(_SIGNED[values.dtype])
    if values.dtype == torch.float4_e2m1fn_x2:
        return count_elements(values.view(torch.uint8), pairs=True)
    if values.is_floating_point() and values.itemsize == 1:
        values = values.to(torch.float32)  # nothing is counted in 8-bit floats
    zeros = values.numel() - int(torch.count_nonzero(values))
    # A sum is not finite if a summand is not. One of large numbers may overflow as well.
    suspect = values.is_floating_point() and not bool(values.sum(dtype=torch.float32).isfinite())
    return Counts(zeros, int((~values.isfinite()).sum()) if suspect else 0)


def percent(part: int, whole: int) -> float | None:
    """Return a share in percent; ``None`` of nothing."""
    return 100.0 * part / whole if whole else None


def not_finite_note(name: str, count: int) -> str:
    """Return the sentence that says a tensor is damaged."""
    return f"{name!r} holds {count:,} values that are NaN or infinite"
