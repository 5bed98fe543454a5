"""What an exporter is: it checks, predicts, writes and reopens one artifact."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import onnx_ir as ir

from compressor.errors import SpecError
from compressor.progress import SILENT, Progress
from compressor.types.carrier import Capability, Carrier, Runner
from compressor.types.data import ALONE, Ranks
from compressor.types.options import Options

# why the latency of an artifact that devices convert before they run it is not judged
STORED = "a storage format"


@dataclass(frozen=True)
class ExportContext:
    """Context of an export: metadata for the artifact, and callbacks of the run.

    Attributes:
        name: the spec's name.
        spec_digest: hash of the resolved spec.
        ranks: the processes that may share the work; those after the first call an exporter
            only if it :attr:`Exporter.resumes`.
        advance: called with the number of bytes processed so far, to show progress.
        hashed: called with name and SHA-256 of a written file, if the exporter has computed it
            while writing; the file is then not read again.
        summed: called with the name of such a file and the checksums of its tensors, see
            :mod:`compressor.types.proofs`.
        folder: the spec's folder, to which paths in options are relative.
    """

    name: str
    spec_digest: str
    ranks: Ranks = ALONE
    advance: Callable[[int], None] = lambda _: None
    hashed: Callable[[str, str], None] = lambda _, __: None
    summed: Callable[[str, Mapping[str, str]], None] = lambda _, __: None
    folder: Path = Path()


USUAL = ExportContext(name="a-name-of-usual-length", spec_digest="0" * 64)
"""A stand-in for the context when files are checked and predicted."""


@dataclass(frozen=True)
class Check:
    """A check that a written artifact passes, or that could not be made.

    Attributes:
        detail: what was compared, or why nothing could be.
        known: whether the check could be made.
    """

    name: str
    detail: str
    known: bool = True


def element_bits(bits: int) -> int:
    """Return the bits of the element type in which a graph holds codes of so many.

    >>> [element_bits(bits) for bits in (2, 3, 4, 6)]
    [4, 4, 4, 8]
    """
    return 4 if bits <= 4 else 8


class Exporter(Options, ABC):
    """Base class of artifact formats. Fields are options.

    Class attributes:
        format: the name in a spec.
        version: incremented whenever written bytes change.
        resumes: :meth:`write` continues from the files that an earlier call left.
        one_name: files beside the main one must not be hard links, which readers refuse.
        packs: codes of any width lie in the files without gaps; else as the graph holds them.
    """

    format: ClassVar[str]
    version: ClassVar[int] = 1
    resumes: ClassVar[bool] = False
    one_name: ClassVar[bool] = False
    packs: ClassVar[bool] = False

    @property
    def targets(self) -> frozenset[str]:
        """Names of the targets whose rules passes follow."""
        return frozenset()

    @property
    def bound(self) -> bool:
        """Whether :meth:`predict` returns an upper bound.

        The exact size is known once the weights are read.
        """
        return False

    @property
    def estimated(self) -> bool:
        """Whether :meth:`predict` is an estimate, because another tool determines the size."""
        return False

    @property
    def exact(self) -> bool:
        """Whether the runtime accumulates integer products in 32 bits on every device.

        ONNX Runtime and OpenVINO do not on x86 CPUs without VNNI.
        """
        return False

    @property
    def not_judged(self) -> str:
        """Why latency limits do not apply, such as another runtime in deployment.

        Empty if they apply.
        """
        return ""

    @property
    def on_gpu(self) -> bool:
        """Whether the artifact runs on a GPU of this machine."""
        return False

    @property
    def cannot_run(self) -> str:
        """Why the artifact cannot run on this machine; empty if it can.

        It is then not opened: :meth:`check_written` checks it, and the report has the reason
        instead of measurements.
        """
        return ""

    @property
    def run_by(self) -> Mapping[str, str]:
        """Versions that measurements depend on, besides those that all measurements depend on."""
        return {}

    @property
    def tools(self) -> Mapping[str, str]:
        """Versions that written bytes depend on, besides those that every result depends on."""
        return {}

    def needed_graph(
        self, carrier: Carrier, remedy: str = "set model.factory or model.onnx"
    ) -> ir.Model:
        """Return the graph of a model; raise ``SpecError`` if it has none."""
        if Capability.GRAPH not in carrier.offers:
            raise SpecError(
                f"export {self.format}",
                f"needs a graph, but a {carrier.kind} model has none",
                remedy,
            )
        return carrier.graph()

    def need_package(self, package: str, module: str = "", opened: Path | None = None) -> None:
        """Raise ``SpecError`` if a package of the extra with the format's name is missing.

        Args:
            package: its name for pip.
            module: its name in Python, if different.
            opened: the file that it is to open; nothing where it writes one.
        """
        if find_spec(module or package) is None:
            raise SpecError(
                f"artifact {opened.name!r}" if opened else f"export {self.format}",
                f"needs the package {package}, which is not installed",
                f'run pip install "compressor[{self.format}]"',
            )

    @property
    def packs_pairs(self) -> bool:
        """Whether codes of two bits lie four to a byte, where the layer computes with floats."""
        return self.packs

    @abstractmethod
    def check(self, carrier: Carrier) -> None:
        """Check that this format and its target support the model.

        Raises:
            SpecError: naming the layer, node or value, and what to change.
        """

    @abstractmethod
    def predict(self, carrier: Carrier) -> int:
        """Return the bytes that :meth:`write` will write.

        See :attr:`bound` and :attr:`estimated`.
        """

    def checked_bytes(self, carrier: Carrier) -> int:
        """Do what :meth:`check` does, and return what :meth:`predict` does.

        An exporter that finds both at once does not need to look twice.
        """
        self.check(carrier)
        return self.predict(carrier)

    @abstractmethod
    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write into a staging directory, and return the files, the main one first.

        The directory is empty, unless the exporter :attr:`resumes`.

        Raises:
            InputError: the disk is full.
        """

    def check_written(self, carrier: Carrier, path: Path) -> str:
        """Compare an artifact with its model if one of the two cannot run.

        Args:
            carrier: the model that was written.
            path: the main file.

        Returns:
            A short description of what was compared.

        Raises:
            ArtifactError: they differ.
        """
        raise NotImplementedError(f"{self.format} does not take a {carrier.kind} model: {path}")

    def prove(self, carrier: Carrier, path: Path) -> tuple[Check, ...]:  # noqa: ARG002
        """Check that the program that will serve the artifact loads it correctly.

        Called for artifacts that do not run here.

        Args:
            carrier: the model that was written.
            path: the main file.

        Raises:
            ArtifactError: the program does not load it, or computes other outputs.
        """
        return ()

    def remarks(self, carrier: Carrier) -> tuple[str, ...]:  # noqa: ARG002
        """Return remarks on the artifact for the user, one sentence each."""
        return ()

    @abstractmethod
    def open(self, path: Path) -> Runner:
        """Reopen the artifact in the runtime that serves it.

        Raises:
            ArtifactError: it cannot be opened.
        """


@dataclass(frozen=True)
class UnpackedFile:
    """A file unpacked from an archive.

    Attributes:
        name: its name.
        bytes: its size.
        sha256: the hash of its bytes, in hexadecimal.
    """

    name: str
    bytes: int
    sha256: str


class PackedFormat(ABC):
    """A file format that packs the files of another export; the catalog's kind ``format``."""

    @abstractmethod
    def holds(self, path: Path) -> bool:
        """Return whether a file has this format, by its first bytes."""

    @abstractmethod
    def unpack(
        self,
        path: Path,
        folder: Path,
        tensors: Sequence[str] = (),
        *,
        force: bool = False,
        progress: Progress = SILENT,
    ) -> tuple[UnpackedFile, ...]:
        """Unpack the files, bit for bit as they were packed.

        Args:
            path: the packed file.
            folder: the target folder; created if missing.
            tensors: unpack only these; files of weights then hold nothing else.
            force: write into a folder that holds files; those of the same names are replaced.
            progress: shows the progress.

        Raises:
            SpecError: the file is missing, the folder is not empty, or there is no such tensor.
            ModelError: the file is truncated or damaged.
            InputError: the disk is full.
        """

    @abstractmethod
    def unpacked(self, path: Path) -> AbstractContextManager[Path]:
        """Yield a temporary folder with the files."""

    @abstractmethod
    def damaged_tensors(self, path: Path) -> tuple[str, ...]:
        """Return the damaged tensors of a file, as far as its index is intact."""

    @abstractmethod
    def stored_bytes(self, path: Path) -> dict[str, int]:
        """Return the bytes that each tensor takes in the file, by name.

        Raises:
            ModelError: the file is truncated or damaged.
        """
