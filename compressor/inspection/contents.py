"""What an inspection finds, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from compressor.types.tensors import TensorSpec

State = Literal["unchanged", "changed", "missing"]


@dataclass(frozen=True)
class TensorRow:
    """One stored tensor.

    Attributes:
        name: its name in the file.
        shape: its shape; that of the elements where several are packed into one byte.
        dtype: numpy dtype name.
        bytes: bytes as stored.
        zeros: share of elements that stand for zero, in percent; ``None`` for text, scales and
            zero points.
        quantization: how real numbers are represented, such as ``int8/channel``; ``scale`` or
            ``zero point`` for what belongs to another tensor; empty if as they are.
        macs: multiply-accumulates that use it, for one sample; ``None`` where that is not known.
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
    """What an ONNX graph says of itself.

    Attributes:
        opsets: versions by domain; the default domain is ``ai.onnx``.
        inputs: what it takes.
        outputs: what it gives.
        operators: how many nodes there are of each operator, the most frequent first.
        macs: multiply-accumulates for one sample; dynamic axes count as 1.
        producer: name and version of what wrote it.
        metadata: its notes.
    """

    opsets: Mapping[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    operators: Mapping[str, int]
    macs: int
    producer: str
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class ModelContents:
    """A model file, or several that belong together.

    Attributes:
        kind: what it is, in words.
        path: where it is.
        files: bytes of each file.
        tensors: everything stored, in the file's order.
        parameters: number of weights; scales, zero points and other integers are not counted.
        zeros: share of the parameters that are zero, in percent; ``None`` without parameters.
        quantization: what the checkpoint's configuration says; empty without one.
        notes: what the reader should know, one sentence each.
        graph: for models that have one.
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

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(row.bytes for row in self.tensors)

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of the tensors of each dtype, the greatest first."""
        sums: dict[str, int] = {}
        for row in self.tensors:
            sums[row.dtype] = sums.get(row.dtype, 0) + row.bytes
        return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))

    @property
    def intact(self) -> bool:
        """Whether it is as it was written; that is not known of a model alone."""
        return True


@dataclass(frozen=True)
class FileState:
    """A file that a run wrote, compared with the run's manifest."""

    name: str
    state: State
    bytes: int | None


@dataclass(frozen=True)
class RunContents:
    """The output folder of a run.

    Attributes:
        path: where it is.
        name: the spec's name.
        seed: the spec's seed.
        versions: what it was made with.
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
        path: where it is.
        files: bytes of engine and manifest.
        manifest: what the manifest says.
        intact: the engine is the one that the manifest is about.
    """

    path: str
    files: Mapping[str, int]
    manifest: Mapping[str, Any]
    intact: bool


Contents = ModelContents | RunContents | EngineContents
