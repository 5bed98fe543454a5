"""Export to ExecuTorch, PyTorch's runtime for phones."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from compressor.errors import SpecError
from compressor.exporters.byte_codes import check_codes
from compressor.exporters.torch_program.export import exported
from compressor.files import disk_errors
from compressor.progress import quiet_libraries
from compressor.types.carrier import Capability, Carrier, Runner
from compressor.types.exporter import ExportContext, Exporter

NAME = "model.pte"
_PACKAGE = "executorch"
_PHONES = ("aarch64", "arm64", "armv7l", "armv8l")


class ExecutorchExporter(Exporter):
    """Writes ``model.pte``, for ExecuTorch with XNNPACK's kernels on phones.

    The codes and scales that passes have found are written as they are: ``uint8`` activations
    become ``int8`` by moving their zero point, and nothing is calibrated again. The program takes
    one sample at a time.
    """

    format: ClassVar[str] = "executorch"

    @property
    def targets(self) -> frozenset[str]:
        """LiteRT, whose kernels are XNNPACK's as well."""
        return frozenset({"litert"})

    @property
    def run_by(self) -> Mapping[str, str]:
        """The version of ExecuTorch."""
        _check_installed()
        return {_PACKAGE: version(_PACKAGE)}

    @property
    def tools(self) -> Mapping[str, str]:
        """The version of the package that writes the program."""
        return self.run_by

    @property
    def exact(self) -> bool:
        """Its kernels add in 32 bits."""
        return True

    @property
    def estimated(self) -> bool:
        """XNNPACK's compiler decides what its parts take."""
        return True

    @property
    def not_judged(self) -> str:
        """Why latency is not judged: the kernels for this machine's processor are others."""
        if platform.machine() in _PHONES:
            return ""
        return "meant for phones, timed on this machine's processor"

    def check(self, carrier: Carrier) -> None:
        """Check that ExecuTorch is installed, and has what the model needs.

        Raises:
            SpecError: naming the node or value, and what to change.
        """
        _check_installed()
        if Capability.GRAPH not in carrier.offers:
            raise SpecError(
                "export executorch",
                f"needs a graph, but a {carrier.kind} model has none",
                "give model.factory or model.onnx",
            )
        model = carrier.graph()
        check_codes(model, "ExecuTorch")
        lowering = _lowering()
        lowering.check_kernels(exported(model, planned=True))

    def remarks(self, carrier: Carrier) -> tuple[str, ...]:
        """Return how many layers have lost their codes."""
        count = exported(carrier.graph(), planned=True).widened
        if not count:
            return ()
        layers = "1 layer has its" if count == 1 else f"{count} layers have their"
        return (
            f"{layers} quantized weights in float32: XNNPACK computes with codes where a layer "
            "reads and gives codes",
        )

    def predict(self, carrier: Carrier) -> int:
        """Return about the bytes of the file; no weight is evaluated."""
        return exported(carrier.graph(), planned=True).size

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write the file.

        Raises:
            SpecError: ExecuTorch cannot hold a node.
            InputError: the disk is full.
        """
        notes = f"compressor {version('compressor')}, {context.name}, spec {context.spec_digest}"
        path, written = directory / NAME, _lowering().content(carrier.graph(), notes)
        with disk_errors(path):
            path.write_bytes(written)
        return (path,)

    def open(self, path: Path) -> Runner:
        """Open the file in ExecuTorch's runtime.

        Raises:
            ArtifactError: it does not load.
        """
        _check_installed()
        from compressor.models.executorch import ExecutorchRunner

        return ExecutorchRunner(path if path.is_file() else path / NAME, f"artifact {path.name!r}")


def _lowering() -> ModuleType:
    """Import what writes programs; ExecuTorch's packages warn of each other."""
    with quiet_libraries():
        from compressor.exporters.executorch import lowering

    return lowering


def _check_installed() -> None:
    if find_spec(_PACKAGE) is None:
        raise SpecError(
            "export executorch",
            f"needs the package {_PACKAGE}, which is not installed",
            'run pip install "compressor[executorch]"',
        )
