"""The header of a safetensors file: where each tensor goes, before any of them is written.

The library's own writer wants all tensors in memory; here a model larger than memory is written
from tensors that are computed as they are asked for. The library reads the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import onnx_ir as ir

from compressor import __version__
from compressor.files import json_text
from compressor.graph.skeleton import Skeleton, graph_as_json
from compressor.graph.values import tensor_spec
from compressor.models.codec import (
    DESCRIPTION,
    DIGEST,
    FORMAT,
    INDEX,
    SCHEMA,
    WEIGHTS,
    WRITER,
    Entry,
)
from compressor.models.codec.forms import Part
from compressor.models.codec.storage import Planned, encoded, part_bytes, plan_tensors
from compressor.types.tensors import TensorSpec

_ALIGNMENT = 8
_LENGTH = 8  # bytes that say how long the header is


@dataclass(frozen=True)
class Described:
    """What a header says of a tensor.

    Attributes:
        name: the tensor.
        dtype: its element type, as safetensors calls it.
        shape: its shape.
        bits: of an element.
        nbytes: of the whole.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bits: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """A file before it is written.

    Attributes:
        header: the bytes before the data.
        offsets: the byte of the file at which each tensor starts, by name, in their order.
        nbytes: size of the file.
    """

    header: bytes
    offsets: Mapping[str, int]
    nbytes: int


def layout(tensors: Iterable[Described], metadata: Mapping[str, str], room: int = 0) -> Layout:
    """Give each tensor its place: wide elements first, so that all are aligned, then by name.

    Args:
        tensors: what will be in the file.
        metadata: its notes.
        room: bytes that the header takes at least; spaces fill it up.
    """
    content: dict[str, object] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda t: (-t.bits, t.name)):
        starts[tensor.name] = end
        content[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * max(-len(text) % _ALIGNMENT, room - _LENGTH - len(text))
    header = len(text).to_bytes(_LENGTH, "little") + text
    offsets = {name: len(header) + start for name, start in starts.items()}
    return Layout(header, offsets, len(header) + end)


_NO_DIGEST = "0" * 64
_SIDE_BITS = 1  # masks and indices come last, so that wider elements stay aligned


@dataclass(frozen=True)
class GraphPlan:
    """What will be written.

    Attributes:
        model: the graph as it is; its inputs and outputs are described.
        parts: the graph that is stored and its tensors.
        shards: the tensors of each file, by the files' names.
        name: the model's name, which is noted in the files.
    """

    model: ir.Model
    parts: Skeleton
    shards: Mapping[str, tuple[Planned, ...]]
    name: str

    @property
    def nbytes(self) -> int:
        """Bytes of all files; those of sparse tensors are counted in full."""
        files = self.shards.items()
        size = sum(self.room(own) + sum(t.nbytes for t in own) for _, own in files)
        entries = {t.name: t.entry for own in self.shards.values() for t in own}
        if len(self.shards) > 1:
            stored = {name: {t.name: t.nbytes for t in own} for name, own in self.shards.items()}
            size += len(_index(stored))
        return size + len(self.description(entries))

    def room(self, tensors: Iterable[Planned]) -> int:
        """Return the bytes before the data: enough for the header whatever is sparse."""
        described: list[Described] = []
        for tensor in tensors:
            described += _described(tensor.name, tensor.entry, tensor.entry.parts(tensor.name))
            if tensor.sparse is not None:
                longest = max(tensor.sparse, key=lambda name: len(name.encode()))
                described.append(Described(longest, "U8", (tensor.nbytes,), 1, 0))
        return len(layout(described, self.metadata(_NO_DIGEST)).header)

    def description(self, entries: Mapping[str, Entry]) -> bytes:
        """Return ``model.json`` for tensors that are stored so."""
        graph = self.model.graph
        document = {
            "format": FORMAT,
            "schema": SCHEMA,
            "inputs": [_spec(tensor_spec(value)) for value in graph.inputs],
            "outputs": [_spec(tensor_spec(value)) for value in graph.outputs],
            "weights": INDEX if len(self.shards) > 1 else WEIGHTS,
            "tensors": {name: entries[name].as_json() for name in self.parts.tensors},
            "graph": graph_as_json(self.parts.proto),
        }
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
        return text.encode() + b"\n"

    def metadata(self, digest: str) -> dict[str, str]:
        """Return the notes in the files; the digest is that of ``model.json``."""
        return {"format": FORMAT, "name": self.name, DIGEST: digest, WRITER: __version__}


def plan_graph(
    model: ir.Model,
    parts: Skeleton,
    name: str,
    sparse: bool,
    max_shard_size: int | None,
) -> GraphPlan:
    """Plan the files of a graph; no tensor is read.

    Args:
        model: the graph as it is.
        parts: the graph that is stored.
        name: the model's name.
        sparse: tensors with many zeros may be stored as sparse.
        max_shard_size: bytes of the tensors in a file, as they are before zeros are left out;
            ``None`` for a single file. A tensor that is larger has a file of its own.

    Raises:
        SpecError: safetensors does not hold a tensor's element type.
    """
    planned = plan_tensors(parts.tensors, parts.widths, sparse)
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in planned.values():
        if max_shard_size is not None and shards[-1] and size + tensor.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else [WEIGHTS]
    by_name = {file: tuple(own) for file, own in zip(names, shards, strict=True)}
    return GraphPlan(model, parts, by_name, name)


def write_graph(plan: GraphPlan, directory: Path) -> tuple[Path, ...]:
    """Write the files, evaluating one tensor after another, each once.

    Returns:
        All files, the main one first: the weights, or their index.

    Raises:
        ArtifactError: a tensor is not what its type and shape say.
    """
    entries: dict[str, Entry] = {}
    stored: dict[str, list[Described]] = {}
    for file, tensors in plan.shards.items():
        with (directory / file).open("wb") as stream:
            stored[file] = _write_data(stream, plan, tensors, entries)
    description = plan.description(entries)
    metadata = plan.metadata(hashlib.sha256(description).hexdigest())
    for file, described in stored.items():
        room = plan.room(plan.shards[file])
        with (directory / file).open("r+b") as stream:
            stream.write(layout(described, metadata, room).header)
    (directory / DESCRIPTION).write_bytes(description)
    paths = [directory / file for file in plan.shards]
    if len(paths) > 1:
        sizes = {file: {d.name: d.nbytes for d in own} for file, own in stored.items()}
        (directory / INDEX).write_bytes(_index(sizes))
        paths.insert(0, directory / INDEX)
    return (*paths, directory / DESCRIPTION)


def _write_data(
    stream: IO[bytes], plan: GraphPlan, tensors: Iterable[Planned], entries: dict[str, Entry]
) -> list[Described]:
    """Write all but the header in the order of its layout, and note how tensors are stored."""
    described: list[Described] = []
    sides: dict[str, tuple[int, int]] = {}
    stream.seek(plan.room(tensors))
    with TemporaryFile(dir=Path(stream.name).parent) as later:
        for tensor in sorted(tensors, key=lambda t: (-t.entry.width, t.name)):
            made = encoded(tensor, plan.parts.tensors[tensor.name])
            entries[tensor.name] = made.entry
            described += _described(tensor.name, made.entry, made.shapes())
            for name, data in made.parts.items():
                if name == tensor.name:
                    stream.write(data.data)
                else:
                    sides[name] = later.tell(), data.nbytes
                    later.write(data.data)
        for name in sorted(sides):
            start, length = sides[name]
            later.seek(start)
            stream.write(later.read(length))
    return described


def _described(name: str, entry: Entry, parts: Mapping[str, Part]) -> Iterable[Described]:
    """Describe what is stored of a tensor for the header; all shapes are known."""
    for own, part in parts.items():
        bits = entry.width if own == name else _SIDE_BITS
        yield Described(own, part.dtype, part.shape or (), bits, part_bytes(part))


def _index(shards: Mapping[str, Mapping[str, int]]) -> bytes:
    places = {name: file for file, tensors in shards.items() for name in tensors}
    total = sum(size for tensors in shards.values() for size in tensors.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json_text(content).encode()


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}
