"""LiteRT files: the format of TensorFlow Lite, for phones and microcontrollers."""

from compressor.exporters.litert.exporter import LitertExporter

__all__ = ["LitertExporter"]
