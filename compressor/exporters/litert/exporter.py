"""Export to LiteRT, the format of TensorFlow Lite."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import onnx_ir as ir

from compressor.errors import SpecError
from compressor.exporters.byte_codes import check_codes
from compressor.files import disk_errors
from compressor.types.carrier import Capability, Carrier, Runner
from compressor.types.exporter import USUAL, ExportContext, Exporter

NAME = "model.tflite"
_PACKAGE = "ai-edge-litert"
_LIMIT = 2**31  # bytes, of a flatbuffer
_NOTE = "compressor"
_PHONES = ("aarch64", "arm64", "armv7l", "armv8l")


class LitertExporter(Exporter):
    """Writes ``model.tflite``, for LiteRT (TensorFlow Lite) on phones.

    The codes and scales that passes have found are written as they are: ``uint8`` activations
    become ``int8`` by moving their zero point, and nothing is calibrated again. Inputs and outputs
    keep the names, the shapes and the order of axes that the model has.
    """

    format: ClassVar[str] = "litert"

    @property
    def targets(self) -> frozenset[str]:
        """LiteRT, whose rules passes should follow."""
        return frozenset({"litert"})

    @property
    def run_by(self) -> Mapping[str, str]:
        """The version of LiteRT."""
        _check_installed()
        return {_PACKAGE: version(_PACKAGE)}

    @property
    def tools(self) -> Mapping[str, str]:
        """The version of the package whose schema is written."""
        return self.run_by

    @property
    def exact(self) -> bool:
        """Its kernels add in 32 bits."""
        return True

    @property
    def not_judged(self) -> str:
        """Why latency is not judged: the kernels for this machine's processor are others."""
        if platform.machine() in _PHONES:
            return ""
        return "meant for phones, timed on this machine's processor"

    def check(self, carrier: Carrier) -> None:
        """Check that LiteRT is installed, and has what the model needs.

        Raises:
            SpecError: naming the node or value, and what to change.
        """
        _check_installed()
        if Capability.GRAPH not in carrier.offers:
            raise SpecError(
                "export litert",
                f"needs a graph, but a {carrier.kind} model has none",
                "give model.factory or model.onnx",
            )
        model = carrier.graph()
        check_codes(model, "LiteRT")
        size = len(_content(model, USUAL, planned=True))
        if size >= _LIMIT:
            raise SpecError(
                "export litert",
                f"takes {size:,} bytes, and a file of this format 2 GB at most",
                "export onnx, whose weights may have a file of their own",
            )

    def predict(self, carrier: Carrier) -> int:
        """Return about the bytes of the file; no weight is evaluated."""
        return len(_content(carrier.graph(), USUAL, planned=True))

    @property
    def estimated(self) -> bool:
        """Equal scales, which are known later, save an operator."""
        return True

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write the file.

        Raises:
            SpecError: LiteRT has no operator for a node.
            InputError: the disk is full.
        """
        path = directory / NAME
        with disk_errors(path):
            path.write_bytes(_content(carrier.graph(), context, planned=False))
        return (path,)

    def open(self, path: Path) -> Runner:
        """Open the file in LiteRT's interpreter.

        Raises:
            ArtifactError: it does not load.
        """
        _check_installed()
        from compressor.models.litert import LitertRunner

        return LitertRunner(path if path.is_file() else path / NAME, f"artifact {path.name!r}")


def _content(model: ir.Model, context: ExportContext, *, planned: bool) -> bytes:
    """Return the bytes of a file; of the right size, with zeros for weights, if it is planned."""
    from compressor.exporters.litert.lowering import Lowering
    from compressor.exporters.litert.operators import RULES
    from compressor.exporters.litert.store import Store

    store = Store(model, planned)
    inputs, outputs = Lowering(store, RULES).run()
    release = version("compressor")
    note = f"compressor {release}, {context.name}, spec {context.spec_digest}"
    return store.file.content(inputs, outputs, f"compressor {release}", {_NOTE: note.encode()})


def _check_installed() -> None:
    if find_spec("ai_edge_litert") is None:
        raise SpecError(
            "export litert",
            f"needs the package {_PACKAGE}, which is not installed",
            'run pip install "compressor[litert]"',
        )
