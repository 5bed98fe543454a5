"""The exporter ``archive``: the smallest file."""

from exporters.archive.exporter import ArchiveExporter

__all__ = ["ArchiveExporter"]
