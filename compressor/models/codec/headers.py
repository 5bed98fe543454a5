"""The header of a safetensors file, and the index of several, read and written.

The format: https://huggingface.co/docs/safetensors, "Format". Eight bytes of length, a JSON object
that describes each tensor, then the data, without holes and without overlaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch

from compressor.errors import ModelError
from compressor.files import json_text, read_json, strict_json

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""Element types of safetensors that torch computes with, one element at a time."""

STORED_AS: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""What safetensors calls a torch dtype."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

METADATA = "__metadata__"
"""The entry of a header that is no tensor."""

PAIRS = "F4"
"""Floats of four bits; safetensors counts elements, two of which share a byte."""

POINTER = b"version https://git-lfs"
"""How the small file begins that Git LFS leaves in place of one that was not fetched."""

LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself
_MOST_AXES = 64  # the limit of torch
_ALIGNMENT = 8
_LENGTH = 8  # bytes that say how long the header is
_DAMAGED = "the file is truncated or damaged; fetch it again"
_KEYS = {"dtype", "shape", "data_offsets"}


class TensorHeader(NamedTuple):
    """Where one tensor lies: a tuple, because a file may hold thousands and must open fast.

    ``dtype`` is safetensors' name of the element type, ``offset`` the tensor's first byte in the
    file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ShardHeader:
    """A safetensors file: its whole size, its tensors in the order of the data, and its notes."""

    path: Path
    nbytes: int
    tensors: Mapping[str, TensorHeader]
    metadata: Mapping[str, str]


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of a file.

    Example:
        >>> read_header(Path("model.safetensors")).tensors["fc.weight"].shape
        (10, 64)

    Raises:
        ModelError: the file is cut, is something else, or describes its data wrongly.
    """
    subject = f"checkpoint {str(path)!r}"
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(len(POINTER))
            if start == POINTER:
                raise pointer_error(subject)
            length = _header_length(start, size, subject)
            stream.seek(_LENGTH)
            text = stream.read(length)
    except OSError as error:
        raise ModelError(
            subject, f"cannot be read ({error.strerror})", "check its permissions"
        ) from error
    return parse_header(path, text, size)


def pointer_error(subject: str) -> ModelError:
    """Return the error for a file that Git LFS did not fetch."""
    return ModelError(
        subject, "is a Git LFS pointer, not the file itself", "fetch it: git lfs pull"
    )


def _header_length(start: bytes, size: int, subject: str) -> int:
    if len(start) < _LENGTH:
        _fail(subject, f"it has {size} bytes, a safetensors file has at least {_LENGTH}")
    length = int.from_bytes(start[:_LENGTH], "little")
    if length > LONGEST_HEADER:
        _fail(subject, f"its header would be {length:,} bytes long, {LONGEST_HEADER:,} are allowed")
    if length > size - _LENGTH:
        _fail(subject, f"its header has {length:,} bytes, the whole file {size:,}")
    return length


def parse_header(path: Path, text: bytes, size: int) -> ShardHeader:
    """Check the JSON of a header against the size of its file.

    Args:
        path: the file, for messages and for the result.
        text: the JSON object, padding included.
        size: bytes of the whole file.

    Raises:
        ModelError: it is not JSON, names something twice, has unknown or negative entries, or its
            offsets overlap, leave holes, leave the file, or disagree with dtype and shape.
    """
    subject = f"checkpoint {str(path)!r}"
    content = strict_json(text, subject, "cannot be read")
    if not isinstance(content, dict) or not text.startswith(b"{"):
        _fail(subject, "its header is not a JSON object")
    metadata = content.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _fail(subject, "its __metadata__ is not a mapping of names to text")
    start = _LENGTH + len(text)
    tensors = [_tensor(name, value, start, subject) for name, value in content.items()]
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps what lies before it" if tensor.offset < end else "leaves a hole"
            _fail(
                subject,
                f"tensor {tensor.name!r} {what}: it starts at byte {tensor.offset - start} of the "
                f"data, not at {end - start}",
            )
        end += tensor.nbytes
    if end != size:
        _fail(
            subject, f"its header describes {end - start:,} bytes of data, it has {size - start:,}"
        )
    return ShardHeader(path, size, {t.name: t for t in tensors}, metadata)


def _tensor(name: str, value: Any, start: int, subject: str) -> TensorHeader:
    if not isinstance(value, dict) or value.keys() != _KEYS:
        _fail(subject, f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or (dtype not in DTYPES and dtype != PAIRS):
        raise ModelError(
            subject,
            f"tensor {name!r} has the unknown dtype {dtype!r}",
            "cast it to one of " + ", ".join(DTYPES),
        )
    if not _naturals(shape) or len(shape) > _MOST_AXES:
        _fail(subject, f"tensor {name!r} has the shape {_short(shape)}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(subject, f"tensor {name!r} has the offsets {_short(offsets)}")
    bits = prod(shape) * (4 if dtype == PAIRS else DTYPES[dtype].itemsize * 8)
    nbytes = offsets[1] - offsets[0]
    if bits != nbytes * 8:
        _fail(
            subject,
            f"tensor {name!r} has {nbytes:,} bytes, {dtype}{_short(shape)} takes {bits // 8:,}",
        )
    return TensorHeader(name, dtype, tuple(shape), start + offsets[0], nbytes)


def _naturals(value: Any) -> bool:
    """Whether a value is a list of whole numbers that a file system could count."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _fail(subject: str, problem: str) -> NoReturn:
    raise ModelError(subject, f"cannot be read ({problem})", _DAMAGED)


def read_index(index: Path) -> dict[str, str]:
    """Return the name of the shard that holds each tensor.

    Raises:
        ModelError: the index is malformed, or names a file that is missing or lies elsewhere.
    """
    subject = f"index {str(index)!r}"
    content = read_json(index, subject, "is not a safetensors index")
    mapping = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(mapping, dict) or not mapping:
        raise ModelError(subject, "is not a safetensors index", "write it again")
    shards = {name: str(shard) for name, shard in mapping.items()}
    for shard in sorted(set(shards.values())):
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise ModelError(
                subject,
                f"names a shard outside its folder, {shard!r}",
                "keep shards beside the index",
            )
        if not (index.parent / shard).is_file():
            raise ModelError(subject, f"names a missing shard {shard!r}", "fetch it")
    return shards


def check_index(path: Path, index: Mapping[str, str], held: Mapping[str, str], remedy: str) -> None:
    """Compare an index with the names of the shards that hold each tensor.

    Raises:
        ModelError: they differ.
    """
    subject = f"index {str(path)!r}"
    for tensor, shard in index.items():
        if tensor not in held:
            raise ModelError(
                subject, f"places {tensor!r} in {shard!r}, which does not hold it", remedy
            )
        if Path(shard) != Path(held[tensor]):
            raise ModelError(
                subject, f"places {tensor!r} in {shard!r}, it is in {held[tensor]!r}", remedy
            )
    for tensor, shard in held.items():
        if tensor not in index:
            raise ModelError(subject, f"does not list {tensor!r}, which {shard!r} holds", remedy)


def index_text(shards: Mapping[str, Mapping[str, int]]) -> bytes:
    """Return the text of an index.

    Args:
        shards: the bytes of each tensor in a file, by the files' names.
    """
    places = {name: file for file, sizes in shards.items() for name in sizes}
    total = sum(size for sizes in shards.values() for size in sizes.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json_text(content).encode()


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


SizedT = TypeVar("SizedT", bound=_Sized)


def in_shards(tensors: Iterable[SizedT], limit: int | None) -> list[list[SizedT]]:
    """Divide tensors among shards, in their order.

    Args:
        limit: bytes of the tensors in a shard; a larger tensor has a shard of its own. ``None``
            for a single shard.
    """
    shards: list[list[SizedT]] = [[]]
    size = 0
    for tensor in tensors:
        if limit is not None and shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def shard_names(count: int) -> list[str]:
    """Return the file names of so many shards."""
    if count == 1:
        return [WEIGHTS]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


class Described(NamedTuple):
    """What a header says of a tensor, before the tensor has a place.

    ``dtype`` is safetensors' name of the element type; tensors are ordered by the ``bits`` of an
    element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bits: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """A file before it is written: the bytes before the data, the tensors' offsets, its size."""

    header: bytes
    offsets: Mapping[str, int]
    nbytes: int


def layout(tensors: Iterable[Described], metadata: Mapping[str, str], room: int = 0) -> Layout:
    """Place tensors in a file: wide elements first, so that all are aligned, then by name.

    The library's own writer wants all tensors in memory. With the places known beforehand, a model
    larger than memory is written from tensors that are computed one by one.

    Args:
        room: bytes that the header takes at least; it is padded with spaces.
    """
    content: dict[str, object] = {METADATA: dict(metadata)}
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
