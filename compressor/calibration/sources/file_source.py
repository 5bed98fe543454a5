"""What the sources that read arrays from files have in common."""

from __future__ import annotations

import hashlib
import json
import lzma
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError

from compressor.calibration.sources.headers import Header, choose, describe
from compressor.calibration.sources.rows import ReadAt, Rows
from compressor.errors import DataError, SpecError
from compressor.types.data import SourceInfo
from compressor.types.options import Options
from compressor.types.tensors import Batch

_READERS = "_readers"
_READ_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,  # an encrypted zip member
    NotImplementedError,  # a compression that zipfile does not know
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    SafetensorError,
)


class FileSource(Options, ABC):
    """Arrays with the samples as first axis, read from files a batch at a time."""

    kind: ClassVar[str]

    path: Path = Field(strict=False, description="the file or folder")
    fields: dict[str, str] = Field(
        default_factory=dict,
        description="names in the model to names in the file; all arrays if there are none",
    )
    samples: int | None = Field(default=None, ge=1, description="use at most so many samples")

    @property
    def subject(self) -> str:
        """How errors name this source."""
        return f"data '{self.path}'"

    @abstractmethod
    def headers(self) -> dict[str, Header]:
        """Return the headers of all arrays there are, by stored name."""

    @abstractmethod
    def open_rows(self, chosen: Mapping[str, str]) -> AbstractContextManager[dict[str, Rows]]:
        """Open the chosen arrays, model names to stored names; return rows by model name."""

    @abstractmethod
    def files(self) -> list[tuple[str, Path]]:
        """Return the files that hold the chosen arrays, each with a name for the digest."""

    def info(self) -> SourceInfo:
        """Describe the source by reading headers only.

        Raises:
            SpecError: the path does not exist.
            DataError: the file is unusable, or does not hold the arrays asked for.
        """
        return self._choose()[1]

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield batches of up to ``size`` samples, at most ``limit``; raises as ``info`` does."""
        if size < 1:
            raise ValueError(f"batches of {size} samples")
        chosen, info = self._choose()
        left = info.samples or 0
        left = left if limit is None else min(left, limit)
        with ExitStack() as stack:
            with self._guard():
                readers = stack.enter_context(self.open_rows(chosen))
            while left > 0:
                count = min(size, left)
                with self._guard():
                    batch = {name: reader.take(count) for name, reader in readers.items()}
                yield batch
                left -= count

    def digest(self) -> str:
        """Return a SHA-256 of the options and the files' content; their place has no part."""
        settings = self.model_dump(mode="json", exclude={"path"})
        whole = hashlib.sha256(json.dumps([self.kind, settings], sort_keys=True).encode())
        with self._guard():
            for name, path in self.files():
                whole.update(name.encode() + b"\0")
                with path.open("rb") as file:
                    whole.update(hashlib.file_digest(file, "sha256").digest())
        return whole.hexdigest()

    def _choose(self) -> tuple[dict[str, str], SourceInfo]:
        with self._guard():
            headers = self.headers()
        chosen = choose(self.subject, self.fields, headers)
        return chosen, describe(self.subject, chosen, headers, self.samples)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Turn what goes wrong when reading into errors that name the file."""
        if not self.path.exists():
            raise SpecError(self.subject, "does not exist", "correct the path")
        try:
            yield
        except _READ_ERRORS as error:
            raise DataError(
                self.subject,
                f"cannot be read: {str(error) or type(error).__name__}",
                f"check that it is a complete {self.kind}",
            ) from error


class IndexedFileSource(FileSource):
    """Files in which any sample can be found without reading those before it."""

    @abstractmethod
    def open_at(self, chosen: Mapping[str, str]) -> dict[str, ReadAt]:
        """Open the chosen arrays, model names to stored names; return readers by model name."""

    def take(self, rows: NDArray[np.int64]) -> Batch:
        """Return samples by number; raises as ``info`` does.

        The files are looked at once and are expected to stay as they are.
        """
        readers = self._readers
        with self._guard():
            return {name: read_at(rows) for name, read_at in readers.items()}

    def __getstate__(self) -> dict[Any, Any]:
        """Leave out of a pickle what is open."""
        state = super().__getstate__()
        kept = {name: value for name, value in state["__dict__"].items() if name != _READERS}
        return {**state, "__dict__": kept}

    @cached_property
    def _readers(self) -> dict[str, ReadAt]:
        chosen, _ = self._choose()
        with self._guard():
            return self.open_at(chosen)
