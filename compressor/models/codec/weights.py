"""The files of a compressed model: its weights, written beside ``model.json`` and mapped again."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import onnx_ir as ir
import torch
from torch import Tensor

from compressor import __version__
from compressor.errors import ModelError
from compressor.graph.skeleton import Skeleton
from compressor.models.codec.description import (
    DESCRIPTION,
    FORMAT,
    Description,
    description_text,
)
from compressor.models.codec.forms import Entry, Part, Planned, encoded, plan_tensors
from compressor.models.codec.headers import (
    DTYPES,
    INDEX,
    WEIGHTS,
    Described,
    ShardHeader,
    TensorHeader,
    check_index,
    in_shards,
    index_text,
    layout,
    read_header,
    read_index,
    shard_names,
)
from compressor.models.element_types import TORCH_DTYPES
from compressor.models.lazy_tensor import LazyTensor
from compressor.types.tensors import Array

DIGEST = "description"
"""The note in a file that holds the sha256 of ``model.json``."""

WRITER = "version"
"""The note in a file that holds the version that wrote it."""

_OTHER = "it belongs to another model.json; export the model again"
_DAMAGED = "the file is cut or damaged; copy it again"

_NO_DIGEST = "0" * 64
_SIDE_BITS = 1  # masks and indices come last, so that wider elements stay aligned

Stored = tuple[ShardHeader, TensorHeader]
Buffer = bytearray | mmap.mmap


@dataclass(frozen=True)
class GraphPlan:
    """What will be written.

    Attributes:
        model: the graph as it is; its inputs and outputs are described.
        parts: the graph that is stored and its tensors.
        shards: the tensors of each file, by the files' names.
    """

    model: ir.Model
    parts: Skeleton
    shards: Mapping[str, Sequence[Planned]]
    name: str

    @property
    def nbytes(self) -> int:
        """Bytes of all files; those of sparse tensors are counted in full."""
        shards = self.shards.items()
        size = sum(self.room(tensors) + sum(t.nbytes for t in tensors) for _, tensors in shards)
        if len(shards) > 1:
            size += len(index_text({f: {t.name: t.nbytes for t in own} for f, own in shards}))
        entries = {t.name: t.entry for _, tensors in shards for t in tensors}
        return size + len(self.description(entries))

    def room(self, tensors: Iterable[Planned]) -> int:
        """Return the bytes before the data: enough for the header whatever is sparse."""
        described: list[Described] = []
        for tensor in tensors:
            described += _described(tensor.name, tensor.entry, {})
            if tensor.sparse is not None:
                longest = max(tensor.sparse, key=lambda name: len(name.encode()))
                described.append(Described(longest, "U8", (tensor.nbytes,), 1, 0))
        return len(layout(described, self.metadata(_NO_DIGEST)).header)

    def description(self, entries: Mapping[str, Entry]) -> bytes:
        """Return ``model.json`` for tensors that are stored so."""
        weights = INDEX if len(self.shards) > 1 else WEIGHTS
        return description_text(self.model, self.parts, entries, weights)

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
        sparse: tensors with many zeros may be stored as sparse.
        max_shard_size: bytes of the tensors in a file before zeros are left out; ``None`` for a
            single file. A larger tensor has a file of its own.

    Raises:
        SpecError: safetensors does not hold a tensor's element type.
    """
    shards = in_shards(plan_tensors(parts.tensors, parts.widths, sparse), max_shard_size)
    by_name = dict(zip(shard_names(len(shards)), shards, strict=True))
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
        sizes = {file: {d.name: d.nbytes for d in tensors} for file, tensors in stored.items()}
        (directory / INDEX).write_bytes(index_text(sizes))
        paths.insert(0, directory / INDEX)
    return (*paths, directory / DESCRIPTION)


def _write_data(
    stream: IO[bytes], plan: GraphPlan, tensors: Sequence[Planned], entries: dict[str, Entry]
) -> list[Described]:
    """Write all but the header in the order of its layout, and note how tensors are stored."""
    described: list[Described] = []
    beside: dict[str, tuple[int, int]] = {}
    stream.seek(plan.room(tensors))
    with TemporaryFile(dir=Path(stream.name).parent) as later:
        for tensor in sorted(tensors, key=lambda t: (-t.entry.width, t.name)):
            entry, parts = encoded(tensor, plan.parts.tensors[tensor.name])
            entries[tensor.name] = entry
            described += _described(tensor.name, entry, parts)
            for name, data in parts.items():
                if name == tensor.name:
                    stream.write(data.data)
                else:
                    beside[name] = later.tell(), data.nbytes
                    later.write(data.data)
        for name in sorted(beside):
            start, length = beside[name]
            later.seek(start)
            stream.write(later.read(length))
    return described


def _described(name: str, entry: Entry, values: Mapping[str, Array]) -> Iterator[Described]:
    """Describe the parts of a tensor for the header.

    ``values`` are the elements of its parts by name, for parts whose shape only they tell.
    """
    for part_name, part in entry.parts(name).items():
        shape = values[part_name].shape if part.shape is None else part.shape
        bits = entry.width if part_name == name else _SIDE_BITS
        nbytes = prod(shape) * DTYPES[part.dtype].itemsize
        yield Described(part_name, part.dtype, shape, bits, nbytes)


def read_tensors(
    description: Description, headers: Sequence[ShardHeader], mapped: bool
) -> dict[str, Tensor]:
    """Return the tensors of a model by name; if they are mapped, none of their bytes is read yet.

    Tensors that have to be decoded are lazy: they raise a ``ModelError`` when they are used and
    their parts contradict each other.

    Args:
        headers: those of its files, see :func:`stored_headers`.
        mapped: map the files; otherwise read them now.

    Raises:
        ModelError: a file holds other tensors than are described, or cannot be read.
    """
    stored = _by_name(headers)
    _check(description, headers, stored)
    buffers = {header.path: _buffer(header, mapped) for header in headers}
    return {
        name: _tensor(name, entry, buffers, stored) for name, entry in description.tensors.items()
    }


def written_with(description: Description, headers: Sequence[ShardHeader]) -> bool:
    """Return whether this version wrote these headers' files and that ``model.json`` together.

    If so, this version has compiled the graph in it before.
    """
    notes = [header.metadata for header in headers]
    same = all(note.get(DIGEST) == description.digest for note in notes)
    return same and all(note.get(WRITER) == __version__ for note in notes)


def stored_headers(description: Description, folder: Path) -> tuple[ShardHeader, ...]:
    """Read the headers of a model's files.

    Raises:
        ModelError: a file is missing or cut, or the index is not one.
    """
    path = folder / description.weights
    if not path.is_file():
        raise ModelError(
            f"weights {str(path)!r}", "do not exist", "copy the file beside model.json"
        )
    if path.suffix != ".json":
        return (_header(path),)
    index = read_index(path)
    for name in sorted(set(index.values())):
        if Path(name).name != name:
            problem = f"names the shard {name!r}, which is not beside it"
            raise ModelError(f"index {str(path)!r}", problem, _OTHER)
    headers = tuple(_header(folder / name) for name in sorted(set(index.values())))
    holders = {tensor: header.path.name for header in headers for tensor in header.tensors}
    check_index(path, index, holders, _OTHER)
    return headers


def _header(path: Path) -> ShardHeader:
    try:
        return read_header(path)
    except ModelError as error:
        raise ModelError(f"weights {str(path)!r}", error.problem, _DAMAGED) from error


def _by_name(headers: Sequence[ShardHeader]) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in stored:
                where = stored[name][0].path.name
                raise ModelError(_subject(header), f"hold {name!r}, as {where!r} does", _OTHER)
            stored[name] = header, tensor
    return stored


def _check(
    description: Description, headers: Sequence[ShardHeader], stored: Mapping[str, Stored]
) -> None:
    """Check that the files hold what is described, and nothing else."""
    described = set()
    for name, entry in description.tensors.items():
        for part_name, part in entry.parts(name).items():
            described.add(part_name)
            if part_name not in stored:
                raise ModelError(_subject(headers[0]), f"lack the tensor {part_name!r}", _OTHER)
            _check_part(part_name, part, *stored[part_name])
    extra = sorted(stored.keys() - described)
    if extra:
        header = stored[extra[0]][0]
        raise ModelError(
            _subject(header), f"hold {extra[0]!r}, which the model does not have", _OTHER
        )


def _check_part(name: str, part: Part, header: ShardHeader, tensor: TensorHeader) -> None:
    fits = len(tensor.shape) == 1 if part.shape is None else tensor.shape == part.shape
    if tensor.dtype != part.dtype or not fits:
        expected = (
            f"one axis of {part.dtype}" if part.shape is None else f"{part.dtype}{list(part.shape)}"
        )
        raise ModelError(
            _subject(header),
            f"hold {name!r} as {tensor.dtype}{list(tensor.shape)}, not {expected}",
            _OTHER,
        )


def _subject(header: ShardHeader) -> str:
    return f"weights {str(header.path)!r}"


def _buffer(header: ShardHeader, mapped: bool) -> Buffer:
    """Map a file, or read it.

    The mapping is private, so that a tensor may be written to and the file stays as it is.
    """
    try:
        with header.path.open("rb") as stream:
            if mapped:
                return mmap.mmap(stream.fileno(), header.nbytes, access=mmap.ACCESS_COPY)
            content = bytearray(header.nbytes)
            if stream.readinto(content) != header.nbytes:
                raise ModelError(_subject(header), "became shorter while it was read", _DAMAGED)
            return content
    except (OSError, ValueError) as error:
        raise ModelError(_subject(header), f"cannot be read ({error})", _DAMAGED) from error


def _view(buffer: Buffer, tensor: TensorHeader) -> Tensor:
    dtype = DTYPES[tensor.dtype]
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    if tensor.offset % dtype.itemsize:  # another writer's; torch takes elements to be aligned
        data = bytearray(buffer[tensor.offset : tensor.offset + tensor.nbytes])
        return torch.frombuffer(data, dtype=dtype).view(tensor.shape)
    count = tensor.nbytes // dtype.itemsize
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=tensor.offset)
    return flat if len(tensor.shape) == 1 else flat.view(tensor.shape)


def _tensor(
    name: str, entry: Entry, buffers: Mapping[Path, Buffer], stored: Mapping[str, Stored]
) -> Tensor:
    def view(part: str) -> Tensor:
        header, tensor = stored[part]
        return _view(buffers[header.path], tensor)

    def decode() -> Tensor:
        parts = {part: view(part) for part in entry.parts(name)}
        try:
            return entry.decode(name, parts)
        except ValueError as error:
            subject = _subject(stored[name][0])
            problem = f"hold a damaged tensor {name!r} ({error})"
            raise ModelError(subject, problem, _DAMAGED) from error

    if not entry.decoded:
        return view(name)
    return LazyTensor(decode, entry.shape, TORCH_DTYPES[entry.dtype])
