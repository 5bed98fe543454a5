"""The exporter ``gguf``: one file with weights, configuration and tokenizer, for llama.cpp."""

from compressor.exporters.gguf.exporter import GgufExporter

__all__ = ["GgufExporter"]
