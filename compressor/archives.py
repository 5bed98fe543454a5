"""Archives: one small file that holds what another export writes.

The exporter ``archive`` writes and reads them; it is found through the catalog.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compressor import catalog
from compressor.progress import Progress, Silent

MAGIC = b"CMPRSAR1"
"""What an archive begins with."""


@dataclass(frozen=True)
class UnpackedFile:
    """A file that was taken out of an archive.

    Attributes:
        name: its name.
        bytes: its size.
        sha256: the hash of its bytes, in hexadecimal.
    """

    name: str
    bytes: int
    sha256: str


def is_archive(path: Path) -> bool:
    """Tell whether a file begins as an archive does."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def unpack(
    path: Path,
    folder: Path,
    tensors: Sequence[str] = (),
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> tuple[UnpackedFile, ...]:
    """Take the files out of an archive; they are those that were put into it, bit for bit.

    Args:
        path: the archive.
        folder: where the files go; made if it is not there.
        tensors: take these alone; files of weights then hold nothing else.
        force: write into a folder that holds files; those of the same names are replaced.
        progress: shows how far it is.

    Raises:
        SpecError: the archive is not there, the folder is not empty, or no tensor has a name.
        ModelError: the archive is cut or damaged.
        InputError: the disk is full.
    """
    found: tuple[UnpackedFile, ...] = catalog.resolve(catalog.UNPACK)(
        path, folder, tuple(tensors), force, progress or Silent()
    )
    return found


def stored_bytes(path: Path) -> dict[str, int]:
    """Return the bytes that each tensor takes in an archive, by name.

    Raises:
        ModelError: the archive is cut or damaged.
    """
    found: dict[str, int] = catalog.resolve(catalog.ARCHIVE_SIZES)(path)
    return found


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Yield a folder with the files of an archive; it is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="archive-"))
    try:
        unpack(path, folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
