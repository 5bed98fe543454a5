"""The kinds of data files, by their key in the spec."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from calibration.sources.file_source import FileSource
from calibration.sources.images import ImageFolderSource
from calibration.sources.npy import NpySource
from calibration.sources.npz import NpzSource
from calibration.sources.safetensors_file import SafetensorsSource
from compressor.errors import SpecError

SOURCES: Mapping[str, type[FileSource]] = {
    "npz": NpzSource,
    "npy": NpySource,
    "safetensors": SafetensorsSource,
    "images": ImageFolderSource,
}


def open_source(kind: str, options: Mapping[str, Any]) -> FileSource:
    """Return the source of a kind, such as ``npz``.

    Args:
        kind: a key of ``SOURCES``.
        options: ``path``, ``fields``, ``samples`` and what else the kind has.

    Raises:
        SpecError: the kind or an option is wrong, or the path does not exist.
    """
    if kind not in SOURCES:
        close = difflib.get_close_matches(kind, SOURCES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        known = ", ".join(SOURCES)
        raise SpecError(f"data kind {kind!r}", "is not known", f"{hint}there are {known}")
    try:
        source = SOURCES[kind](**options)
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(map(str, first["loc"]))
        raise SpecError(f"{kind} data, option {option!r}", first["msg"], "correct it") from error
    if not source.path.exists():
        raise SpecError(source.subject, "does not exist", "correct the path")
    return source
