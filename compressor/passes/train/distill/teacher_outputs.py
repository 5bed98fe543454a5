"""A teacher's outputs kept on disk: one row a sample, each with a checksum of its own.

A row without its checksum does not count, so neither a process killed while it writes nor a disk
that loses the last writes leaves anything that would be taken for a result.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.files import disk_errors, json_sha256, json_text, staging
from compressor.passes.train.job import Micro, as_tensors
from compressor.passes.train.recipe import Course
from compressor.types.tensors import Array
from compressor.types.training import Rows

_CHECKSUMS = "checksums.bin"
_KEY = "key.json"
_FORMAT = 1
_MARK = 1 << 32  # tells a checksum of zero from none


@dataclass(frozen=True)
class Field:
    """One of a teacher's outputs, with its shape and numpy dtype for one sample."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


class Page:
    """Memory-mapped arrays ``[samples, ...]``, of which some rows have been written.

    A page lies in a folder named after what its content depends on: the key, of JSON values, the
    fields of a row, and the number of rows.

    Raises:
        InputError: the disk is full.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any], fields: Sequence[Field], samples: int):
        self._fields = tuple(fields)
        self._samples = samples
        self._files = {f"{index}.bin": field for index, field in enumerate(fields)}
        self._files[_CHECKSUMS] = Field("checksums", (), "uint64")
        described = [[f.name, list(f.shape), f.dtype] for f in fields]
        whole = {"format": _FORMAT, "samples": samples, "fields": described, **key}
        self.folder = folder / f"teacher-{json_sha256(whole)[:32]}"
        if not self._is_whole():
            self._create(whole)
        self._arrays: list[Array] = [
            np.memmap(self.folder / name, field.dtype, "r", shape=(samples, *field.shape))
            for name, field in self._files.items()
        ]

    def _is_whole(self) -> bool:
        sizes = ((self.folder / n, self._samples * f.row_bytes) for n, f in self._files.items())
        return all(path.is_file() and path.stat().st_size == size for path, size in sizes)

    def _create(self, key: Mapping[str, Any]) -> None:
        """Make files without rows, all at once; another process may do the same."""
        with staging(self.folder.parent) as staged:
            page = staged / "page"
            page.mkdir()
            (page / _KEY).write_text(json_text(json.loads(json.dumps(key))), encoding="utf-8")
            for name, field in self._files.items():
                with (page / name).open("wb") as file:
                    file.truncate(self._samples * field.row_bytes)
            try:
                page.rename(self.folder)
            except OSError:
                if not self._is_whole():  # damaged; otherwise another process was faster
                    shutil.rmtree(self.folder)
                    page.rename(self.folder)

    def read(self, rows: Rows) -> dict[str, Array] | None:
        """Return rows by field, or ``None`` if one is missing or damaged."""
        *arrays, checksums = self._arrays
        sums = checksums[rows]
        if not sums.all():
            return None
        values = [np.asarray(array[rows]) for array in arrays]
        if not np.array_equal(_checksums(values), sums):
            return None
        return {field.name: value for field, value in zip(self._fields, values, strict=True)}

    def write(self, rows: Rows, values: Mapping[str, Array]) -> None:
        """Write rows to the files.

        Not through the mapping: a full disk is then an error with a message, instead of a signal
        that ends the process.

        Raises:
            InputError: the disk is full.
        """
        arrays = [np.ascontiguousarray(values[f.name], f.dtype) for f in self._fields]
        arrays.append(_checksums(arrays))
        with disk_errors(self.folder):
            for (name, field), array in zip(self._files.items(), arrays, strict=True):
                with (self.folder / name).open("r+b", buffering=0) as file:
                    for row, value in zip(rows, array, strict=True):
                        file.seek(int(row) * field.row_bytes)
                        _write_all(file, value.tobytes())


def _checksums(arrays: Sequence[Array]) -> NDArray[np.uint64]:
    sums = np.zeros(len(arrays[0]), np.uint64)
    for row in range(len(sums)):
        total = 0
        for array in arrays:
            total = zlib.crc32(array[row].tobytes(), total)
        sums[row] = total | _MARK
    return sums


def _write_all(file: Any, data: bytes) -> None:
    """Write everything: an unbuffered file may take a part only, as on a full disk."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


Teach: TypeAlias = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""From inputs to what the student is compared with, each ``[N, ...]``."""

_KEPT_UNASKED = 1 << 30  # bytes
_HELD_OUT, _SHARED = "held-out", "all epochs"


class TeacherOutputs:
    """A teacher's outputs by sample and step.

    If the transform draws no random numbers, a sample is the same in all epochs: the outputs of all
    samples are computed before the first step, in batches that depend on nothing else. If it does,
    or there is only one epoch, each step's outputs are computed in the step and kept for other
    trainings with the same order, such as one with another alpha or a resumed one. So outputs are
    the same bytes wherever they come from. ``identity`` is what they depend on beside the data. If
    ``cache`` is ``None``, they are kept if they are not too large. ``remark`` says what was done to
    the teacher.
    """

    def __init__(
        self,
        teach: Teach,
        identity: Mapping[str, Any],
        fields: Sequence[Field],
        course: Course,
        cache: bool | None = None,
        remark: str = "",
    ):
        self._remarks = (remark,) if remark else ()
        self._teach = teach
        self._identity = dict(identity)
        self._fields = {field.name: field for field in fields}
        self._course = course
        order, data = course.order, course.training.data
        again = not data.random and course.mixup is None  # samples are the same in each epoch
        self._shared = again and course.steps > order.steps_in_epoch
        pages = 1 if self._shared else ceil(course.steps / order.steps_in_epoch)
        self._bytes = pages * data.samples * (sum(field.row_bytes for field in fields) + 8)
        allowed = self._bytes <= _KEPT_UNASKED if cache is None else cache
        self._kept = allowed and all(field.row_bytes for field in fields)
        self._computed = self._read = 0
        self._page = lru_cache(maxsize=2)(self._open)

    def prepare(self, inputs: Sequence[str]) -> None:
        """Compute the outputs that are the same in all epochs and have not been kept yet.

        Raises:
            CompressorError: data cannot be read, the teacher does not run, or the disk is full.
        """
        course, ranks = self._course, self._course.training.ranks
        if not (self._kept and self._shared):
            return
        page, order = self._page(_SHARED), course.order
        blocks = [rows for rows, _ in order.blocks(order.trained, course.micro)]
        share = blocks[ranks.rank :: ranks.size]
        with course.training.stage("teacher outputs", len(share)) as advance:
            for done, block in enumerate(share, 1):
                if page.read(block) is None:
                    batch = course.training.data.batch(block, (order.seed,))
                    tensors = as_tensors(batch, len(block))
                    self._compute(block, {name: tensors[name] for name in inputs}, page)
                advance(done)
        ranks.wait()

    def of(self, micro: Micro, inputs: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Return the teacher's outputs for some samples, on the inputs' device.

        After the last step come validations.
        """
        course = self._course
        name = _SHARED if self._shared else f"epoch {step // course.order.steps_in_epoch}"
        name = _HELD_OUT if step >= course.steps else name
        # Samples of a program's own loop have no numbers to keep outputs under.
        page = self._page(name) if self._kept and len(micro.rows) else None
        kept = page.read(micro.rows) if page is not None else None
        if kept is None:
            return self._compute(micro.rows, inputs, page)
        self._read += len(micro.rows)
        device = next(iter(inputs.values())).device
        return {name: torch.from_numpy(array).to(device) for name, array in kept.items()}

    def notes(self) -> tuple[str, ...]:
        """Return what was done to the teacher, and where the outputs came from in all processes."""
        gathered = self._course.training.ranks.gathered((self._computed, self._read))
        computed, read = (sum(part) for part in zip(*gathered, strict=True))
        text = f"teacher outputs: {computed:,} samples computed, {read:,} read from the cache"
        if not self._kept:
            return (*self._remarks, f"{text}: it is off, {_size(self._bytes)} would be kept")
        return (*self._remarks, f"{text} of {_size(self._bytes)}")

    def _compute(
        self, rows: Rows, inputs: Mapping[str, Tensor], page: Page | None
    ) -> dict[str, Tensor]:
        outputs = self._teach(inputs)
        self._computed += len(rows)
        fits = all(tuple(t.shape[1:]) == self._fields[n].shape for n, t in outputs.items())
        if page is not None and fits:
            page.write(rows, {n: t.cpu().numpy() for n, t in outputs.items()})
        return outputs

    def _open(self, name: str) -> Page:
        course, order = self._course, self._course.order
        key: dict[str, Any] = {
            "teacher": self._identity,
            "data": course.training.data.digest,
            "page": name,
            "micro": course.micro,
            "held-out": order.held_out,
            "seed": order.seed,
        }
        if name != _SHARED:  # which rows are computed together, and the transform's numbers
            key |= {"batch": order.batch, "processes": order.parts, "whole": order.whole}
            key |= {} if course.mixup is None else {"mixup": course.mixup.alpha}
        fields = tuple(self._fields.values())
        return Page(course.training.cache, key, fields, course.training.data.samples)


def fields_of(outputs: Mapping[str, Tensor]) -> tuple[Field, ...]:
    """Return the fields of a teacher's outputs for some samples."""
    return tuple(
        Field(name, tuple(t.shape[1:]), np.dtype(str(t.dtype).removeprefix("torch.")).name)
        for name, t in outputs.items()
    )


def _size(number: int) -> str:
    size, units = float(number), ["B", "kB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"
