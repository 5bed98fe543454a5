"""``python -m compressor`` is ``compress``."""

from __future__ import annotations

from compressor.cli import main

main()
