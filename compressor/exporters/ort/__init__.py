"""Export to ONNX Runtime's own format."""

from compressor.exporters.ort.exporter import OrtExporter

__all__ = ["OrtExporter"]
