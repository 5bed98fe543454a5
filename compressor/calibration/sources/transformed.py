"""A source whose batches pass through a function of the user's."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compressor.calibration.sources.foreign import call, check_batch
from compressor.types.data import Source, SourceInfo
from compressor.types.tensors import Batch


@dataclass(frozen=True)
class TransformedSource:
    """A source followed by ``transform``, which is ``fn(batch)`` or ``fn(batch, rng)``.

    A parameter named ``rng`` receives a generator seeded with ``seed`` and the batch's index,
    so the same batch size gives the same batches at each call.

    Attributes:
        source: where batches come from.
        transform: maps a batch to a batch.
        name: how errors name the function, such as ``pkg.mod:fn``.
        seed: where the generators start.
    """

    source: Source
    transform: Callable[..., Batch]
    name: str
    seed: int = 0

    @property
    def subject(self) -> str:
        """How errors name the transform."""
        return f"transform '{self.name}'"

    def info(self) -> SourceInfo:
        """Describe the source before the transform."""
        return self.source.info()

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield transformed batches.

        Raises:
            DataError: the transform raised, or returned something else than a batch.
        """
        for index, batch in enumerate(self.source.batches(size, limit)):
            yield self.transformed(batch, (self.seed, index))

    @property
    def random(self) -> bool:
        """The transform draws random numbers."""
        return wants_rng(self.transform)

    def transformed(self, batch: Batch, seed: Sequence[int]) -> Batch:
        """Return a batch after the transform, whose generator, if it takes one, has this seed.

        Raises:
            DataError: the transform raised, or returned something else than a batch.
        """
        drawn = [np.random.default_rng(tuple(seed))] if self.random else []
        return check_batch(self.subject, call(self.subject, self.transform, batch, *drawn))

    def digest(self) -> str:
        """Return a SHA-256 of the source's digest, the seed, and the file that has the function.

        What that file imports has no part: change the seed, or run afresh, after editing it.
        """
        parts = [self.source.digest().encode(), self.name.encode(), str(self.seed).encode()]
        code = _source_file(self.transform)
        if code is not None:
            parts.append(hashlib.sha256(code.read_bytes()).digest())
        return hashlib.sha256(b"\0".join(parts)).hexdigest()


def wants_rng(function: Callable[..., object]) -> bool:
    """Return whether a function's second parameter is named ``rng``."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    return parameters[1:2] == ["rng"]


def _source_file(function: Callable[..., object]) -> Path | None:
    try:
        name = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # built in, or a callable object
        return None
    path = Path(name) if name else None
    return path if path and path.is_file() else None
