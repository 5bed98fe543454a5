"""Export to OpenVINO IR: the two files that OpenVINO's own programs and runtimes take."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compressor.errors import ArtifactError, artifact_errors
from compressor.exporters.onnx.exporter import OnnxExporter
from compressor.files import disk_errors, scratch
from compressor.graph.values import all_nodes
from compressor.models.onnx.runtimes import OpenVinoRunner, openvino_reason
from compressor.types.carrier import Carrier, Runner
from compressor.types.exporter import ExportContext, Exporter

if TYPE_CHECKING:
    import openvino

NAME = "model.xml"
_WEIGHTS = "model.bin"
_ONNX = OnnxExporter(target="openvino")
_OVERHEAD = 1900  # bytes of XML for each operator: 1,200 to 2,700 in 23 of 24 networks


class OpenvinoExporter(Exporter):
    """Writes ``model.xml`` and ``model.bin``: the graph and the weights of OpenVINO IR.

    The codes and scales that passes have found are written as they are, in the types that they
    have; nothing is rounded to float16. OpenVINO reads ONNX files too (format ``onnx`` with target
    ``openvino``); these files need no ONNX front end on the device.
    """

    format: ClassVar[str] = "openvino"
    targets: ClassVar[frozenset[str]] = _ONNX.targets
    estimated: ClassVar[bool] = True  # OpenVINO decides what the files take

    @property
    def run_by(self) -> Mapping[str, str]:
        """The version of OpenVINO."""
        return self.tools

    @property
    def tools(self) -> Mapping[str, str]:
        """The version of OpenVINO, which writes the files."""
        self.need_package("openvino")
        return {"openvino": version("openvino")}

    def check(self, carrier: Carrier) -> None:
        """Check that OpenVINO is installed, and takes what the model holds."""
        self.need_package("openvino")
        _ONNX.check(carrier)

    def predict(self, carrier: Carrier) -> int:
        """Return about the bytes of both files; no weight is evaluated."""
        nodes = len(list(all_nodes(carrier.graph().graph)))
        return _ONNX.predict(carrier) + _OVERHEAD * nodes

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write both files.

        Raises:
            ArtifactError: OpenVINO does not read the graph.
        """
        import openvino

        path = directory / NAME
        with scratch() as folder, disk_errors(path):
            source = _ONNX.write(carrier, folder, context)[0]
            try:
                model = openvino.Core().read_model(source)
                _name_operators(model)
                openvino.save_model(model, path, compress_to_fp16=False)
            except RuntimeError as error:
                raise ArtifactError(
                    "export openvino",
                    f"OpenVINO does not take the graph ({openvino_reason(error)})",
                    "leave it out, or export onnx for another target",
                ) from error
        return (path, directory / _WEIGHTS)

    def open(self, path: Path) -> Runner:
        """Open the files in OpenVINO's CPU plugin."""
        self.need_package("openvino", opened=path)
        with artifact_errors():
            return OpenVinoRunner(path, f"artifact {path.name!r}")


def _name_operators(model: openvino.Model) -> None:
    """Name operators after what they write, or else by their place.

    OpenVINO numbers them through a process, so that the same model would give other bytes.
    """
    for place, node in enumerate(model.get_ordered_ops()):
        names: list[Any] = sorted(name for output in node.outputs() for name in output.names)
        node.set_friendly_name(names[0] if names else f"{node.get_type_name()}_{place}")
