"""Files of a folder, compared with what must be true of them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from compressor.errors import ModelError, SpecError
from compressor.files import STAGING, file_sha256, settle
from compressor.progress import Progress
from compressor.run.store import STORE
from compressor.types.proofs import ExpectedFile

State = Literal["unchanged", "changed", "missing", "new"]


@dataclass(frozen=True)
class FileState:
    """A file, compared with what must be true of it.

    Attributes:
        bytes: its size; ``None`` where it is missing.
        detail: what is wrong with it, as far as that is known.
        tensors: names of the tensors in it that are not as they were written.
    """

    name: str
    state: State
    bytes: int | None
    detail: str = ""
    tensors: tuple[str, ...] = ()


def settled_folder(path: Path) -> Path:
    """Return the folder that is at a path or holds it, with all files in their places.

    Raises:
        SpecError: nothing is at the path.
        InputError: see :func:`compressor.files.settle`.
    """
    if not path.exists():
        raise SpecError(f"path {str(path)!r}", "does not exist", "check its spelling")
    folder = path if path.is_dir() else path.parent
    settle(folder)
    return folder


def compare(
    folder: Path, expected: Collection[ExpectedFile], progress: Progress
) -> tuple[FileState, ...]:
    """Compare files of a folder with their hashes."""
    states = []
    with progress.stage("compare files", len(expected)) as advance:
        for file in expected:
            states.append(_state(folder / file.name, file))
            advance(len(states))
    return tuple(states)


def _state(path: Path, expected: ExpectedFile) -> FileState:
    if not path.is_file():  # following links, to nothing but files
        return FileState(expected.name, "missing", None)
    same = file_sha256(path) == expected.sha256
    return FileState(expected.name, "unchanged" if same else "changed", path.stat().st_size)


def new_files(folder: Path, listed: Iterable[str]) -> tuple[FileState, ...]:
    """Return the files of a folder that nothing is said about; a run's store is left out."""
    names = set(listed)
    return tuple(
        FileState(name, "new", (folder / name).lstat().st_size)
        for name in sorted(files_in(folder))
        if name not in names
    )


def files_in(folder: Path) -> Iterator[str]:
    """Yield the names of all files in a folder, except for a run's store; links are not entered."""
    for place, folders, files in os.walk(folder):
        if Path(place) == folder:
            folders[:] = [f for f in folders if f != STORE and not f.startswith(STAGING)]
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for name in (*files, *links):
            yield (Path(place) / name).relative_to(folder).as_posix()


def checked_name(name: Any, subject: str) -> str:
    """Return the name of a file that some list gives, if it leads into the list's folder.

    Raises:
        ModelError: it does not.
    """
    inside = isinstance(name, str) and name.isprintable() and "\\" not in name
    if inside:
        path = PurePosixPath(name)
        inside = path.as_posix() == name and not path.is_absolute() and ".." not in path.parts
    if not inside or name == ".":
        raise ModelError(
            subject,
            f"names {name!r}, which is not a file in its folder",
            "it was not written by compressor: do not trust it",
        )
    return str(name)
