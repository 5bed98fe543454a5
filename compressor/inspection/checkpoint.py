"""Inspect checkpoints: files of named tensors without a graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch

from compressor.inspection.contents import ModelContents, TensorRow
from compressor.inspection.quantized import (
    PACKED,
    SHAPE,
    Quantization,
    read_quantization,
    role_of,
)
from compressor.inspection.tensors import Counts, count_elements, not_finite_note, percent
from compressor.models.checkpoint.folder import read_shards
from compressor.models.checkpoint.headers import DTYPES, PAIRS, ShardHeader
from compressor.models.checkpoint.read_ahead import ReadAhead
from compressor.models.checkpoint.reading import FileTensor, MappedFile
from compressor.models.checkpoint.weight_files import read_weights, weight_file_paths
from compressor.models.executor.dtypes import natural_type
from compressor.progress import Progress

_BLOCK = 8 << 20  # bytes looked at together, so that memory does not grow with the tensor


@dataclass(frozen=True)
class _Found:
    """One tensor, counted."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    counts: Counts

    @property
    def elements(self) -> int:
        return prod(self.shape)


def inspect_checkpoint(path: Path, progress: Progress) -> ModelContents:
    """Describe a weight file or a directory of them; tensors are streamed.

    Raises:
        SpecError: it holds no weight files.
        ModelError: a file is cut or not a weight file.
    """
    files = weight_file_paths(path)
    sizes = {f.name: f.stat().st_size for f in files}
    quantization = read_quantization(path if path.is_dir() else path.parent)
    streamed = files[0].suffix == ".safetensors"
    tensors: list[_Found] = []
    with progress.stage("read tensors", sum(sizes.values()) if streamed else None) as advance:
        done = 0
        for found in _in_shards(path) if streamed else _in_pickle(path):
            tensors.append(found)
            done += found.nbytes
            advance(done)
    shapes = _shapes(path) if streamed and quantization.groups else {}
    rows: list[TensorRow] = []
    weights = zeros = known = 0
    for found in tensors:
        rows.append(_row(found, quantization))
        own = _weights(found, quantization, shapes)
        weights += own
        if own == found.elements:
            zeros, known = zeros + found.counts.zeros, known + own
    return ModelContents(
        kind="checkpoint",
        path=str(path),
        files=sizes,
        tensors=tuple(rows),
        parameters=weights,
        zeros=percent(zeros, known),
        quantization=quantization.words,
        notes=tuple(not_finite_note(f.name, n) for f in tensors if (n := f.counts.not_finite)),
    )


def headers(path: Path) -> tuple[int, int]:
    """Return the number of tensors and of parameters in a checkpoint, reading little of it.

    Raises:
        SpecError: it holds no weight files.
        ModelError: a file is cut or not a weight file.
    """
    tensors = read_weights(path, headers_only=True)
    return len(tensors), sum(t.numel() for t in tensors.values() if t.is_floating_point())


def _in_pickle(path: Path) -> Iterator[_Found]:
    for name, tensor in read_weights(path).items():
        flat = tensor.detach().reshape(-1)
        step = max(1, _BLOCK // tensor.itemsize)
        counts = sum(
            (count_elements(flat[at : at + step]) for at in range(0, flat.numel(), step)), Counts()
        )
        yield _Found(name, tuple(tensor.shape), _dtype_name(tensor.dtype), tensor.nbytes, counts)


def _in_shards(path: Path) -> Iterator[_Found]:
    for shard in read_shards(path):
        yield from _in_shard(shard)


def _in_shard(shard: ShardHeader) -> Iterator[_Found]:
    """Count every tensor of a file, block by block, with the disk a little ahead."""
    file = MappedFile(shard.path, shard.nbytes)
    flat = {
        # As one row of bytes or elements, which can be cut anywhere.
        name: FileTensor(
            file,
            header._replace(dtype="U8", shape=(header.nbytes,))
            if header.dtype == PAIRS
            else header._replace(shape=(prod(header.shape),)),
        )
        for name, header in shard.tensors.items()
    }
    cuts = {name: _cuts(tensor) for name, tensor in flat.items()}
    spans = [flat[name].span(*cut) for name, own in cuts.items() for cut in own]
    with ReadAhead(spans) as ahead:
        for name, header in shard.tensors.items():
            pairs = header.dtype == PAIRS
            count = partial(count_elements, pairs=pairs)
            counts = Counts()
            for start, stop in cuts[name]:
                with ahead.using(flat[name].span(start, stop)):
                    counts += count(flat[name].rows(start, stop))
            dtype = "float4_e2m1fn" if pairs else _dtype_name(DTYPES[header.dtype])
            yield _Found(name, header.shape, dtype, header.nbytes, counts)


def _cuts(tensor: FileTensor) -> list[tuple[int, int]]:
    (count,) = tensor.header.shape
    step = _BLOCK // tensor.dtype.itemsize
    return [(start, min(start + step, count)) for start in range(0, count, step)]


def _dtype_name(dtype: torch.dtype) -> str:
    return natural_type(dtype).numpy().name


def _row(found: _Found, quantization: Quantization) -> TensorRow:
    role = role_of(found.name)
    module, _, last = found.name.rpartition(".")
    group = quantization.group_of(module) if last in PACKED else None
    packed = last in PACKED
    return TensorRow(
        name=found.name,
        shape=found.shape,
        dtype=found.dtype,
        bytes=found.nbytes,
        # A word of packed codes that is 0 says nothing about weights.
        zeros=None if packed or role else percent(found.counts.zeros, found.elements),
        quantization=group.words if group is not None else role.replace("helper", ""),
    )


def _weights(found: _Found, quantization: Quantization, shapes: dict[str, tuple[int, ...]]) -> int:
    """Return how many weights a tensor holds: none, if it is a scale or a counter."""
    if role_of(found.name):
        return 0
    module, _, last = found.name.rpartition(".")
    group = quantization.group_of(module)
    if last in PACKED:
        if module in shapes:
            return prod(shapes[module])
        return found.nbytes * 8 // group.bits if group is not None and group.bits else 0
    codes = group is not None and group.bits is not None and last == "weight"
    floating = "float" in found.dtype
    return found.elements if codes or floating else 0


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes that lie beside packed weights, by module."""
    shapes = {}
    for shard in read_shards(path):
        file = MappedFile(shard.path, shard.nbytes)
        for name, header in shard.tensors.items():
            module, _, last = name.rpartition(".")
            if last == SHAPE and header.dtype in ("I64", "I32") and len(header.shape) == 1:
                shapes[module] = tuple(int(n) for n in FileTensor(file, header)())
    return shapes
