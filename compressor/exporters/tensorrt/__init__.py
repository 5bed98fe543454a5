"""The TensorRT artifact: ``model.engine``, and what is in it in ``model.engine.json``."""

from compressor.exporters.tensorrt.exporter import TensorrtExporter

__all__ = ["TensorrtExporter"]
