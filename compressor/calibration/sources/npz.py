"""Arrays in an npz archive, as ``numpy.savez`` and ``numpy.savez_compressed`` write it."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

from compressor.calibration.sources.file_source import FileSource
from compressor.calibration.sources.headers import Header
from compressor.calibration.sources.rows import Rows, StreamRows, read_header

_SUFFIX = ".npy"


class NpzSource(FileSource):
    """Named arrays of an npz archive.

    Members are decompressed as far as a batch needs them. Object arrays, which are pickles,
    are refused.
    """

    kind: ClassVar[str] = "npz archive"

    def headers(self) -> dict[str, Header]:
        """Return the headers of all members that are arrays."""
        headers = {}
        with zipfile.ZipFile(self.path) as archive:
            for member in archive.infolist():
                if member.filename.endswith(_SUFFIX):
                    name = member.filename.removesuffix(_SUFFIX)
                    headers[name] = _checked_header(archive, member)
        return headers

    @contextmanager
    def open_rows(self, chosen: Mapping[str, str]) -> Iterator[dict[str, Rows]]:
        """Open the members."""
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(self.path))
            rows: dict[str, Rows] = {}
            for name, stored in chosen.items():
                stream = stack.enter_context(archive.open(stored + _SUFFIX))
                rows[name] = StreamRows(stream, read_header(stream))
            yield rows

    def files(self) -> list[tuple[str, Path]]:
        """Return the archive."""
        return [("", self.path)]


def _checked_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Header:
    with archive.open(member) as stream:
        header = read_header(stream)
        have = member.file_size - stream.tell()
    if have != header.nbytes and not header.dtype.hasobject:
        raise ValueError(f"{member.filename} has {have} bytes of data, not {header.nbytes}")
    return header
