"""Tensors in the files that hold them: mapped, checked when they are first read, decoded."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from compressor.errors import ModelError
from compressor.models.codec.forms import Entry
from compressor.models.codec.headers import DTYPES, ShardHeader, TensorHeader
from compressor.models.element_types import TORCH_DTYPES
from compressor.models.lazy_tensor import CheckedTensor, LazyTensor, OnceChecked
from compressor.types.proofs import checksum

DAMAGED = "the file is truncated or damaged; copy it again"
_CHANGED = "copy the file again; compress verify lists all that was changed"
_CHUNK = 1 << 18  # bytes that a core's cache holds twice

Stored = tuple[ShardHeader, TensorHeader]
Buffer = bytearray | mmap.mmap


def subject_of(header: ShardHeader) -> str:
    """Return the name of a file of weights in messages."""
    return f"weights {str(header.path)!r}"


def opened(header: ShardHeader, mapped: bool) -> Buffer:
    """Map a file, or read it.

    The mapping is private, so that a tensor may be written to and the file stays as it is.

    Raises:
        ModelError: it cannot be read, or becomes shorter meanwhile.
    """
    try:
        with header.path.open("rb") as stream:
            if mapped:
                return mmap.mmap(stream.fileno(), header.nbytes, access=mmap.ACCESS_COPY)
            content = bytearray(header.nbytes)
            if stream.readinto(content) != header.nbytes:
                raise ModelError(subject_of(header), "became shorter while it was read", DAMAGED)
            return content
    except (OSError, ValueError) as error:
        raise ModelError(subject_of(header), f"cannot be read ({error})", DAMAGED) from error


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


def stored_tensor(
    name: str, entry: Entry, buffers: Mapping[Path, Buffer], stored: Mapping[str, Stored]
) -> Tensor:
    """Return a tensor of a model; none of its bytes is read yet.

    Args:
        entry: how it is stored; without a checksum, nothing is compared.
        buffers: the content of each file.
        stored: where the tensors of all files lie, by name.
    """

    def view(part: str) -> Tensor:
        header, tensor = stored[part]
        return _view(buffers[header.path], tensor)

    def compare(copy: memoryview | None) -> None:
        places = [stored[part] for part in entry.parts(name)]
        if checksum(_in_chunks(places, buffers, copy)) != entry.checksum:
            subject = f"tensor {name!r} of {subject_of(places[0][0])}"
            raise ModelError(subject, "is not what was written: its checksum differs", _CHANGED)

    check = OnceChecked(compare) if entry.checksum else None

    def decode() -> Tensor:
        if check is not None:
            check.ensure()
        parts = {part: view(part) for part in entry.parts(name)}
        try:
            return entry.decode(name, parts)
        except ValueError as error:
            subject = subject_of(stored[name][0])
            problem = f"hold a damaged tensor {name!r} ({error})"
            raise ModelError(subject, problem, DAMAGED) from error

    if entry.decoded:
        return LazyTensor(decode, entry.shape, TORCH_DTYPES[entry.dtype], check)
    return view(name) if check is None else CheckedTensor(view(name), check)


def _in_chunks(
    places: Sequence[Stored], buffers: Mapping[Path, Buffer], copy: memoryview | None
) -> Iterator[memoryview]:
    """Yield the bytes in these places, and copy each chunk while the processor still has it.

    Args:
        copy: where the bytes of a single place go.
    """
    for header, part in places:
        data = memoryview(buffers[header.path])[part.offset : part.offset + part.nbytes]
        for start in range(0, part.nbytes, _CHUNK):
            chunk = data[start : start + _CHUNK]
            yield chunk
            if copy is not None:
                copy[start : start + _CHUNK] = chunk
