"""Ahead-of-time model compression and export: one spec in, proven artifacts out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.errors import CompressorError
    from compressor.models.codec.load import load

__all__ = ["CompressorError", "__version__", "load"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import on first use: ``import compressor`` alone must stay instant."""
    if name == "load":
        from compressor.models.codec.load import load

        return load
    if name == "CompressorError":
        from compressor.errors import CompressorError

        return CompressorError
    raise AttributeError(f"module 'compressor' has no attribute {name!r}")
