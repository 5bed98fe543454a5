"""Folders of files, one a sample, or of class folders with such files in them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

import numpy as np
from pydantic import Field

from compressor.calibration.sources.file_source import Header, IndexedFileSource, ReadAt
from compressor.calibration.sources.image_processors import classes_beside
from compressor.errors import DataError, listed, suggestion
from compressor.files import json_sha256

Item: TypeAlias = tuple[Path, int]
"""A file and its label."""


class ClassFolderSource(IndexedFileSource):
    """Samples that are files of their own; the folders that they lie in are their classes."""

    suffixes: ClassVar[frozenset[str]]
    files_are: ClassVar[str]  # how errors name them, such as images
    says_how: ClassVar[frozenset[str]]  # keys that tell how a file becomes an array

    preprocessor: Path | None = None
    classes: dict[str, Annotated[int, Field(ge=0)]] | None = Field(
        default=None,
        description="class folder: its label; default label2id in config.json beside the "
        "preprocessor's file if it names all folders, otherwise their order by name",
    )

    @abstractmethod
    def forms(self, items: list[Item]) -> dict[str, Header]:
        """Return the headers of the arrays that files give, without the labels."""

    @abstractmethod
    def readers(self, items: list[Item]) -> dict[str, ReadAt]:
        """Return how those arrays are read."""

    @abstractmethod
    def preparation(self) -> tuple[Any, str]:
        """Return how files become arrays: the settings, and a description of them."""

    def headers(self) -> dict[str, Header]:
        """Return the headers of arrays and labels, from the names of the files."""
        items = self._items()
        if not items:
            needed = f"it needs files like {', '.join(sorted(self.suffixes))}"
            raise DataError(self.subject, f"has no {self.files_are}", needed)
        headers = self.forms(items)
        if self._folders:
            headers["label"] = Header((len(items),), np.dtype(np.int64))
        return headers

    def open_at(self, arrays: Mapping[str, str]) -> dict[str, ReadAt]:
        """List the files; each is decoded when it is requested."""
        items = self._items()
        labels = np.array([label for _, label in items], np.int64)
        readers = {**self.readers(items), "label": lambda rows: labels[rows]}
        return {name: readers[stored] for name, stored in arrays.items()}

    def files(self) -> list[tuple[str, Path]]:
        """Return the files that are read."""
        return [(path.relative_to(self.path).as_posix(), path) for path, _ in self._items()]

    def digest(self) -> str:
        """Return a SHA-256 of the files, of what is done to them, and of the labels."""
        with self._guard():
            named = ((name.encode() + b"\0", path) for name, path in self.files())
            content = self.hashed({"path", "classes", *self.says_how}, named)
            numbers = sorted(self._numbers.items())
        return json_sha256([content, self.preparation()[0], numbers])

    def described(self) -> str:
        """Return in one line what becomes of the files."""
        parts = [self.preparation()[1]]
        if self._folders:
            numbers = sorted(self._numbers.items(), key=lambda entry: entry[1])
            parts.append(f"{len(numbers)} classes: {listed([name for name, _ in numbers], 3)}")
        return "; ".join(parts)

    @cached_property
    def _folders(self) -> list[Path]:
        return sorted(p for p in self.path.iterdir() if p.is_dir() and not p.name.startswith("."))

    @property
    def numbered_by_order(self) -> int:
        """How many class folders have the numbers of their order; 0 where somebody named them."""
        return 0 if self.classes is not None or self._known else len(self._folders)

    @cached_property
    def _known(self) -> dict[str, int]:
        """What ``config.json`` beside the preprocessor says, if it names all folders."""
        known = {} if self.preprocessor is None else classes_beside(self.preprocessor)
        names = [folder.name for folder in self._folders]
        return {n: known[n] for n in names} if all(n in known for n in names) else {}

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The labels of class folders."""
        names = [folder.name for folder in self._folders]
        if self.classes is not None:
            for name in names:
                if name not in self.classes:
                    problem = f"has the class folder {name!r}, which classes does not name"
                    raise DataError(self.subject, problem, suggestion(name, self.classes))
            return {name: self.classes[name] for name in names}
        return self._known or {name: label for label, name in enumerate(names)}

    def _items(self) -> list[Item]:
        loose = sorted(path for path in self.path.iterdir() if self._is_one(path))
        if self._folders and loose:
            raise DataError(
                self.subject,
                f"has class folders and also loose {self.files_are}, such as '{loose[0].name}'",
                f"put all {self.files_are} into class folders, or none",
            )
        items = [(path, 0) for path in loose]
        for folder in self._folders:
            inside = (path for path in folder.rglob("*") if self._is_one(path))
            items += [(path, self._numbers[folder.name]) for path in sorted(inside)]
        if self.samples is not None and self.samples < len(items):
            items = [items[i * len(items) // self.samples] for i in range(self.samples)]
        return items

    def _is_one(self, path: Path) -> bool:
        named = path.suffix.lower() in self.suffixes and not path.name.startswith(".")
        return named and path.is_file()
