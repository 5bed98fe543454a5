"""Export to LiteRT, the format of TensorFlow Lite."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import onnx_ir as ir

from compressor.exporters.device_exporter import DeviceExporter, note_of
from compressor.exporters.flatbuffer import check_size
from compressor.files import disk_errors
from compressor.types.carrier import Carrier, Runner
from compressor.types.exporter import USUAL, ExportContext

NAME = "model.tflite"
_NOTE = "compressor"


class LitertExporter(DeviceExporter):
    """Writes ``model.tflite``, for LiteRT (TensorFlow Lite) on phones.

    The codes and scales that passes have found are written as they are: ``uint8`` activations
    become ``int8`` by moving their zero point, and nothing is calibrated again. Inputs and outputs
    keep the names, the shapes and the order of axes that the model has.
    """

    format: ClassVar[str] = "litert"
    version: ClassVar[int] = 4
    runtime: ClassVar[str] = "LiteRT"
    package: ClassVar[str] = "ai-edge-litert"
    module: ClassVar[str] = "ai_edge_litert"

    def check(self, carrier: Carrier) -> None:
        """Check that LiteRT is installed, and has what the model needs."""
        check_size(len(_content(self.taken_graph(carrier), USUAL, planned=True)), self.format)

    def predict(self, carrier: Carrier) -> int:
        """Return about the bytes of the file; no weight is evaluated."""
        return len(_content(carrier.graph(), USUAL, planned=True))

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write the file.

        Raises:
            SpecError: LiteRT has no operator for a node.
        """
        path = directory / NAME
        with disk_errors(path):
            path.write_bytes(_content(carrier.graph(), context, planned=False))
        return (path,)

    def open(self, path: Path) -> Runner:
        """Open the file in LiteRT's interpreter."""
        self.need_package(self.package, self.module, path)
        from compressor.models.litert import LitertRunner

        return LitertRunner(path, f"artifact {path.name!r}")


def _content(model: ir.Model, context: ExportContext, *, planned: bool) -> bytes:
    """Return the bytes of a file; of the right size, with zeros for weights, if it is planned."""
    from compressor.exporters.litert.blocks import channel_orders
    from compressor.exporters.litert.lowering import Lowering
    from compressor.exporters.litert.operators import RULES
    from compressor.exporters.litert.store import Store

    store = Store(model, planned)
    store.orders.update(channel_orders(store))
    inputs, outputs = Lowering(store, RULES).run()
    written_by = f"compressor {version('compressor')}"
    return store.file.content(inputs, outputs, written_by, {_NOTE: note_of(context).encode()})
