"""Export to an archive: what the safetensors exporter writes, in one file, as small as it gets."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from compressor.errors import ArtifactError, InputError
from compressor.exporters.archive.packing import pack
from compressor.exporters.archive.unpacking import unpack
from compressor.exporters.safetensors import SafetensorsExporter
from compressor.files import disk_errors
from compressor.types.carrier import Carrier, Runner
from compressor.types.exporter import ExportContext, Exporter
from compressor.types.tensors import Batch

NAME = "model.archive"


class ArchiveExporter(Exporter):
    """Writes `model.archive`: weights and graph in the fewest bytes, for storing and sending.

    It holds what the safetensors exporter writes in its layout `graph`, bit for bit. Each tensor is
    brought into the form that an entropy coder makes least of: codes of a few bits several to a
    byte, zeros apart from the rest, floats byte by byte. Then Zstandard or Brotli codes it.
    `compress unpack` gives the files back, and `compressor.load` opens an archive as it opens
    these.
    """

    format: ClassVar[str] = "archive"
    version: ClassVar[int] = 2

    level: int = Field(
        default=9,
        ge=1,
        le=22,
        description="Zstandard's; it helps where weights repeat, and makes writing slower, not "
        "reading",
    )

    @property
    def bound(self) -> bool:
        """It is not known before how well weights can be coded."""
        return True

    @property
    def not_judged(self) -> str:
        """It is unpacked before it is run."""
        return "a storage format"

    @property
    def tools(self) -> Mapping[str, str]:
        """The coders."""
        return {name: version(name) for name in ("brotli", "zstandard")}

    @property
    def _content(self) -> SafetensorsExporter:
        return SafetensorsExporter(layout="graph")

    def check(self, carrier: Carrier) -> None:
        """Raise ``SpecError`` where the safetensors exporter does."""
        self._content.check(carrier)

    def predict(self, carrier: Carrier) -> int:
        """Return the bytes of the files inside, which the archive does not exceed.

        How much less they become shows once the weights are coded.
        """
        return self._content.predict(carrier)

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write the files, put them into an archive and read that back.

        Raises:
            ArtifactError: they cannot be opened again, or the archive cannot.
            InputError: the disk is full.
        """
        if context.ranks.rank:
            return ()
        with disk_errors(directory), _scratch(directory) as folder:
            files = self._content.write(carrier, folder, context)
            path = directory / NAME
            pack(files, path, self.level, context.advance)
            shutil.rmtree(folder)
            with _artifact_errors():
                unpack(path, folder)
        return (path,)

    def open(self, path: Path) -> Runner:
        """Unpack the archive into a temporary folder and load the model from there.

        Raises:
            ArtifactError: the archive is damaged, or the model cannot be loaded.
        """
        with _artifact_errors():
            return UnpackedRunner(path, self._content)


class UnpackedRunner:
    """A model that runs from a temporary folder, which goes when the runner does.

    Args:
        path: an archive.
        content: what opens the files in it.

    Raises:
        ModelError: the archive is damaged.
        ArtifactError: the files cannot be opened.
    """

    def __init__(self, path: Path, content: Exporter):
        folder = Path(tempfile.mkdtemp(prefix="archive-"))
        weakref.finalize(self, shutil.rmtree, folder, True)
        unpack(path, folder)
        self._runner = content.open(folder)
        self.runtime = self._runner.runtime

    def run(self, batch: Batch) -> Batch:
        """Run one batch."""
        return self._runner.run(batch)


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=".content-", dir=directory))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _artifact_errors() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise ArtifactError(error.subject, error.problem, error.remedy) from error
