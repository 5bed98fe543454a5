"""Sources of whole feeds: each is one sample, and its arrays are of any rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from compressor.calibration.sources.arrays import NpzSource
from compressor.calibration.sources.file_source import native
from compressor.calibration.sources.user_functions import check_feed, check_fields, iterate
from compressor.errors import DataError
from compressor.types.data import SourceInfo
from compressor.types.tensors import Batch, Feed, TensorSpec

WHOLE = (1, 1)
"""The fold ``number/of`` that leaves nothing out."""


@dataclass(frozen=True)
class FeedFolder:
    """A folder of npz files, in the order of their names: one feed each. Or a single file."""

    path: Path
    # names in the model to names in the files; all arrays if empty
    fields: Mapping[str, str] = field(default_factory=dict)
    most: int | None = None  # feeds that are read, the first ones
    also: tuple[str, ...] = ()  # arrays that are read beside ``fields`` where files have them
    fold: tuple[int, int] = WHOLE

    def info(self) -> SourceInfo:
        """Describe the feeds by reading headers only.

        Raises:
            DataError: there is no file, one is unusable or lacks an array, or they differ in the
                arrays' ranks or dtypes.
        """
        return SourceInfo(len(self._files), self._specs)

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:  # noqa: ARG002
        """Yield feeds, at most ``limit``, one at a time; raises as ``info`` does."""
        for file in self._files[:limit]:
            yield file.feed()

    def forms(self) -> Iterator[tuple[str, Feed]]:
        """Yield each file's name, and its arrays with zeros in them; only headers are read."""
        for file in self._files:
            headers = file.chosen().items()
            arrays = ((n, np.broadcast_to(np.zeros((), h.dtype), h.shape)) for n, h in headers)
            yield file.path.name, Feed((n, a.view(native(a.dtype))) for n, a in arrays)

    def digest(self) -> str:
        """Return a SHA-256 of the files' content in their order, and of what is read of them."""
        whole = hashlib.sha256(str(sorted(self.fields.items())).encode())
        for file in self._files:
            whole.update(file.digest().encode())
        return whole.hexdigest()

    @cached_property
    def _files(self) -> tuple[NpzSource, ...]:
        paths = sorted(self.path.glob("*.npz")) if self.path.is_dir() else [self.path]
        if not paths:
            problem, remedy = "holds no npz files", "save each feed with numpy.savez"
            raise DataError(f"data '{self.path}'", problem, remedy)
        number, of = self.fold
        chosen = paths[number - 1 :: of][: self.most]
        if not chosen:
            raise DataError(
                f"fold {number}/{of}",
                f"holds nothing of {len(paths)} feeds",
                "give more feeds, or fewer folds",
            )
        sources = (NpzSource(path=path) for path in chosen)
        return tuple(source.model_copy(update={"fields": self._read(source)}) for source in sources)

    def _read(self, file: NpzSource) -> dict[str, str]:
        given = dict(self.fields)
        if not given or not set(self.also) - given.keys():
            return given
        there = file.readable()
        return {name: name for name in self.also if name in there} | given

    @cached_property
    def _specs(self) -> tuple[TensorSpec, ...]:
        specs: tuple[TensorSpec, ...] = ()
        for file in self._files:
            chosen = file.chosen().items()
            these = tuple(
                TensorSpec(name, (None,) * len(header.shape), native(header.dtype).name)
                for name, header in sorted(chosen)
            )
            specs = specs or these
            if these != specs:
                forms = [", ".join(map(str, form)) for form in (these, specs)]
                raise DataError(
                    file.subject,
                    f"holds {forms[0]}, and the first feed holds {forms[1]}",
                    "give the arrays of all feeds the same names, ranks and dtypes",
                )
        return specs


@dataclass(frozen=True)
class FeedFactory:
    """Feeds from a function that yields the same dictionaries at each call."""

    make: Callable[[], Iterable[Mapping[str, Any]]]
    name: str  # how errors name the function, such as `pkg.mod:fn`
    # names in the model to names in its dictionaries; all of them if empty
    fields: Mapping[str, str] = field(default_factory=dict)
    most: int | None = None  # feeds that are taken, the first ones
    also: tuple[str, ...] = ()  # what is taken beside ``fields`` where feeds have it
    fold: tuple[int, int] = WHOLE

    @property
    def subject(self) -> str:
        """How errors name this source."""
        return f"data factory '{self.name}'"

    def info(self) -> SourceInfo:
        """Describe the first feed; how many there are is unknown.

        Raises:
            DataError: the function raised, or yielded something else than dictionaries of arrays.
        """
        for feed in self.batches(1, 1):
            specs = (TensorSpec(n, (None,) * a.ndim, a.dtype.name) for n, a in feed.items())
            return SourceInfo(None, tuple(specs))
        raise DataError(self.subject, "yielded no feeds", "yield at least one dictionary")

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:  # noqa: ARG002
        """Yield feeds, at most ``limit``, one at a time; raises as ``info`` does."""
        most = min((n for n in (self.most, limit) if n is not None), default=None)
        number, of = self.fold
        folded = islice(iterate(self.subject, self.make), number - 1, None, of)
        for value in islice(folded, most):
            yield self._renamed(check_feed(self.subject, value))

    def digest(self) -> str:
        """Return a SHA-256 of the feeds; computed once."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        whole = hashlib.sha256()
        for feed in self.batches(1):
            for name, array in sorted(feed.items()):
                whole.update(f"{name} {array.dtype.str} {array.shape} ".encode())
                whole.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return whole.hexdigest()

    def _renamed(self, feed: Feed) -> Feed:
        check_fields(self.subject, "feed", self.fields, feed)
        taken = {name: name for name in self.also if name in feed} | dict(self.fields)
        return Feed((name, feed[stored]) for name, stored in taken.items()) if self.fields else feed
