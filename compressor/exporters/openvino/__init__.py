"""Export to OpenVINO's own format."""

from compressor.exporters.openvino.exporter import OpenvinoExporter

__all__ = ["OpenvinoExporter"]
