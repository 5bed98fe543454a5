"""Export to Core ML, the format of Apple's devices."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Literal

from pydantic import Field

from compressor.errors import ArtifactError, SpecError
from compressor.exporters.byte_codes import check_codes
from compressor.exporters.torch_program.export import exported
from compressor.files import disk_errors
from compressor.progress import quiet_libraries
from compressor.types.carrier import Capability, Carrier, Runner
from compressor.types.exporter import ExportContext, Exporter

NAME = "model.mlpackage"
_PACKAGE = "coremltools"


class CoremlExporter(Exporter):
    """Writes ``model.mlpackage``, for Core ML on Apple's devices from iOS 17 and macOS 14.

    The codes and scales that passes have found are written as they are; ``uint8`` activations
    become ``int8`` by moving their zero point. Only Apple's systems run the package: here its
    codes are compared with the model's, and the report says that it was not run.
    """

    format: ClassVar[str] = "coreml"

    precision: Literal["float32", "float16"] = Field(
        "float32",
        description="Type of all that is not codes; the neural engine computes in float16 alone.",
    )

    @property
    def targets(self) -> frozenset[str]:
        """LiteRT, whose rules have int8 activations between operators, too."""
        return frozenset({"litert"})

    @property
    def tools(self) -> Mapping[str, str]:
        """The version of Core ML Tools."""
        _check_installed()
        return {_PACKAGE: version(_PACKAGE)}

    @property
    def estimated(self) -> bool:
        """Core ML Tools decide how a program is written."""
        return True

    @property
    def cannot_run(self) -> str:
        """Why nothing here runs it."""
        return "only Apple's systems run Core ML"

    def check(self, carrier: Carrier) -> None:
        """Check that Core ML Tools are installed, and that PyTorch exports the model.

        Raises:
            SpecError: naming the node or value, and what to change.
        """
        _check_installed()
        if Capability.GRAPH not in carrier.offers:
            raise SpecError(
                "export coreml",
                f"needs a graph, but a {carrier.kind} model has none",
                "give model.factory or model.onnx",
            )
        model = carrier.graph()
        check_codes(model, "Core ML")
        exported(model, planned=True, alone=True)

    def predict(self, carrier: Carrier) -> int:
        """Return about the bytes of the package; no weight is evaluated."""
        return exported(carrier.graph(), planned=True, alone=True).size

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write the package.

        Raises:
            SpecError: Core ML Tools do not convert a node.
            InputError: the disk is full.
        """
        notes = f"compressor {version('compressor')}, {context.name}, spec {context.spec_digest}"
        files = _package().content(carrier.graph(), notes, self.precision)
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


def _check_installed() -> None:
    if find_spec(_PACKAGE) is None:
        raise SpecError(
            "export coreml",
            f"needs the package {_PACKAGE}, which is not installed",
            'run pip install "compressor[coreml]"',
        )
