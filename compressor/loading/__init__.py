"""Compressed models as the safetensors exporter writes them: how they are stored and opened."""

from compressor.loading.description import DESCRIPTION, FORMAT, SCHEMA
from compressor.loading.forms import STORED, Entry
from compressor.loading.load import check, load
from compressor.loading.weight_files import DIGEST, INDEX, WEIGHTS, WRITER

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
    "check",
    "load",
]
