"""The ``compress`` command: it parses, calls the library and prints."""

from __future__ import annotations

from compressor.cli.application import main

__all__ = ["main"]
