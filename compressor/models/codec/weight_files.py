"""The weights of a compressed model: mapped from their files, decoded when they are used."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from compressor import __version__
from compressor.errors import ModelError
from compressor.models.checkpoint.folder import read_index
from compressor.models.checkpoint.headers import DTYPES, ShardHeader, TensorHeader, read_header
from compressor.models.codec.description import Description
from compressor.models.codec.forms import Entry, Part
from compressor.models.executor import LazyTensor
from compressor.models.executor.dtypes import TORCH_DTYPES

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

DIGEST = "description"
"""The note in a file that holds the sha256 of ``model.json``."""

WRITER = "version"
"""The note in a file that says which version wrote it."""

_OTHER = "it belongs to another model.json; export the model again"
_DAMAGED = "the file is cut or damaged; copy it again"

Stored = tuple[ShardHeader, TensorHeader]
Buffer = bytearray | mmap.mmap


def read_tensors(
    description: Description, headers: Sequence[ShardHeader], mapped: bool
) -> dict[str, Tensor]:
    """Return the tensors of a model by name; none of their bytes is looked at if they are mapped.

    Those that are stored in a form of their own are lazy, and raise a ``ModelError`` when they are
    used if their parts contradict each other.

    Args:
        description: the model.
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
    """Tell whether this version wrote the files of these headers and that ``model.json`` together.

    If so, the graph in it is one that this version has compiled.
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
    found = {tensor: header.path.name for header in headers for tensor in header.tensors}
    for name in sorted(found.keys() | index.keys()):
        if found.get(name) != index.get(name):
            problem = f"places {name!r} in {index.get(name)!r}, which does not hold it"
            if name not in index:
                problem = f"does not list {name!r}, which {found[name]!r} holds"
            raise ModelError(f"index {str(path)!r}", problem, _OTHER)
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
    known = set()
    for name, entry in description.tensors.items():
        for own, part in entry.parts(name).items():
            known.add(own)
            if own not in stored:
                raise ModelError(_subject(headers[0]), f"lack the tensor {own!r}", _OTHER)
            _check_part(own, part, *stored[own])
    extra = sorted(stored.keys() - known)
    if extra:
        header = stored[extra[0]][0]
        raise ModelError(
            _subject(header), f"hold {extra[0]!r}, which the model does not have", _OTHER
        )


def _check_part(name: str, part: Part, header: ShardHeader, tensor: TensorHeader) -> None:
    fits = len(tensor.shape) == 1 if part.shape is None else tensor.shape == part.shape
    if tensor.dtype != part.dtype or not fits:
        wanted = (
            f"one axis of {part.dtype}" if part.shape is None else f"{part.dtype}{list(part.shape)}"
        )
        raise ModelError(
            _subject(header),
            f"hold {name!r} as {tensor.dtype}{list(tensor.shape)}, not {wanted}",
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
    if not entry.decoded:
        header, tensor = stored[name]
        return _view(buffers[header.path], tensor)
    decode = partial(_decoded, entry, name, buffers, stored)
    return LazyTensor(decode, entry.shape, TORCH_DTYPES[entry.dtype])


def _decoded(
    entry: Entry, name: str, buffers: Mapping[Path, Buffer], stored: Mapping[str, Stored]
) -> Tensor:
    found = {part: stored[part] for part in entry.parts(name)}
    parts = {part: _view(buffers[header.path], one) for part, (header, one) in found.items()}
    try:
        return entry.decode(name, parts)
    except ValueError as error:
        subject = _subject(stored[name][0])
        raise ModelError(subject, f"hold a damaged tensor {name!r} ({error})", _DAMAGED) from error
