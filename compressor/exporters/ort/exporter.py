"""Export to ONNX Runtime's own format, for its builds for phones and browsers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from compressor.errors import ArtifactError, artifact_errors, first_line
from compressor.exporters.flatbuffer import check_size
from compressor.exporters.onnx.exporter import OnnxExporter
from compressor.exporters.onnx.matmul_nbits import Compute
from compressor.exporters.ort.sorted_file import with_sorted_kernels
from compressor.files import disk_errors, scratch, write_text
from compressor.graph.values import all_nodes
from compressor.models.onnx.ort_session import OrtRunner, failures
from compressor.progress import quiet_libraries
from compressor.types.carrier import Carrier, Runner
from compressor.types.exporter import ExportContext, Exporter

NAME = "model.ort"
_CONFIG = "required_operators.config"
_PORTABLE = ("NchwcTransformer",)  # blocks channels as this machine's processor wants them
_CODES = ("ConstantFolding",)  # would store float weights in place of codes
_OVERHEAD = 300  # bytes for each operator, as measured on quantized convolutional networks


class OrtExporter(Exporter):
    """Writes ``model.ort`` and ``required_operators.config`` for builds of ONNX Runtime.

    ONNX Runtime's packages for phones read this format without their ONNX parser. The graph is
    optimized for ONNX Runtime's CPU kernels, as far as that does not depend on the processor;
    weights stay codes. The second file lists the operators, opsets and types of the model:
    ``--include_ops_by_config`` of ONNX Runtime's build script leaves out all others.
    """

    format: ClassVar[str] = "ort"
    version: ClassVar[int] = 4
    estimated: ClassVar[bool] = True  # ONNX Runtime decides what the file takes

    matmul_compute: Compute = Field(
        default="float32", description="as in the format onnx: float32 is exact, int8 is faster"
    )

    @property
    def packs_pairs(self) -> bool:
        """For ONNX Runtime."""
        return self._onnx.packs_pairs

    @property
    def targets(self) -> frozenset[str]:
        """ONNX Runtime's CPU kernels."""
        return self._onnx.targets

    @property
    def tools(self) -> Mapping[str, str]:
        """The version of ONNX Runtime, which writes the file."""
        import onnxruntime

        return {"onnxruntime": onnxruntime.__version__}

    @property
    def _onnx(self) -> OnnxExporter:
        return OnnxExporter(matmul_compute=self.matmul_compute)

    def check(self, carrier: Carrier) -> None:
        """Check that ONNX Runtime takes what the model holds."""
        self._onnx.check(carrier)
        check_size(self._onnx.predict(carrier), self.format)

    def predict(self, carrier: Carrier) -> int:
        """Return about the bytes of both files; no weight is evaluated."""
        nodes = len(list(all_nodes(carrier.graph().graph)))
        return self._onnx.predict(carrier) + _OVERHEAD * nodes

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write both files.

        Raises:
            ArtifactError: ONNX Runtime does not load the graph, or writes an unknown layout.
        """
        path, config = directory / NAME, directory / _CONFIG
        with scratch() as folder, disk_errors(path):
            source = self._onnx.write(carrier, folder, context)[0]
            made = folder / NAME
            _convert(source, made)
            path.write_bytes(with_sorted_kernels(made.read_bytes()))
            write_text(config, _operators(path, folder))
        return (path, config)

    def open(self, path: Path) -> Runner:
        """Open the file in ONNX Runtime's CPU provider."""
        with artifact_errors():
            return OrtRunner(path, f"artifact {path.name!r}")


def _convert(source: Path, target: Path) -> None:
    """Let ONNX Runtime optimize a file and write it in its own format."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(target)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.save_model_format", "ORT")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    disabled: Any = [*_PORTABLE, *_CODES]
    try:
        ort.InferenceSession(
            str(source),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=disabled,
        )
    except failures() as error:
        raise ArtifactError(
            "export ort",
            f"ONNX Runtime does not load the graph ({first_line(error)})",
            "export onnx",
        ) from error


def _operators(path: Path, folder: Path) -> str:
    """Return the list of operators that a file needs, as ONNX Runtime's build script reads it."""
    from onnxruntime.tools.ort_format_model import create_config_from_models

    found = folder / _CONFIG
    with quiet_libraries():
        create_config_from_models([path], found, True)
    lines = [line for line in found.read_text("utf-8").splitlines() if not line.startswith("#")]
    return f"# Operators of {NAME}\n" + "".join(f"{line}\n" for line in lines)
