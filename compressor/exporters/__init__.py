"""Artifact formats: each checks, predicts, writes and reopens one.

Their classes are here, too, for specs in Python; each is imported on first use.

    >>> from compressor.exporters import OnnxExporter
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.catalog import lazy_classes

if TYPE_CHECKING:
    from compressor.exporters.archive.exporter import ArchiveExporter as ArchiveExporter
    from compressor.exporters.coreml.exporter import CoremlExporter as CoremlExporter
    from compressor.exporters.executorch.exporter import ExecutorchExporter as ExecutorchExporter
    from compressor.exporters.genai.exporter import GenaiExporter as GenaiExporter
    from compressor.exporters.gguf.exporter import GgufExporter as GgufExporter
    from compressor.exporters.litert.exporter import LitertExporter as LitertExporter
    from compressor.exporters.onnx.exporter import OnnxExporter as OnnxExporter
    from compressor.exporters.openvino.exporter import OpenvinoExporter as OpenvinoExporter
    from compressor.exporters.ort.exporter import OrtExporter as OrtExporter
    from compressor.exporters.safetensors.exporter import SafetensorsExporter as SafetensorsExporter
    from compressor.exporters.tensorrt.exporter import TensorrtExporter as TensorrtExporter

__getattr__, __dir__ = lazy_classes("exporter", __name__)
