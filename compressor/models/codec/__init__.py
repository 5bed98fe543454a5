"""Compressed models as the safetensors exporter writes them: how they are stored and opened."""

from compressor.models.codec.description import DESCRIPTION, FORMAT, SCHEMA
from compressor.models.codec.forms import STORED, Entry
from compressor.models.codec.load import RuntimeModule, check, check_graph, load
from compressor.models.codec.weight_files import DIGEST, INDEX, WEIGHTS, WRITER

__all__ = [
    "DESCRIPTION",
    "DIGEST",
    "FORMAT",
    "INDEX",
    "SCHEMA",
    "STORED",
    "WEIGHTS",
    "WRITER",
    "Entry",
    "RuntimeModule",
    "check",
    "check_graph",
    "load",
]
