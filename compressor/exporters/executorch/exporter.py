"""Export to ExecuTorch, PyTorch's runtime for phones."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import ClassVar

from compressor.exporters.device_exporter import DeviceExporter, note_of
from compressor.exporters.torch_program.export import exported
from compressor.files import disk_errors
from compressor.progress import quiet_libraries
from compressor.types.carrier import Carrier, Runner
from compressor.types.exporter import ExportContext

NAME = "model.pte"


class ExecutorchExporter(DeviceExporter):
    """Writes ``model.pte``, for ExecuTorch with XNNPACK's kernels on phones.

    The codes and scales that passes have found are written as they are: ``uint8`` activations
    become ``int8`` by moving their zero point, and nothing is calibrated again. The program takes
    one sample at a time.
    """

    format: ClassVar[str] = "executorch"
    runtime: ClassVar[str] = "ExecuTorch"
    package: ClassVar[str] = "executorch"
    module: ClassVar[str] = "executorch"
    version: ClassVar[int] = 3

    def check(self, carrier: Carrier) -> None:
        """Check that ExecuTorch is installed, and has what the model needs."""
        model = self.taken_graph(carrier)
        _lowering().check_kernels(exported(model, planned=True))

    def remarks(self, carrier: Carrier) -> tuple[str, ...]:
        """Return how many layers have lost their codes."""
        count = exported(carrier.graph(), planned=True).widened
        if not count:
            return ()
        layers = "1 layer has its" if count == 1 else f"{count} layers have their"
        return (
            f"{layers} quantized weights in float32: XNNPACK computes with codes only if a "
            "layer's input and output are codes",
        )

    def predict(self, carrier: Carrier) -> int:
        """Return about the bytes of the file; no weight is evaluated."""
        return exported(carrier.graph(), planned=True).size

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write the file.

        Raises:
            SpecError: ExecuTorch cannot hold a node.
        """
        path, written = directory / NAME, _lowering().content(carrier.graph(), note_of(context))
        with disk_errors(path):
            path.write_bytes(written)
        return (path,)

    def open(self, path: Path) -> Runner:
        """Open the file in ExecuTorch's runtime."""
        self.need_package(self.package, opened=path)
        from compressor.models.executorch import ExecutorchRunner

        return ExecutorchRunner(path, f"artifact {path.name!r}")


def _lowering() -> ModuleType:
    """Import what writes programs; ExecuTorch's packages warn of each other."""
    with quiet_libraries():
        from compressor.exporters.executorch import lowering

    return lowering
