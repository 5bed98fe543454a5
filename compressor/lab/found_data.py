"""What kind of data a file or a folder holds, by names and headers alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from compressor.calibration.sources.arrays import NpySource, NpzSource, SafetensorsSource
from compressor.calibration.sources.audio import WavFolderSource
from compressor.calibration.sources.documents import objects
from compressor.calibration.sources.file_source import FileSource, Header
from compressor.calibration.sources.images import ImageFolderSource
from compressor.errors import SpecError
from compressor.types.tensors import TensorSpec

_Value = TypeVar("_Value")
_MOST = 200_000  # files that are looked at
_FOR_RANGES = ("calibration", "training", "train")
_FOR_JUDGING = ("evaluation", "validation", "valid", "val", "test")
_WORDS = re.compile("[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # of x_train, trainX and XTrain
LABELS = ("label", "labels", "target", "targets", "y")
_OBJECTS = 100  # of JSON Lines, that are looked at
SUFFIXES = {
    "images": ImageFolderSource.suffixes,
    "wav": WavFolderSource.suffixes,
}
_NPZ = ".npz"
ARRAYS: dict[str, type[FileSource]] = {
    "npz": NpzSource,
    "npy": NpySource,
    "safetensors": SafetensorsSource,
}
_FILES = {f".{kind}": kind for kind in ARRAYS} | {".txt": "text", ".jsonl": "jsonl"}


@dataclass(frozen=True)
class Found:
    """Data that a starter spec can name.

    Attributes:
        kind: the data source.
        calibration: what sets ranges; the same as what judges, if there is only one part.
        files: how many files the latter has.
        typical: how many the former has.
        classes: how many class folders they lie in.
        arrays: of what judges, by their names: of a file, or of the first npz file in a folder.
        typical_arrays: those of what sets ranges; others only where a file holds both parts, as in
            ``x_train`` and ``x_test``.
        fields: of the first object of a jsonl file, those that the next objects have too.
    """

    for_ranges: ClassVar[int] = 512  # samples that set ranges, at most

    kind: str
    calibration: Path
    evaluation: Path
    files: int = 1
    typical: int = 1
    classes: int = 0
    arrays: Mapping[str, Header] = field(default_factory=dict)
    typical_arrays: Mapping[str, Header] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def feeds(self) -> bool:
        """Whether each sample is an npz file with all that the model takes at once."""
        return self.kind == "npz" and self.evaluation.is_dir()

    @property
    def stacked(self) -> bool:
        """Whether a file holds arrays with one row a sample."""
        return self.kind in ARRAYS and not self.feeds

    @property
    def shared(self) -> bool:
        """Whether the same samples would set ranges and judge."""
        return self.calibration == self.evaluation and self.arrays == self.typical_arrays

    def halves(self, least: int = 1) -> bool:
        """Whether each of the two gets half of the samples, and so at least so many."""
        lengths = [header.shape[0] for header in self.arrays.values() if header.shape]
        counted = self.kind in SUFFIXES or self.feeds
        held = self.files if counted else min(lengths, default=2 * least)
        return self.shared and held >= 2 * least

    def words(self) -> str:
        """Return what was found, such as ``20 images in 2 classes``."""
        place = "folder" if self.evaluation.is_dir() else "file"
        what = {"images": "images", "wav": "WAV files"}.get(self.kind, f"a {place} of {self.kind}")
        what = "npz files" if self.feeds else what
        count = f"{self.files:,} " if self.kind in SUFFIXES or self.feeds else ""
        return f"{count}{what}" + (f" in {self.classes:,} classes" if self.classes else "")


def whole_batches(
    found: Found | None, ranges: Iterable[str], judged: Iterable[str], batch: int
) -> tuple[int, int]:
    """Return how many samples set ranges, and how many judge where it cannot be all (else 0).

    Args:
        ranges: the arrays that are read for ranges.
        judged: those that are read to judge.
        batch: how many samples the model takes at a time; both numbers are multiples of it.
    """
    held: list[int | None] = [None, None]
    if found is not None and found.stacked:
        for place, arrays, names in (
            (0, found.typical_arrays, ranges),
            (1, found.arrays, judged),
        ):
            lengths = [arrays[n].shape[0] for n in names if n in arrays and arrays[n].shape]
            # Of halves, the first takes the odd one.
            parts = 2 if found.halves() else 1
            held[place] = (min(lengths) + (parts - 1) * (1 - place)) // parts if lengths else None
    typical, judging = held
    most = Found.for_ranges if typical is None or batch == 1 else min(Found.for_ranges, typical)
    whole = 0 if judging is None or judging % batch == 0 else judging // batch * batch
    return most // batch * batch or Found.for_ranges, whole


def look_at(place: Path) -> Found:
    """Return what kind of data a file or folder holds.

    Raises:
        SpecError: it does not exist, or holds nothing that is known.
        DataError: a line of JSON is none.
    """
    subject = f"data {str(place)!r}"
    if not place.exists():
        raise SpecError(subject, "does not exist", "check its spelling")
    if place.is_file() and place.suffix in _FILES:
        kind = _FILES[place.suffix]
        file = _of_arrays(kind, place, place)
        return replace(file, fields=_fields(place)) if kind == "jsonl" else file
    found = (_folder(place) or _feeds(place) or _npy_files(place)) if place.is_dir() else None
    if found is None:
        remedy = f"name a folder of images, WAV, npz or npy files, or a file: {', '.join(_FILES)}"
        raise SpecError(subject, "holds no known kind of data", remedy)
    return found


def _of_arrays(kind: str, calibration: Path, evaluation: Path) -> Found:
    """Return files with one row a sample; one alone may hold what sets ranges and what judges."""
    typical, judging = (
        ARRAYS[kind](path=place).readable() if kind in ARRAYS else {}
        for place in (calibration, evaluation)
    )
    if calibration == evaluation:
        parts = named(typical, _FOR_RANGES), named(judging, _FOR_JUDGING)
        typical, judging = parts if all(parts) else (typical, judging)
    return Found(kind, calibration, evaluation, arrays=judging, typical_arrays=typical)


def _npy_files(place: Path) -> Found | None:
    """Return a folder of npy files, each an array with one row a sample."""
    parts = _parts(place)
    if not all(any(folder.glob("*.npy")) for folder in parts):
        return None
    return _of_arrays("npy", *parts)


def beside(model: Path) -> list[Path]:
    """Return the folders beside a model that hold class folders of images, or WAV files."""
    entries = sorted(model.resolve().parent.iterdir())
    folders = [p for p in entries if p.is_dir() and not p.name.startswith(".")]
    seen = ((p, _folder(p)) for p in folders if p != model.resolve())
    return [p for p, found in seen if found and (found.classes > 1 or found.kind == "wav")]


def _fields(file: Path) -> dict[str, Any]:
    """Return what the first object of a file holds and those after it hold too."""
    with file.open("rb") as stream:
        seen = [value for _, value in islice(objects(file, stream), _OBJECTS)]
    first = seen[0] if seen else {}
    return {n: v for n, v in first.items() if all(_alike(o.get(n), v) for o in seen)}


def _alike(first: Any, second: Any) -> bool:
    numbers = int, float
    return type(first) is type(second) or {type(first), type(second)} == {*numbers}


def _folder(place: Path) -> Found | None:
    """Return what a folder holds, by the names of its files."""
    calibration, evaluation = _parts(place)
    for kind, suffixes in SUFFIXES.items():
        files, typical = (
            [p for p in _files(folder) if p.suffix.lower() in suffixes]
            for folder in (evaluation, calibration)
        )
        if files and typical:
            inside = {p.relative_to(evaluation).parts[0] for p in files if p.parent != evaluation}
            loose = any(p.parent == evaluation for p in files)
            classes = 0 if loose else len(inside)
            return Found(kind, calibration, evaluation, len(files), len(typical), classes)
    return None


def _feeds(place: Path) -> Found | None:
    """Return a folder of npz files, each a sample; those of folders in it are not looked at."""
    calibration, evaluation = _parts(place)
    files, typical = (sorted(f.glob(f"*{_NPZ}")) for f in (evaluation, calibration))
    if not files or not typical:
        return None
    arrays = NpzSource(path=files[0]).readable()
    counts = len(files), len(typical)
    return Found("npz", calibration, evaluation, *counts, arrays=arrays, typical_arrays=arrays)


def labels(arrays: Mapping[str, Header]) -> str:
    """Return the array with the class of each sample, by its usual names; empty without one."""
    classes = {n: a for n, a in arrays.items() if a.dtype.kind in "iu" and len(a.shape) == 1}
    return next((n for n in classes if n in LABELS), next(iter(named(classes, LABELS)), ""))


def as_whole(output: TensorSpec, header: Header) -> TensorSpec:
    """Return an output in the type of an array if both are whole numbers, of whatever width."""
    whole = output.dtype.startswith(("int", "uint")) and header.dtype.kind in "iu"
    return replace(output, dtype=header.dtype.name) if whole else output


def named(values: Mapping[str, _Value], words: Sequence[str]) -> dict[str, _Value]:
    """Return what has one of the words in its name."""
    spelled = {name: {w.lower() for w in _WORDS.findall(name)} for name in values}
    return {name: value for name, value in values.items() if not spelled[name].isdisjoint(words)}


def _parts(place: Path) -> tuple[Path, Path]:
    """Return the folders of what sets ranges and of what judges; the same if there are not two."""
    parts = {p.name.lower(): p for p in sorted(place.iterdir()) if p.is_dir()}
    calibration = next((parts[n] for n in _FOR_RANGES if n in parts), None)
    evaluation = next((parts[n] for n in _FOR_JUDGING if n in parts), None)
    if calibration is None or evaluation is None:
        return place, place
    return calibration, evaluation


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of those in it, but hidden ones."""
    for place, folders, names in islice(os.walk(folder), _MOST):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        yield from (Path(place, n) for n in sorted(names)[:_MOST] if not n.startswith("."))
