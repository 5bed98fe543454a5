"""Data for a starter spec: looked at where they lie, and written as a model's inputs want them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import get_args

from compressor import catalog
from compressor.calibration.sources.arrays import NpzSource
from compressor.calibration.sources.audio import WavFolderSource, extractor_file
from compressor.calibration.sources.file_source import Header
from compressor.calibration.sources.image_processors import processor_file
from compressor.calibration.sources.images import ImageFolderSource
from compressor.errors import SpecError, printable, suggestion
from compressor.lab.starter_parts import FILES, FILES_FOR_RANGES, scalar
from compressor.types.tensors import TensorSpec, fixed_batch

_MOST = 200_000  # files that are looked at
_SAMPLES = 512  # that calibrate
_SIDE = 224  # of images, where the model does not say
_RATE = 16_000  # samples a second, where nothing says
_FOR_RANGES = ("calibration", "training", "train")
_FOR_JUDGING = ("evaluation", "validation", "valid", "val", "test")
_SUFFIXES = {
    "images": ImageFolderSource.suffixes,
    "wav": WavFolderSource.suffixes,
}
_NONE = "-"  # an answer
_NPZ = ".npz"
_FILES = {_NPZ: "npz", ".txt": "text", ".jsonl": "jsonl"}
_IMAGENET = "[0.485, 0.456, 0.406]", "[0.229, 0.224, 0.225]"


@dataclass(frozen=True)
class Choices:
    """What ``compress init`` was told, or answered.

    Attributes:
        data: a folder of images, WAV or npz files, or a file of text or arrays.
        target: where the ONNX file will run.
        metric: what is measured.
    """

    data: Path | None = None
    target: str | None = None
    metric: str | None = None

    def with_answer(self, key: str, answer: str) -> Choices:
        """Return the choices with the answer to a question; ``-`` leaves a metric open."""
        value: Path | str | None = Path(answer) if key == "data" else answer
        value = None if key == "metric" and answer == _NONE else value
        return replace(self, **{key: value})  # type: ignore[arg-type]  # each of its own type


@dataclass(frozen=True)
class Question:
    """What a person at a terminal is asked: a field of :class:`Choices`."""

    key: str
    text: str
    default: str
    allowed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """Data that a starter spec can name.

    Attributes:
        kind: the data source.
        calibration: what sets ranges; the same as what judges, if there is only one part.
        files: how many files the latter has.
        typical: how many the former has.
        classes: how many class folders they lie in.
        arrays: of an npz file, or of the first in a folder of them, by their names.
    """

    kind: str
    calibration: Path
    evaluation: Path
    files: int = 1
    typical: int = 1
    classes: int = 0
    arrays: Mapping[str, Header] = field(default_factory=dict)

    @property
    def feeds(self) -> bool:
        """Whether each sample is an npz file with all that the model takes at once."""
        return self.kind == "npz" and self.evaluation.is_dir()

    @property
    def shared(self) -> bool:
        """Whether what sets ranges and what judges are one file or folder."""
        return self.calibration == self.evaluation

    def halves(self, least: int = 1) -> bool:
        """Whether each of the two gets half of the samples, and so at least so many."""
        lengths = [header.shape[0] for header in self.arrays.values() if header.shape]
        held = self.files if self.kind in _SUFFIXES else min(lengths, default=2 * least)
        return self.shared and not self.feeds and held >= 2 * least

    def words(self) -> str:
        """Return what was found, such as ``20 images in 2 classes``."""
        what = {"images": "images", "wav": "WAV files"}.get(self.kind, f"a file of {self.kind}")
        what = "npz files" if self.feeds else what
        count = f"{self.files:,} " if self.kind in _SUFFIXES or self.feeds else ""
        return f"{count}{what}" + (f" in {self.classes:,} classes" if self.classes else "")


def look_at(place: Path) -> Found:
    """Return what kind of data a file or folder holds.

    Raises:
        SpecError: it does not exist, or holds nothing that is known.
    """
    subject = f"data {str(place)!r}"
    if not place.exists():
        raise SpecError(subject, "does not exist", "check its spelling")
    if place.is_file() and place.suffix in _FILES:
        arrays = NpzSource(path=place).headers() if place.suffix == _NPZ else {}
        return Found(_FILES[place.suffix], place, place, arrays=arrays)
    found = (_folder(place) or _feeds(place)) if place.is_dir() else None
    if found is None:
        remedy = "name a folder of images, WAV or npz files, or a file: .npz, .txt or .jsonl"
        raise SpecError(subject, "holds no data that are known", remedy)
    return found


def beside(model: Path) -> list[Path]:
    """Return the folders beside a model that hold class folders of images, or WAV files."""
    entries = sorted(model.resolve().parent.iterdir())
    folders = [p for p in entries if p.is_dir() and not p.name.startswith(".")]
    seen = ((p, _folder(p)) for p in folders if p != model.resolve())
    return [p for p, found in seen if found and (found.classes > 1 or found.kind == "wav")]


def questions(model: Path, choices: Choices) -> Iterator[Question]:
    """Yield what a person can be asked beyond what is chosen already."""
    if choices.data is None:
        near = beside(model)
        if len(near) == 1:
            found = look_at(near[0]).words()
            yield Question("data", f"Data ({found}; - for none)", os.path.relpath(near[0]))
        else:
            yield Question("data", "Data, a folder or a file (- for none)", _NONE)
    if choices.target is None:
        yield Question("target", "Where will it run", "ort-cpu", targets())
    if choices.metric is None:
        yield Question("metric", "Metric, such as accuracy (- for what fits the data)", _NONE)


def settled(model: Path, choices: Choices) -> tuple[Choices, Found | None]:
    """Check the choices; where no data were chosen, take those beside the model if it is clear.

    Raises:
        SpecError: there is no such target or metric, or the data are not usable.
    """
    for key, name, known in (
        ("target", choices.target, targets()),
        ("metric", choices.metric, catalog.names("metric")),
    ):
        if name is not None and name not in known and not (key == "metric" and ":" in name):
            raise SpecError(f"option --{key}", f"is {name!r}", suggestion(name, known))
    if choices.data is not None:
        return choices, None if str(choices.data) == _NONE else look_at(choices.data)
    near = beside(model)
    return choices, look_at(near[0]) if len(near) == 1 else None


def targets() -> tuple[str, ...]:
    """Return where an ONNX file can run."""
    return get_args(catalog.load("exporter", "onnx").model_fields["target"].annotation)


@dataclass(frozen=True)
class Given:
    """What a starter spec is written with, beside the model's own inputs.

    Attributes:
        folder: where the spec will lie.
    """

    model: Path
    folder: Path
    choices: Choices
    found: Found | None

    def part(self, inputs: Sequence[TensorSpec], *, calibrated: bool, scored: bool) -> str:
        """Return the part ``data`` for a folder; empty if there is none for these inputs.

        Args:
            scored: the model gives each sample one score for each class.

        Raises:
            SpecError: a folder was asked for, and no input is like what it holds.
        """
        found = self.found
        if found is None or found.kind not in _SUFFIXES:
            return ""
        text = _of_folder(found, self, inputs, calibrated=calibrated, scored=scored)
        if not text and self.choices.data is not None:
            listed = ", ".join(map(str, inputs))
            problem = f"holds {found.words()}, and no input of the model is like them: {listed}"
            remedy = "leave --data out, and write a factory (your own function) into the spec"
            raise SpecError(f"data {str(self.choices.data)!r}", problem, remedy)
        return text

    def names(self, inputs: Sequence[TensorSpec]) -> dict[str, str]:
        """Return the array for each input: of its name, or the only one of its form.

        An input that none is found for keeps its own name.
        """
        arrays = {} if self.found is None else dict(self.found.arrays)
        names = {spec.name: spec.name for spec in inputs}
        left = {name: header for name, header in arrays.items() if name not in names}
        for spec in inputs:
            if spec.name in arrays:
                continue
            like = [name for name, header in left.items() if self._fits(spec, header)]
            if len(like) == 1:
                names[spec.name] = like[0]
                del left[like[0]]
        return names

    def _fits(self, spec: TensorSpec, header: Header) -> bool:
        shape = header.shape
        if self.found is not None and not self.found.feeds and spec.shape and shape:
            first = spec.shape[0]
            shape = (first if isinstance(first, int) else shape[0], *shape[1:])
        return spec.mismatch(shape, header.dtype.name) is None

    def chosen(self, text: str) -> str:
        """Return a spec with the file, target and metric that were chosen in place of its own."""
        found, choices = self.found, self.choices
        if found is not None and found.kind not in _SUFFIXES:
            places = {
                "calibration": _seen_from(self.folder, found.calibration),
                "evaluation": _seen_from(self.folder, found.evaluation),
            }
            folds = {"calibration": "1/2", "evaluation": "2/2"} if found.halves() else {}
            note = " # CHECK: calibration and evaluation apart" if found.shared else ""
            if not re.search(rf"^    {found.kind}: ", text, re.MULTILINE):
                problem = f"is {found.words()}, which this model's spec does not take"
                remedy = "give a file or folder of what the model takes, such as .npz"
                raise SpecError(f"data {str(choices.data)!r}", problem, remedy)
            text = re.sub(
                rf"^(    {found.kind}:) (calibration|evaluation)(\.\w+| # a folder)?$",
                lambda match: (
                    f"{match[1]} {places[match[2]]}" + (_fold(folds[match[2]]) if folds else note)
                ),
                text,
                flags=re.MULTILINE,
            )
        if choices.target is not None:
            text = text.replace("target: ort-cpu # or tensorrt", f"target: {choices.target}")
        if choices.metric is not None:
            line = f"metric: {scalar(choices.metric)}"
            text = re.sub(r"^(# )?metric: [\w-]+$", line, text, count=1, flags=re.MULTILINE)
        return text


def _of_folder(
    found: Found, given: Given, inputs: Sequence[TensorSpec], *, calibrated: bool, scored: bool
) -> str:
    model, folder = given.model, given.folder
    spec = next((i for i in inputs if _keys(found, model, i)[0]), None)
    if spec is None:
        return ""
    array, keys = _keys(found, model, spec)
    fixed = fixed_batch(inputs) or 1
    halves = calibrated and found.halves(fixed)
    of = 2 if halves else 1
    samples = min(_SAMPLES, found.typical // of) // fixed * fixed or _SAMPLES
    whole = found.files // of // fixed * fixed
    steps = "".join(f"    {line}\n" for line in keys)
    values = {"kind": found.kind, "keys": steps, "mapping": f"{scalar(spec.name)}: {array}"}
    alone = found.shared and not halves
    warning = (
        "\n  # CHECK: take others; what tunes a model must not also judge it." if alone else ""
    )
    before = FILES_FOR_RANGES.format(
        place=_seen_from(folder, found.calibration) + (_fold("1/2") if halves else ""),
        samples=samples,
        warning=warning,
        **values,
    )
    labelled = found.classes > 1
    target = "target: label" if labelled and scored else "# target: label # of class folders"
    return FILES.format(
        words=found.words(),
        calibration=before if calibrated else "",
        place=_seen_from(folder, found.evaluation) + (_fold("2/2") if halves else ""),
        target=f"    {target}\n" if labelled else "",
        samples=f"    samples: {whole} # whole batches\n" if fixed > 1 and whole else "",
        metric="metric: accuracy\n" if labelled and scored else "# metric: cosine\n",
        **values,
    )


def _fold(part: str) -> str:
    which = "first" if part.startswith("1") else "second"
    return f"\n    fold: {part} # the {which} of every two samples: what tunes must not also judge"


def _keys(found: Found, model: Path, spec: TensorSpec) -> tuple[str, list[str]]:
    """Return the array and the keys that make of files what an input takes; empty if none do."""
    own = model if model.is_dir() else model.parent
    if found.kind == "wav":
        if extractor_file(own) is not None:
            return spec.name, ["# prepared as preprocessor_config.json beside the model says"]
        if spec.dtype != "float32" or len(spec.shape) != 2:
            return "", []
        length = spec.shape[1] if isinstance(spec.shape[1], int) else _RATE
        rate = f"rate: {_RATE} # CHECK: samples a second, as in training"
        return "audio", [rate, f"length: {length} # samples of each sound"]
    if spec.dtype not in ("uint8", "float32") or len(spec.shape) != 4:
        return "", []
    for axis, sides in ((1, spec.shape[2:]), (3, spec.shape[1:3])):
        channels = spec.shape[axis]
        if channels in (1, 3):
            return "image", list(_image_keys(spec, channels == 1, axis == 1, sides, own))
    return "", []


def _image_keys(
    spec: TensorSpec, grey: bool, first: bool, sides: Sequence[int | str | None], own: Path
) -> Iterator[str]:
    file = processor_file(own)
    if file is not None and spec.dtype == "float32":
        yield f"# prepared as {printable(file.name)} beside the model says"
        return
    height, width = (side if isinstance(side, int) else _SIDE for side in sides)
    why = "CHECK: or resize and crop, as in training"
    yield f"size: [{height}, {width}] # {why}"
    if grey:
        yield "colour: grey"
    if spec.dtype == "float32":
        mean, std = ("0", "1") if grey else _IMAGENET
        yield f"mean: {mean} # CHECK: as in training, of levels from 0 to 1"
        yield f"std: {std}"
    if first:
        yield "layout: channels-first"


def _folder(place: Path) -> Found | None:
    """Return what a folder holds, by the names of its files."""
    calibration, evaluation = _parts(place)
    for kind, suffixes in _SUFFIXES.items():
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
    arrays = NpzSource(path=files[0]).headers()
    return Found("npz", calibration, evaluation, len(files), len(typical), arrays=arrays)


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


def _seen_from(folder: Path, place: Path) -> str:
    return scalar(Path(os.path.relpath(place.resolve(), folder.resolve())).as_posix())
