"""The header of a safetensors file: read and checked before any of the data is touched.

The format: https://huggingface.co/docs/safetensors, "Format". Eight bytes of length, a JSON object
that describes each tensor, then the data, without holes and without overlaps.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from compressor.errors import ModelError

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

PAIRS = "F4"
"""Floats of four bits; safetensors counts elements, two of which share a byte."""

LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library itself."""

POINTER = b"version https://git-lfs"
"""How the small file begins that Git LFS leaves in place of one that was not fetched."""

MOST_AXES = 64
"""The limit of torch."""

_LENGTH = 8
_DAMAGED = "the file is cut or damaged; fetch it again"
_KEYS = {"dtype", "shape", "data_offsets"}


class TensorHeader(NamedTuple):
    """Where one tensor lies; a tuple, since there are thousands and opening takes milliseconds.

    Attributes:
        name: the tensor.
        dtype: its element type, as safetensors calls it.
        shape: its shape, in elements.
        offset: the byte of the file at which it starts.
        nbytes: how many bytes it takes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ShardHeader:
    """What a safetensors file says of itself.

    Attributes:
        path: the file.
        nbytes: its size, header included.
        tensors: by name, in the order of the data.
        metadata: its notes.
    """

    path: Path
    nbytes: int
    tensors: Mapping[str, TensorHeader]
    metadata: Mapping[str, str]


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of a file.

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
    """Say that a file was not fetched."""
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
    metadata = content.pop("__metadata__", {})
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
    if not _naturals(shape) or len(shape) > MOST_AXES:
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


def read_json(path: Path, subject: str, problem: str, *, constants: bool = False) -> Any:
    """Parse a JSON file; the arguments and errors are those of :func:`strict_json`.

    Raises:
        ModelError: it cannot be read, or is something else.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ModelError(
            subject, f"cannot be read ({error.strerror})", "check its permissions"
        ) from error
    return strict_json(text, subject, problem, constants=constants)


def strict_json(text: bytes, subject: str, problem: str, *, constants: bool = False) -> Any:
    """Parse JSON that names nothing twice.

    Args:
        text: UTF-8.
        subject: what the message is about.
        problem: what the message says of it, such as ``cannot be read``; the reason follows.
        constants: allow NaN and Infinity, which are not JSON.

    Raises:
        ModelError: it is something else.
    """
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_once,
            parse_constant=float if constants else _no_constant,
        )
        if b"\\u" in text:  # half of a surrogate pair would fail later, where it is written
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0][:160]
        raise ModelError(
            subject, f"{problem} (as JSON: {reason})", "the file is cut or damaged"
        ) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it names {twice!r} twice")
    return content


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _naturals(value: Any) -> bool:
    """Tell whether a value is a list of whole numbers that a file system could count."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _fail(subject: str, problem: str) -> NoReturn:
    raise ModelError(subject, f"cannot be read ({problem})", _DAMAGED)
