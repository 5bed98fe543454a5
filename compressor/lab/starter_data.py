"""Data for a starter spec: looked at where they lie, and written as a model's inputs want them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from compressor import catalog
from compressor.calibration.sources.file_source import Header
from compressor.errors import SpecError, suggestion
from compressor.lab.found_data import ARRAYS, SUFFIXES, Found, as_whole, beside, labels, look_at
from compressor.lab.starter_files import keys_for
from compressor.lab.starter_parts import ACCURACY, ALONE, BATCH, COSINE, FILES, FILES_FOR_RANGES
from compressor.lab.text_fields import texts_of
from compressor.spec.source_text import scalar, seen_from
from compressor.types.tensors import TensorSpec, fixed_batch

if TYPE_CHECKING:
    from compressor.run.metrics.metrics import Metric

_NONE = "-"  # an answer


@dataclass(frozen=True)
class Choices:
    """What ``compress init`` was told, or answered.

    Attributes:
        data: a folder of images, WAV, npz or npy files, or a file of text or arrays.
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
        batch: samples that are judged at a time, unless the model says it.
    """

    model: Path
    folder: Path
    choices: Choices
    found: Found | None
    batch: int = BATCH

    def part(
        self, inputs: Sequence[TensorSpec], *, calibrated: bool, scored: bool, metric: str = COSINE
    ) -> str:
        """Return the part ``data`` for a folder; empty if there is none for these inputs.

        Args:
            scored: the model gives each sample one score for each class.
            metric: the lines of the metric that fits it without labels.

        Raises:
            SpecError: a folder was asked for, and no input is like what it holds.
        """
        found = self.found
        if found is None or found.kind not in SUFFIXES:
            return ""
        labelled = found.classes > 1 and (scored or self.needs_labels) and self.suits(classes=True)
        metric = ACCURACY if labelled else metric
        text = _of_folder(found, self, inputs, calibrated, metric)
        if not text and self.choices.data is not None:
            none = "no input of the model is like them"
            problem = f"holds {found.words()}, and {none}: {', '.join(map(str, inputs))}"
            remedy = "leave --data out, and write a factory (your own function) into the spec"
            raise SpecError(f"data {str(self.choices.data)!r}", problem, remedy)
        return text

    @property
    def arrays(self) -> tuple[Mapping[str, Header], Mapping[str, Header]]:
        """Return the arrays of what sets ranges, and those of what judges."""
        found = self.found
        return ({}, {}) if found is None else (found.typical_arrays, found.arrays)

    @property
    def needs_labels(self) -> bool:
        """Whether a metric was chosen that takes right answers alone."""
        metric = self._metric
        return metric is not None and metric.needs_labels and not metric.against_float

    @property
    def of_classes(self) -> bool:
        """Whether a metric of classes was chosen."""
        return self._metric is not None and self._metric.about_classes

    def suits(self, *, classes: bool) -> bool:
        """Whether answers that are classes, or are not, are what a chosen metric takes."""
        metric = self._metric
        return metric is None or metric.about_classes == classes

    @property
    def _metric(self) -> Metric | None:
        """Return the metric that was chosen, if it is not a function of the user."""
        name = self.choices.metric
        return None if name is None or ":" in name else catalog.load("metric", name)

    def label(self, inputs: Sequence[TensorSpec]) -> str:
        """Return the array with the class of each sample; empty without one.

        Where the chosen metric needs answers, that is also the only array that no input takes.
        """
        arrays = self.arrays[1]
        named = labels(arrays) if self.suits(classes=True) else ""
        left = arrays.keys() - self.names(inputs, arrays).values()
        return next(iter(left)) if not named and self.needs_labels and len(left) == 1 else named

    def check_answers(self, text: str) -> None:
        """Check that a spec names the answers that the chosen metric needs.

        Raises:
            SpecError: the data have none.
        """
        data = text.partition("\npasses:")[0]
        named = "\ndata:" not in data or re.search(r"^    target: ", data, re.M)
        if self.needs_labels and self.found and not named:
            raise SpecError(
                f"option --metric {self.choices.metric!r}",
                f"needs right answers, and none were seen in {str(self.found.evaluation)!r}",
                "add them to the data (an array, field or class folders, such as label), or choose "
                "agreement, mse or cosine, which compare with the float model",
            )

    def names(self, inputs: Sequence[TensorSpec], arrays: Mapping[str, Header]) -> dict[str, str]:
        """Return the array for each input: of its name, or the only one of its form.

        The only array beside labels is that of the only input, whatever its form: a transform can
        give it another. An input that no array is found for keeps its own name.
        """
        names = {spec.name: spec.name for spec in inputs}
        left = {name: a for name, a in arrays.items() if name not in {*names, labels(arrays)}}
        for spec in inputs:
            if spec.name in arrays:
                continue
            like = [name for name, header in left.items() if self.fits(spec, header)]
            if not like and len(inputs) == 1:
                like = list(left)
            if len(like) == 1:
                names[spec.name] = like[0]
                del left[like[0]]
        return names

    def answers(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
        """Return the array that has the form of the only output and is no input.

        A model whose right answers have the form of its output estimates numbers, and no classes.
        """
        arrays = self.arrays[1]
        taken = set(self.names(inputs, arrays).values())
        if len(outputs) != 1 or not taken <= arrays.keys():
            return ""
        left = {n: a for n, a in arrays.items() if n not in taken}
        like = [n for n, a in left.items() if self.fits(as_whole(outputs[0], a), a)]
        return like[0] if len(like) == 1 else ""

    def fits(self, spec: TensorSpec, header: Header) -> bool:
        """Whether an input takes samples of this form as they are."""
        return spec.mismatch(self.taken(spec, header), header.dtype.name) is None

    def taken(self, spec: TensorSpec, header: Header) -> tuple[int, ...]:
        """Return an array's shape as an input gets it: with as many samples as it takes."""
        first = [n for n in spec.shape[:1] if isinstance(n, int)]
        fed = self.found is None or self.found.feeds or not header.shape
        return header.shape if fed or not first else (*first, *header.shape[1:])

    def chosen(self, text: str) -> str:
        """Return a spec with the file, target and metric that were chosen in place of its own."""
        found, choices = self.found, self.choices
        if found is not None and found.kind in SUFFIXES and choices.data and "\ndata:" in text:
            self._written(text)
        if found is not None and found.kind not in SUFFIXES and "\ndata:" in text:
            places = {
                "calibration": _place(self.folder, found.calibration),
                "evaluation": _place(self.folder, found.evaluation),
            }
            parted = found.halves() and (found.feeds or "    samples: feeds" not in text)
            folds = {"calibration": "1/2", "evaluation": "2/2"} if parted else {}
            note = " # CHECK: calibrate and judge on different samples" if found.shared else ""
            written, field = self._written(text)
            text = re.sub(
                rf"^    {written}: (calibration|evaluation)(\.\w+| # a folder)?$",
                lambda match: (
                    f"    {found.kind}: {places[match[1]]}{field}"
                    + (_fold(folds[match[1]]) if folds else note)
                ),
                text,
                flags=re.MULTILINE,
            )
            text = re.sub(r"^  # FILL IN: (\w)", lambda m: f"  # {m[1].upper()}", text, flags=re.M)
        if choices.target is not None:
            text = text.replace("target: ort-cpu # or tensorrt", f"target: {choices.target}")
        if choices.metric is not None:
            line = f"metric: {scalar(choices.metric)}"
            if f"\n{line}\n" not in text:  # else the comment above is about it
                text = re.sub(
                    r"(^# .*\n)+(?=(# )?metric: )", "# What is measured.\n", text, flags=re.M
                )
            text = re.sub(r"^(# )?metric: [\w-]+$", line, text, count=1, flags=re.MULTILINE)
        return text

    def _written(self, text: str) -> tuple[str, str]:
        """Return the kind of data in a spec that the file takes the place of, and lines to add.

        Raises:
            SpecError: the spec has another kind.
        """
        assert self.found is not None
        kinds = re.findall(r"^    (npz|text|jsonl|images|wav): ", text, re.MULTILINE)
        kind = "npz" if self.found.kind in ARRAYS else self.found.kind
        if kind in kinds:
            return kind, ""
        texts = texts_of(self.found.fields)
        if kind == "jsonl" and "text" in kinds and texts:
            return "text", "" if "text" in texts else f"\n    field: {scalar(texts[0])}"
        if kind == "jsonl" and "text" in kinds:
            raise SpecError(
                f"data {str(self.choices.data)!r}",
                "has no text in its first object",
                'give objects with a field of text, such as {"text": "A fine film."}',
            )
        inputs = dict.fromkeys(re.findall(r"^      ([\w.]+): ", text, re.MULTILINE))
        of = f" of {', '.join(inputs)}" if inputs else ""
        wanted = {"text": "text (.txt, .jsonl)", "npz": f"arrays (.npz, .npy, .safetensors){of}"}
        raise SpecError(
            f"data {str(self.choices.data)!r}",
            f"is {self.found.words()}, which this model's spec does not take",
            f"give {' or '.join(wanted.get(k, k) for k in dict.fromkeys(kinds)) or 'other data'}",
        )


def _of_folder(
    found: Found, given: Given, inputs: Sequence[TensorSpec], calibrated: bool, metric: str
) -> str:
    ways = ((i, *keys_for(i, found, given.model, given.folder)) for i in inputs)
    spec, array, keys = next((way for way in ways if way[2]), (None, "", []))
    if spec is None:
        return ""
    fixed = fixed_batch(inputs) or 1
    halves = calibrated and found.halves(fixed)
    of = 2 if halves else 1
    samples = min(found.for_ranges, found.typical // of) // fixed * fixed or found.for_ranges
    whole = found.files // of // fixed * fixed
    steps = "".join(f"    {line}\n" for line in keys)
    values = {"kind": found.kind, "keys": steps, "mapping": f"{scalar(spec.name)}: {array}"}
    alone = found.shared and not halves
    warning = (
        "\n  # CHECK: take others; what tunes a model must not also judge it." if alone else ""
    )
    before = FILES_FOR_RANGES.format(
        place=_place(given.folder, found.calibration) + (_fold("1/2") if halves else ""),
        samples=samples,
        warning=warning,
        **values,
    )
    target = "target: label" if metric == ACCURACY else "# target: label # of class folders"
    return FILES.format(
        words=found.words(),
        calibration=before if calibrated else "",
        place=_place(given.folder, found.evaluation) + (_fold("2/2") if halves else ""),
        target=f"    {target}\n" if found.classes > 1 else "",
        samples=f"    samples: {whole} # whole batches\n" if fixed > 1 and whole else "",
        batch=f"    batch: {given.batch}{ALONE}\n" if given.batch != BATCH else "",
        metric=metric,
        **values,
    )


def _fold(part: str) -> str:
    which = "first" if part.startswith("1") else "second"
    return f"\n    fold: {part} # the {which} of every two samples: what tunes must not also judge"


def _place(folder: Path, place: Path) -> str:
    return scalar(seen_from(folder, place))
