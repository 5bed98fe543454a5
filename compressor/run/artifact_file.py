"""An artifact on disk and its runtime."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import catalog
from compressor.errors import SpecError
from compressor.models.onnx.ort_session import merges_halves
from compressor.models.onnx.runtimes import OnnxRuntime, runtime_for, why_elsewhere

if TYPE_CHECKING:  # a cold start of an ONNX file must not import PyTorch here
    from compressor.run.timing.timing import Opener
    from compressor.types.exporter import Exporter

ONNX = "onnx"
_TARGET = "target"  # an option of the exporter, also in the file's metadata


@dataclass(frozen=True)
class Machinery:
    """The provider and threads that run artifacts.

    Attributes:
        provider: of ONNX Runtime, for all ONNX files: ``cpu``, ``cuda`` or ``tensorrt``; ``None``
            runs each in its target runtime.
        threads: number of threads.
    """

    provider: str | None = None
    threads: int = 1


@dataclass(frozen=True)
class ArtifactFile:
    """An exported artifact by its files, wherever they are.

    Attributes:
        path: its main file or its folder.
        format: the exporter that wrote it.
        files: all its files.
        options: the exporter's options from the run's spec or the file; empty if unknown.
    """

    name: str
    path: Path
    format: str
    files: tuple[Path, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def cannot_run(self) -> str:
        """Why it cannot be run on this machine; empty if it can."""
        return "" if self.format == ONNX else self._exporter.cannot_run

    def elsewhere(self, machinery: Machinery) -> str:
        """Return why it does not run in its target runtime; empty if it does or need not."""
        if self.format != ONNX or machinery.provider is not None:
            return ""
        return why_elsewhere(self._target)

    def runtime(self, machinery: Machinery) -> OnnxRuntime | None:
        """Return the runtime of an ONNX file; exporters of other formats open them themselves."""
        if self.format != ONNX:
            return None
        if machinery.provider is not None:
            merge = not merges_halves(self.path)
            return OnnxRuntime(provider=machinery.provider, merge=merge)
        return runtime_for(self._target, self.path)

    def provider(self, machinery: Machinery) -> str:
        """Return the provider that computes it: ``cpu``, or one on a GPU."""
        runtime = self.runtime(machinery)
        if runtime is not None:
            return runtime.provider
        return "cuda" if self._exporter.on_gpu else "cpu"

    def opener(self, machinery: Machinery) -> Opener:
        """Return a function that opens it in its runtime.

        The function raises ``ModelError`` if an ONNX file does not load or a provider does not
        start, and ``ArtifactError`` if another format cannot be opened.
        """
        runtime = self.runtime(machinery)
        if runtime is None:
            return partial(self._exporter.open, self.path)
        return partial(runtime.open, self.path, f"artifact {self.name!r}")

    @property
    def _target(self) -> str:
        return str(self.options.get(_TARGET, ""))

    @property
    def _exporter(self) -> Exporter:
        from pydantic import ValidationError

        cls: type[Exporter] = catalog.load("exporter", self.format)
        try:
            # They come from JSON, which has lists for tuples.
            return cls.model_validate_json(json.dumps(dict(self.options)))
        except ValidationError as error:
            raise SpecError(
                f"artifact {self.name!r}",
                f"was written with options ({self.options}) that {self.format} no longer has",
                "run its spec again, or give the file itself",
            ) from error
