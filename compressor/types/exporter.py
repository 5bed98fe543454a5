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

# why latency is not judged, of what a device loads to run something else
STORED = "a storage format"


@dataclass(frozen=True)
class ExportContext:
    """What an exporter may write into an artifact besides the model, and how it is called.

    Attributes:
        name: the spec's name.
        spec_digest: hash of the resolved spec.
        ranks: the processes that may share the work; those after the first call an exporter
            only if it :attr:`Exporter.resumes`.
        advance: takes the bytes that have been worked on so far, for whoever watches.
        hashed: takes name and sha256 of a file that has been written, where the exporter found
            it on the way; large files then need not be read once more.
        summed: takes name and checksums of the tensors of such a file, see
            :mod:`compressor.types.proofs`.
        folder: the spec's, in which files lie that an option names; it goes into no artifact.
    """

    name: str
    spec_digest: str
    ranks: Ranks = ALONE
    advance: Callable[[int], None] = lambda _: None
    hashed: Callable[[str, str], None] = lambda _, __: None
    summed: Callable[[str, Mapping[str, str]], None] = lambda _, __: None
    folder: Path = Path()


USUAL = ExportContext(name="a-name-of-usual-length", spec_digest="0" * 64)
"""What a file is predicted with, and checked, before its name is known."""


@dataclass(frozen=True)
class Check:
    """Something that was looked at in a written artifact and holds.

    Attributes:
        detail: what was compared, or why it is not known to hold.
        known: whether it could be looked at.
    """

    name: str
    detail: str
    known: bool = True


class Exporter(Options, ABC):
    """An artifact format. Its fields are its options.

    Class attributes:
        format: the name in a spec.
        version: raised whenever written bytes change.
        resumes: :meth:`write` goes on with what an earlier call left in its directory.
        one_name: files beside the main one must have no second name: readers refuse hard links.
    """

    format: ClassVar[str]
    version: ClassVar[int] = 1
    resumes: ClassVar[bool] = False
    one_name: ClassVar[bool] = False

    @property
    def targets(self) -> frozenset[str]:
        """Names of the targets whose rules the passes should follow."""
        return frozenset()

    @property
    def bound(self) -> bool:
        """:meth:`predict` returns the most that the files may take.

        How much less they do shows once the weights are read.
        """
        return False

    @property
    def estimated(self) -> bool:
        """:meth:`predict` guesses, because a tool decides what the files take."""
        return False

    @property
    def exact(self) -> bool:
        """Whether what runs the artifact adds the products of codes in 32 bits on every device.

        ONNX Runtime and OpenVINO do not on x86 CPUs without VNNI.
        """
        return False

    @property
    def not_judged(self) -> str:
        """Why latency limits do not apply: what is timed here is not what will be deployed.

        Empty where they do apply.
        """
        return ""

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU of this machine computes what it writes."""
        return False

    @property
    def cannot_run(self) -> str:
        """Why what it writes cannot be run on this machine; empty where it can.

        Such an artifact is not opened: :meth:`check_written` checks it, and the report has the
        reason in place of numbers.
        """
        return ""

    @property
    def run_by(self) -> Mapping[str, str]:
        """Versions that measurements of its artifacts depend on, besides those that all do."""
        return {}

    @property
    def tools(self) -> Mapping[str, str]:
        """Versions that written bytes depend on, besides those that every result depends on."""
        return {}

    def needed_graph(
        self, carrier: Carrier, remedy: str = "set model.factory or model.onnx"
    ) -> ir.Model:
        """Return the graph of a model; raise ``SpecError`` where there is none."""
        if Capability.GRAPH not in carrier.offers:
            raise SpecError(
                f"export {self.format}",
                f"needs a graph, but a {carrier.kind} model has none",
                remedy,
            )
        return carrier.graph()

    def need_package(self, package: str, module: str = "") -> None:
        """Raise ``SpecError`` where a package of the extra named like the format is missing.

        Args:
            package: its name for pip.
            module: its name in Python, where that is another.
        """
        if find_spec(module or package) is None:
            raise SpecError(
                f"export {self.format}",
                f"needs the package {package}, which is not installed",
                f'run pip install "compressor[{self.format}]"',
            )

    @abstractmethod
    def check(self, carrier: Carrier) -> None:
        """Check that this format and its target can hold the model.

        Raises:
            SpecError: naming the layer, node or value, and what to change.
        """

    @abstractmethod
    def predict(self, carrier: Carrier) -> int:
        """Return the bytes that :meth:`write` will write, closely, or the most it may write.

        See :attr:`bound`.
        """

    @abstractmethod
    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write into a staging directory; return the files, the main one first.

        The directory is empty, unless the exporter :attr:`resumes`.

        Raises:
            InputError: the disk is full.
        """

    def check_written(self, carrier: Carrier, path: Path) -> str:
        """Compare what was written with a model, where one of the two cannot be run.

        Args:
            carrier: the model that was written.
            path: the main file.

        Returns:
            What was compared, in a few words.

        Raises:
            ArtifactError: they differ.
        """
        raise NotImplementedError(f"{self.format} does not take a {carrier.kind} model: {path}")

    def prove(self, carrier: Carrier, path: Path) -> tuple[Check, ...]:  # noqa: ARG002
        """Return what the program that serves an artifact makes of it, where it is not run here.

        Args:
            carrier: the model that was written.
            path: the main file.

        Raises:
            ArtifactError: it would not serve it, or something else.
        """
        return ()

    def remarks(self, carrier: Carrier) -> tuple[str, ...]:  # noqa: ARG002
        """Return what a user should know of an artifact besides its numbers, one sentence each."""
        return ()

    @abstractmethod
    def open(self, path: Path) -> Runner:
        """Reopen the artifact in the runtime that serves it.

        Raises:
            ArtifactError: it cannot be opened.
        """


@dataclass(frozen=True)
class UnpackedFile:
    """A file that was taken out of an archive.

    Attributes:
        name: its name.
        bytes: its size.
        sha256: the hash of its bytes, in hexadecimal.
    """

    name: str
    bytes: int
    sha256: str


class PackedFormat(ABC):
    """One file that holds the files of another export; the catalog's kind ``format``."""

    @abstractmethod
    def holds(self, path: Path) -> bool:
        """Whether the file begins as this format does."""

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
        """Take the files out; they are those that were put in, bit for bit.

        Args:
            path: the packed file.
            folder: where the files go; made if it is not there.
            tensors: take these alone; files of weights then hold nothing else.
            force: write into a folder that holds files; those of the same names are replaced.
            progress: shows how far it is.

        Raises:
            SpecError: the file is not there, the folder is not empty, or no tensor has a name.
            ModelError: the file is truncated or damaged.
            InputError: the disk is full.
        """

    @abstractmethod
    def unpacked(self, path: Path) -> AbstractContextManager[Path]:
        """Yield a temporary folder with the files."""

    @abstractmethod
    def damaged_tensors(self, path: Path) -> tuple[str, ...]:
        """Return the tensors that are damaged in the file, as far as what describes them is not."""

    @abstractmethod
    def stored_bytes(self, path: Path) -> dict[str, int]:
        """Return the bytes that each tensor takes in the file, by name.

        Raises:
            ModelError: the file is truncated or damaged.
        """
