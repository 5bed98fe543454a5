"""Inspect GGUF files: metadata, and tensors in blocks; llama.cpp's library is not needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from compressor.exporters.gguf.header import Scalar, TensorEntry, ValueList, read_header
from compressor.lab.inspect.contents import (
    Counts,
    ModelContents,
    TensorRow,
    count_elements,
    not_finite_note,
    parts_of,
    percent,
)
from compressor.models.checkpoint.reading import MappedFile
from compressor.progress import Progress

_PLAIN: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
}


def inspect_gguf(path: Path, progress: Progress) -> ModelContents:
    """Describe a GGUF file; zeros are counted in plain numbers, and not in blocks of codes.

    Raises:
        ModelError: it is not a GGUF file, or is cut or damaged.
    """
    header = read_header(path)
    file = MappedFile(path, header.nbytes)
    rows: list[TensorRow] = []
    notes: list[str] = []
    weights = zeros = counted = coded = code_bytes = 0
    with progress.stage("read tensors", sum(t.nbytes for t in header.tensors)) as advance:
        done = 0
        for tensor in header.tensors:
            elements, counts = prod(tensor.shape), _counted(file, tensor)
            whole = tensor.kind in _PLAIN and not _PLAIN[tensor.kind].is_floating_point
            weights += 0 if whole else elements
            if counts is None:
                coded, code_bytes = coded + elements, code_bytes + tensor.nbytes
            elif not whole:
                zeros, counted = zeros + counts.zeros, counted + elements
            if counts is not None and counts.not_finite:
                notes.append(not_finite_note(tensor.name, counts.not_finite))
            rows.append(_row(tensor, counts))
            done += tensor.nbytes
            advance(done)
    return ModelContents(
        kind="GGUF file",
        path=str(path),
        files={path.name: header.nbytes},
        tensors=tuple(rows),
        parameters=weights,
        zeros=percent(zeros, counted),
        quantization=f"{_bits(code_bytes, coded)} in {coded:,} of {weights:,} weights"
        if coded
        else "",
        notes=tuple(notes),
        metadata={key: _shown(value) for key, value in header.metadata.items()},
    )


def _counted(file: MappedFile, tensor: TensorEntry) -> Counts | None:
    dtype = _PLAIN.get(tensor.kind)
    if dtype is None:
        return None
    counts = Counts()
    for start, stop in parts_of(prod(tensor.shape), dtype.itemsize):
        place = tensor.start + start * dtype.itemsize
        counts += count_elements(file.tensor(dtype, (stop - start,), place))
    return counts


def _row(tensor: TensorEntry, counts: Counts | None) -> TensorRow:
    elements = prod(tensor.shape)
    return TensorRow(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.kind,
        bytes=tensor.nbytes,
        zeros=None if counts is None else percent(counts.zeros, elements),
        quantization=_bits(tensor.nbytes, elements) if counts is None and elements else "",
    )


def _bits(nbytes: int, elements: int) -> str:
    return f"{nbytes * 8 / elements:.4g} bits"


def _shown(value: Scalar | ValueList) -> Scalar | list[Scalar]:
    """Return a value as JSON has it; of a long array, how many values it has."""
    if isinstance(value, ValueList):
        if len(value.first) < value.count:
            return f"{value.count:,} values"
        return [_plain(each) for each in value.first]
    return _plain(value)


def _plain(value: Scalar) -> Scalar:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
