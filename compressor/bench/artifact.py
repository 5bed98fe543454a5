"""An artifact on disk, and how it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import catalog
from compressor.errors import SpecError

if TYPE_CHECKING:  # a cold start of an ONNX file is one without PyTorch
    from compressor.types.carrier import Runner
    from compressor.types.exporter import Exporter

ONNX = "onnx"


@dataclass(frozen=True)
class Machinery:
    """What computes.

    Attributes:
        provider: of ONNX Runtime: ``cpu``, ``cuda`` or ``tensorrt``.
        threads: how many compute; ``None`` leaves it to the runtime.
    """

    provider: str = "cpu"
    threads: int | None = None


@dataclass(frozen=True)
class Artifact:
    """One exported artifact.

    Attributes:
        name: what it is called in tables.
        path: what opens it: its main file or its folder.
        format: the exporter that wrote it.
        files: all its files.
        options: those of the exporter, as the run's spec has them; none where that is not known.
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
        """Why it cannot be run on this machine; empty where it can."""
        return "" if self.format == ONNX else self._exporter.cannot_run

    def open(self, machinery: Machinery) -> Runner:
        """Open it in the runtime that serves it.

        An ONNX file runs in ONNX Runtime with the provider; other formats know for themselves.

        Raises:
            ModelError: an ONNX file does not load, or the provider does not start.
            ArtifactError: another format cannot be opened.
        """
        if self.format == ONNX:
            from compressor.carriers.ort_runner import OrtRunner

            subject = f"artifact {self.name!r}"
            return OrtRunner(self.path, subject, machinery.threads, provider=machinery.provider)
        return self._exporter.open(self.path)

    @property
    def _exporter(self) -> Exporter:
        from pydantic import ValidationError

        cls: type[Exporter] = catalog.load("exporter", self.format)
        try:
            return cls.model_validate(dict(self.options))
        except ValidationError as error:
            raise SpecError(
                f"artifact {self.name!r}",
                f"was written with options that {self.format} does not have now ({self.options})",
                "run its spec again, or give the file itself",
            ) from error
