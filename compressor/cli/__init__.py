"""The ``compress`` command: it parses, calls the library and prints."""

from __future__ import annotations

from typing import NoReturn

from compressor.cli.signals import end_silently_on_interrupt

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line of this process."""
    end_silently_on_interrupt()
    from compressor.cli.application import main as run

    run()
