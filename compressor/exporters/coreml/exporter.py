"""Export to Core ML, the format of Apple's devices."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import ClassVar, Literal

from pydantic import Field

from compressor.errors import ArtifactError
from compressor.exporters.device_exporter import DeviceExporter, note_of
from compressor.exporters.torch_program.export import exported
from compressor.files import disk_errors
from compressor.progress import quiet_libraries
from compressor.types.carrier import Carrier, Runner
from compressor.types.exporter import ExportContext

NAME = "model.mlpackage"


class CoremlExporter(DeviceExporter):
    """Writes ``model.mlpackage``, for Core ML on Apple's devices from iOS 17 and macOS 14.

    The codes and scales that passes have found are written as they are; ``uint8`` activations
    become ``int8`` by moving their zero point. Only Apple's systems run the package: here its
    codes are compared with the model's, and the report says that it was not run.
    """

    format: ClassVar[str] = "coreml"
    runtime: ClassVar[str] = "Core ML"
    package: ClassVar[str] = "coremltools"
    module: ClassVar[str] = "coremltools"

    precision: Literal["float32", "float16"] = Field(
        "float32",
        description="Type of everything but codes; the neural engine computes only in float16.",
    )

    @property
    def cannot_run(self) -> str:
        """Why nothing here runs it."""
        return "only Apple's systems run Core ML"

    def check(self, carrier: Carrier) -> None:
        """Check that Core ML Tools are installed, and that PyTorch exports the model."""
        exported(self.taken_graph(carrier), planned=True, alone=True)

    def predict(self, carrier: Carrier) -> int:
        """Return about the bytes of the package; no weight is evaluated."""
        return exported(carrier.graph(), planned=True, alone=True).size

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write the package.

        Raises:
            SpecError: Core ML Tools do not convert a node.
        """
        files = _package().content(carrier.graph(), note_of(context), self.precision)
        written = []
        for name, data in files.items():
            path = directory / NAME / name
            with disk_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            written.append(path)
        return tuple(written)

    def check_written(self, carrier: Carrier, path: Path) -> str:
        """Compare the codes in a package with those of the model.

        Raises:
            ArtifactError: they differ, or it cannot be read.
        """
        package = _package()
        found, meant = package.stored_codes(path), package.expected_codes(carrier.graph())
        if found != meant:
            raise ArtifactError(
                f"artifact {path.name!r}",
                f"holds the codes of {(found & meant).total()} of {meant.total()} weights",
                "report this with the spec",
            )
        return f"the codes of {meant.total()} weights" if meant else "its program, read again"

    def open(self, path: Path) -> Runner:
        """Raise an error: nothing here runs it."""
        raise ArtifactError(f"artifact {path.name!r}", "cannot be run", self.cannot_run)


def _package() -> ModuleType:
    """Import what writes packages; Core ML Tools warn of what they lack on Linux."""
    with quiet_libraries():
        from compressor.exporters.coreml import package

    return package
