"""Write a compressed model: the form of each tensor chosen and encoded, beside ``model.json``.

The graph alone decides for narrow codes. Zeros are counted when a weight is read, so sparse forms
are chosen while it is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import onnx_ir as ir
import torch

from compressor import __version__
from compressor.errors import ArtifactError, SpecError
from compressor.graph.skeleton import Skeleton, graph_as_json
from compressor.graph.values import INTEGER_CODES, tensor_spec
from compressor.models.codec.bit_stream import pack_bits
from compressor.models.codec.forms import (
    DESCRIPTION,
    DIGEST,
    FILES,
    FORMAT,
    PLACE_BITS,
    SCHEMA,
    SIGNED,
    STORED,
    WRITER,
    Bitmask,
    Bits,
    Entry,
    NOfM,
)
from compressor.models.codec.headers import (
    DTYPES,
    INDEX,
    METADATA,
    WEIGHTS,
    Described,
    in_shards,
    index_text,
    layout,
    shard_names,
)
from compressor.models.codec.sparse import GROUP, bitmask, fits_groups, group_values
from compressor.types.proofs import NO_CHECKSUM, NO_HASH, checksum
from compressor.types.tensors import Array

_SIDE_BITS = 1  # masks and indices come last, so that wider elements stay aligned
_LEAST_ELEMENTS = 1024  # of a tensor that may become sparse: smaller ones are not worth a mask
_LEAST_AXES = 2
_WORTH = 0.9  # of the bytes at most, so that decoding pays
_REGULAR = 1.05  # times the bytes of a mask that groups may take: they decode faster
_FAULT = "the pass that made it is at fault; report it"


@dataclass(frozen=True)
class Planned:
    """A tensor before it is written.

    Attributes:
        entry: how it is stored unless it turns out to be sparse.
        sparse: the names of mask and of indices, if it may be stored as sparse.
    """

    name: str
    entry: Entry
    sparse: tuple[str, str] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes, those of all elements where it may be sparse."""
        parts = self.entry.parts(self.name).values()
        return sum(prod(part.shape or ()) * DTYPES[part.dtype].itemsize for part in parts)


class GraphPlan:
    """The files of a compressed model before they are written; no tensor is read.

    Args:
        model: the graph as it is; its inputs and outputs are described.
        parts: the graph that is stored, and its tensors.
        name: a note in the files.
        sparse: tensors with many zeros may be stored as sparse.
        max_shard_size: bytes of the tensors in a file before zeros are left out; ``None`` for a
            single file. A larger tensor has a file of its own.

    Raises:
        SpecError: safetensors does not hold a tensor's element type.
    """

    def __init__(
        self,
        model: ir.Model,
        parts: Skeleton,
        name: str,
        sparse: bool,
        max_shard_size: int | None,
    ):
        self.parts = parts
        self._model = model
        self._name = name
        shards = in_shards(_planned(parts, sparse), max_shard_size)
        self._shards = dict(zip(shard_names(len(shards)), shards, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of all files; those of sparse tensors are counted in full."""
        shards = self._shards.items()
        size = sum(self._room(tensors) + sum(t.nbytes for t in tensors) for _, tensors in shards)
        if len(shards) > 1:
            size += len(
                index_text({f: {t.name: t.nbytes for t in tensors} for f, tensors in shards})
            )
        entries = {
            t.name: replace(t.entry, checksum=NO_CHECKSUM) for _, tensors in shards for t in tensors
        }
        names = (*self._shards, INDEX) if len(shards) > 1 else self._shards
        return size + len(self._description(entries, dict.fromkeys(names, NO_HASH)))

    def write(self, directory: Path) -> tuple[Path, ...]:
        """Write the files, evaluating one tensor after another, each once.

        Returns:
            All files, the main one first: the weights, or their index.

        Raises:
            ArtifactError: a tensor is not what its type and shape say.
        """
        entries: dict[str, Entry] = {}
        stored: dict[str, list[Described]] = {}
        hashes: dict[str, str] = {}
        for file, tensors in self._shards.items():
            with (directory / file).open("wb") as stream:
                hashing = _Hashing(stream)
                stored[file] = self._write_data(hashing, tensors, entries)
            (header,) = self._headers({file: stored[file]}, NO_HASH).values()
            hashing.digest.update(header)
            hashes[file] = hashing.digest.hexdigest()
        paths = [directory / file for file in self._shards]
        if len(paths) > 1:
            sizes = {file: {d.name: d.nbytes for d in tensors} for file, tensors in stored.items()}
            index = index_text(sizes)
            hashes[INDEX] = hashlib.sha256(index).hexdigest()
            (directory / INDEX).write_bytes(index)
            paths.insert(0, directory / INDEX)
        description = self._description(entries, hashes)
        digest = hashlib.sha256(description).hexdigest()
        for file, header in self._headers(stored, digest).items():
            with (directory / file).open("r+b") as stream:
                stream.write(header)
        (directory / DESCRIPTION).write_bytes(description)
        return (*paths, directory / DESCRIPTION)

    def _headers(self, stored: Mapping[str, Sequence[Described]], digest: str) -> dict[str, bytes]:
        """Return the headers of files that hold these tensors; the digest is of ``model.json``."""
        metadata = self._metadata(digest)
        return {
            file: layout(described, metadata, self._room(self._shards[file])).header
            for file, described in stored.items()
        }

    def _room(self, tensors: Iterable[Planned]) -> int:
        """Return the bytes before the data: enough for the header whatever is sparse."""
        described: list[Described] = []
        for tensor in tensors:
            described += _described(tensor.name, tensor.entry, {})
            if tensor.sparse is not None:
                longest = max(tensor.sparse, key=lambda name: len(name.encode()))
                described.append(Described(longest, "U8", (tensor.nbytes,), 1, 0))
        return len(layout(described, self._metadata(NO_HASH)).header)

    def _description(self, entries: Mapping[str, Entry], hashes: Mapping[str, str]) -> bytes:
        """Return ``model.json`` for tensors that are stored so, in files with these hashes."""
        document = {
            "format": FORMAT,
            "schema": SCHEMA,
            "inputs": [_spec(value) for value in self._model.graph.inputs],
            "outputs": [_spec(value) for value in self._model.graph.outputs],
            "weights": INDEX if len(self._shards) > 1 else WEIGHTS,
            FILES: dict(hashes),
            "tensors": {name: entries[name].as_json() for name in self.parts.tensors},
            "graph": graph_as_json(self.parts.proto),
        }
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
        return text.encode() + b"\n"

    def _metadata(self, digest: str) -> dict[str, str]:
        """Return the notes in the files; the digest is that of ``model.json``."""
        return {"format": FORMAT, "name": self._name, DIGEST: digest, WRITER: __version__}

    def _write_data(
        self, hashing: _Hashing, tensors: Sequence[Planned], entries: dict[str, Entry]
    ) -> list[Described]:
        """Write all but the header in the order of its layout, and note how tensors are stored."""
        described: list[Described] = []
        beside: dict[str, tuple[int, int]] = {}
        hashing.stream.seek(self._room(tensors))
        with TemporaryFile(dir=Path(hashing.stream.name).parent) as later:
            for tensor in sorted(tensors, key=lambda t: (-t.entry.width, t.name)):
                entry, parts = _encoded(tensor, self.parts.tensors[tensor.name])
                summed = checksum(part.data for part in parts.values())
                entries[tensor.name] = replace(entry, checksum=summed)
                described += _described(tensor.name, entry, parts)
                for name, data in parts.items():
                    if name == tensor.name:
                        hashing.write(data.data)
                    else:
                        beside[name] = later.tell(), data.nbytes
                        later.write(data.data)
            for name in sorted(beside):
                start, length = beside[name]
                later.seek(start)
                hashing.write(later.read(length))
        return described


class _Hashing:
    """A file that is written, and the hash of what is."""

    def __init__(self, stream: IO[bytes]):
        self.stream = stream
        self.digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self.digest.update(data)
        self.stream.write(data)


def _described(name: str, entry: Entry, values: Mapping[str, Array]) -> Iterator[Described]:
    """Describe the parts of a tensor for the header.

    ``values`` are the elements of its parts by name, for parts whose shape only they tell.
    """
    for part_name, part in entry.parts(name).items():
        shape = values[part_name].shape if part.shape is None else part.shape
        bits = entry.width if part_name == name else _SIDE_BITS
        nbytes = prod(shape) * DTYPES[part.dtype].itemsize
        yield Described(part_name, part.dtype, shape, bits, nbytes)


def _spec(value: ir.Value) -> dict[str, Any]:
    spec = tensor_spec(value)
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}


def _planned(parts: Skeleton, sparse: bool) -> Iterator[Planned]:
    """Choose the forms of a graph's tensors, except those that depend on the values.

    Raises:
        SpecError: safetensors does not hold a tensor's element type or its name.
    """
    taken = set(parts.tensors)
    for name, tensor in parts.tensors.items():
        if name == METADATA:
            raise SpecError(
                f"tensor {name!r}",
                "has the name under which safetensors holds a file's metadata",
                "rename it, or leave out this export",
            )
        if tensor.dtype not in STORED:
            raise SpecError(
                f"tensor {name!r}",
                f"is {tensor.dtype.name.lower()}, which safetensors cannot store",
                "cast it to another type, or leave out this export",
            )
        entry = Entry(tensor.dtype, tuple(int(d) for d in tensor.shape.numpy()))
        width = parts.widths.get(name, entry.width)
        if tensor.dtype in INTEGER_CODES and width < entry.width:
            entry = replace(entry, form=Bits(width))
        names = None
        if sparse and _may_be_sparse(entry):
            names = (_free(f"{name}.mask", taken), _free(f"{name}.indices", taken))
        yield Planned(name, entry, names)


def _may_be_sparse(entry: Entry) -> bool:
    numbers = not entry.decoded and entry.dtype not in (ir.DataType.BOOL, ir.DataType.COMPLEX64)
    return numbers and len(entry.shape) >= _LEAST_AXES and entry.count >= _LEAST_ELEMENTS


def _free(name: str, taken: set[str]) -> str:
    """Return a name that no tensor has, and take it."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _encoded(planned: Planned, tensor: ir.TensorProtocol) -> tuple[Entry, dict[str, Array]]:
    """Evaluate a tensor and bring it into the smallest form that fits.

    Returns:
        How it is stored, and the elements of its parts by name, its own first.

    Raises:
        ArtifactError: it has not the bytes that its type and shape take, or wider codes than the
            graph says.
    """
    name, entry = planned.name, planned.entry
    if isinstance(entry.form, Bits):
        return entry, {name: _narrow(name, entry, tensor)}
    data = tensor.tobytes()
    if len(data) != tensor.nbytes:
        raise ArtifactError(
            f"tensor {name!r}",
            f"has {len(data)} bytes, its type and shape take {tensor.nbytes}",
            _FAULT,
        )
    smaller = None
    if planned.sparse is not None:
        elements = np.frombuffer(data, f"<u{entry.width // 8}")
        smaller = _sparse(name, entry, planned.sparse, elements)
    return smaller or (entry, {name: np.frombuffer(data, np.uint8)})


def _narrow(name: str, entry: Entry, tensor: ir.TensorProtocol) -> Array:
    signed = entry.dtype in SIGNED
    codes = np.asarray(tensor.numpy()).astype(np.int8 if signed else np.uint8)
    low, span = (-(1 << entry.width - 1) if signed else 0), 1 << entry.width
    if (
        codes.shape != entry.shape
        or codes.min(initial=low) < low
        or codes.max(initial=low) >= low + span
    ):
        raise ArtifactError(
            f"tensor {name!r}",
            f"is {list(codes.shape)} with codes from {codes.min(initial=0)} to "
            f"{codes.max(initial=0)}, not {list(entry.shape)} of {entry.width} bits",
            _FAULT,
        )
    return pack_bits(torch.from_numpy(codes), entry.width).numpy()


def _sparse(
    name: str, entry: Entry, beside: tuple[str, str], elements: Array
) -> tuple[Entry, dict[str, Array]] | None:
    """Store a tensor as sparse if that is smaller.

    Args:
        beside: the names of its mask and of its indices.
        elements: all of them, unsigned integers ``[count]``.
    """
    mask, indices = beside
    size, count = elements.itemsize, int(np.count_nonzero(elements))
    masked = count * size + elements.size // 8
    best = min(masked * _REGULAR, elements.nbytes * _WORTH)
    for n in (1, 2):
        kept = elements.size // GROUP * n
        if count > kept or kept * size + kept * PLACE_BITS // 8 > best:
            continue
        # N:M weights have their groups along the input channels, which come second or first.
        for axis in (axis for axis in (1, 0) if entry.shape[axis] % GROUP == 0):
            moved = np.moveaxis(elements.reshape(entry.shape), axis, -1).reshape(-1, GROUP)
            if fits_groups(moved, n):
                values, places = group_values(moved, n)
                stored = pack_bits(torch.from_numpy(places), PLACE_BITS).numpy()
                return replace(entry, form=NOfM(n, axis, indices)), {name: values, indices: stored}
    if masked > elements.nbytes * _WORTH:
        return None
    bits, values = bitmask(elements)
    return replace(entry, form=Bitmask(mask)), {name: values, mask: bits}
