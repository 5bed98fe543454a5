"""The page of ``compress unpack``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compressor.report import formats
from compressor.report.terminal import label, plain_table

if TYPE_CHECKING:
    from rich.table import Table

    from compressor.archives import UnpackedFile


def unpacked_table(files: Sequence[UnpackedFile]) -> Table:
    """Return the files with their sizes and hashes."""
    table = plain_table()
    table.add_column("file", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("sha256", overflow="fold")
    for file in files:
        table.add_row(label(file.name), formats.size(file.bytes), file.sha256)
    return table
