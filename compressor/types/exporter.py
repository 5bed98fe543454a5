"""What an exporter is: it checks, predicts, writes and reopens one artifact."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from compressor.types.carrier import Carrier, Runner
from compressor.types.options import Options


@dataclass(frozen=True)
class ExportContext:
    """What an exporter may write into an artifact besides the model.

    Attributes:
        name: the spec's name.
        spec_digest: hash of the resolved spec.
    """

    name: str
    spec_digest: str


class Exporter(Options, ABC):
    """An artifact format. Its fields are its options.

    Class attributes:
        format: the name in a spec.
        version: raised whenever written bytes change.
    """

    format: ClassVar[str]
    version: ClassVar[int] = 1

    @property
    def targets(self) -> frozenset[str]:
        """Names of the targets whose rules the passes should follow."""
        return frozenset()

    @property
    def not_judged(self) -> str:
        """Why latency limits do not apply: what is timed here is not what will be deployed.

        Empty where they do apply.
        """
        return ""

    @abstractmethod
    def check(self, carrier: Carrier) -> None:
        """Raise ``SpecError`` where the model holds what this format or target cannot."""

    @abstractmethod
    def predict(self, carrier: Carrier) -> int:
        """Return the bytes that :meth:`write` will write, closely."""

    @abstractmethod
    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write into an empty staging directory; return the files, the main one first."""

    @abstractmethod
    def open(self, path: Path) -> Runner:
        """Reopen the artifact in the runtime that serves it.

        Raises:
            ArtifactError: it cannot be opened.
        """
