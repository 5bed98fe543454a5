"""The storage artifact: ``model.safetensors`` and ``model.json``."""

from compressor.exporters.safetensors.exporter import SafetensorsExporter

__all__ = ["SafetensorsExporter"]
