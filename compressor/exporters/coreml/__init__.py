"""Core ML packages, for Apple's devices."""

from compressor.exporters.coreml.exporter import CoremlExporter

__all__ = ["CoremlExporter"]
