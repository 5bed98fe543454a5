"""The exporter ``archive``: the smallest file."""

from compressor.exporters.archive.exporter import ArchiveExporter

__all__ = ["ArchiveExporter"]
