"""The ONNX artifact: ``model.onnx``, with ``model.onnx.data`` where it is needed."""

from compressor.exporters.onnx.exporter import OnnxExporter

__all__ = ["OnnxExporter"]
