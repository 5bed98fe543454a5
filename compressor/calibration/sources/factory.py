"""Batches from a function of the user's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from compressor.calibration.sources.foreign import check_batch, iterate
from compressor.calibration.sources.regroup import cut, length, regroup
from compressor.errors import DataError
from compressor.types.data import SourceInfo
from compressor.types.tensors import Batch, TensorSpec

_Form = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class FactorySource:
    """Batches that a function makes, the same ones at each call, in batches of any size.

    Attributes:
        make: returns an iterable of batches, arrays by name with the samples as first axis.
        name: how errors name the function, such as ``pkg.mod:fn``.
        fields: names in the model to names in its batches; all if there are none.
        samples: use at most so many samples.
    """

    make: Callable[[], Iterable[Batch]]
    name: str
    fields: Mapping[str, str] = field(default_factory=dict)
    samples: int | None = None

    @property
    def subject(self) -> str:
        """How errors name this source."""
        return f"data factory '{self.name}'"

    def info(self) -> SourceInfo:
        """Describe the first batch; how many samples there are is unknown.

        Raises:
            DataError: the function raised, or made something else than batches.
        """
        for batch in self._made():
            specs = (
                TensorSpec(name, ("batch", *array.shape[1:]), array.dtype.name)
                for name, array in batch.items()
            )
            return SourceInfo(None, tuple(specs))
        raise DataError(self.subject, "made no samples", "yield at least one batch")

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield batches of ``size`` samples, at most ``limit`` in all; raises as ``info`` does."""
        limits = [most for most in (self.samples, limit) if most is not None]
        return regroup(self._made(), size, min(limits, default=None))

    def digest(self) -> str:
        """Return a SHA-256 of the samples themselves, however they are batched; made once."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        hashes: dict[str, hashlib._Hash] = {}
        most = self.samples
        for batch in self._made():
            used = batch if most is None else cut(batch, 0, most)
            for name, array in used.items():
                start = f"{name} {array.dtype.str} {array.shape[1:]} ".encode()
                own = hashes.setdefault(name, hashlib.sha256(start))
                own.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            most = None if most is None else most - length(used)
            if most == 0:
                break
        return hashlib.sha256(b"".join(h.digest() for _, h in sorted(hashes.items()))).hexdigest()

    def _made(self) -> Iterator[Batch]:
        """Yield the batches with the fields' names, empty ones left out, checked to be alike."""
        form: _Form = {}
        for value in iterate(self.subject, self.make):
            batch = self._renamed(check_batch(self.subject, value))
            if not length(batch):
                continue
            objects = [name for name, array in batch.items() if array.dtype.hasobject]
            if objects:
                raise DataError(
                    self.subject,
                    f"made {objects[0]!r} of Python objects",
                    "give bool, numbers or fixed-length text",
                )
            own = {name: (array.shape[1:], array.dtype.name) for name, array in batch.items()}
            form = form or own
            if own != form:
                raise DataError(
                    self.subject,
                    f"made batches that differ: {_tell(form)}, then {_tell(own)}",
                    "give all batches the same names, dtypes and shapes but for the first axis",
                )
            yield batch

    def _renamed(self, batch: Batch) -> Batch:
        if not self.fields:
            return batch
        for stored in self.fields.values():
            if stored not in batch:
                raise DataError(
                    self.subject,
                    f"made a batch without {stored!r}",
                    f"it has {', '.join(map(repr, sorted(batch)))}",
                )
        return {name: batch[stored] for name, stored in self.fields.items()}


def _tell(form: _Form) -> str:
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (shape, dtype) in form.items())
