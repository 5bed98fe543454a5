"""ONNX with a cache of keys and values, for onnxruntime-genai."""

from compressor.exporters.genai.exporter import GenaiExporter

__all__ = ["GenaiExporter"]
