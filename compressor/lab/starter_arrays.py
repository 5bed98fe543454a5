"""The part ``data`` of a starter spec for files of arrays, and the code that prepares these."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from compressor.calibration.sources.file_source import Header
from compressor.errors import SpecError, printable
from compressor.lab.found_data import labels, whole_batches
from compressor.lab.starter_data import Given
from compressor.lab.starter_levels import CHECK, array_levels
from compressor.lab.starter_parts import (
    ACCURACY,
    AGREEMENT,
    ALONE,
    BATCH,
    CALIBRATION,
    CODE,
    COSINE,
    DATA,
    IMAGES,
    LABEL,
    LEVELS,
    OF_ANSWERS,
    OF_CLASSES,
)
from compressor.spec.source_text import scalar
from compressor.types.tensors import TensorSpec, fixed_batch, may_agree

_IMAGE_AXES = 4
_COLOURS = 3
_CHANNELS = (1, _COLOURS)


def of_arrays(
    inputs: Sequence[TensorSpec],
    given: Given,
    calibrated: bool = True,
    metric: str = COSINE,
    numbers: str = "",
) -> str:
    """Return the part ``data`` for files that hold arrays with one row a sample.

    Args:
        calibrated: some pass needs ranges.
        metric: the lines of the metric that fits the model without labels.
        numbers: the array with right answers that have the form of the output.
    """
    typical, judging = given.arrays
    first = inputs[0].shape[:1] if inputs else ()
    batch = first[0] if first and isinstance(first[0], int) else BATCH
    label = given.label(inputs) if metric == AGREEMENT or given.of_classes else ""
    if metric == AGREEMENT and given.suits(classes=True):  # numbers of classes, as outputs are
        label = numbers or label
    seen = label or numbers or given.label(inputs)
    named = f"target: {scalar(seen or LABEL)}"
    target = named if label else f"# {named}{OF_CLASSES if seen and not numbers else OF_ANSWERS}"
    ranges, judged = given.names(inputs, typical), given.names(inputs, judging)
    whole = whole_batches(given.found, ranges.values(), judged.values(), fixed_batch(inputs) or 1)
    mapping = mapping_of(given, inputs, typical)
    own = CALIBRATION.format(mapping=mapping, batch=batch, samples=whole[0])
    return DATA.format(
        calibration=own if calibrated else "",
        images=_images(inputs),
        mapping=mapping_of(given, inputs, judging),
        judged=f"{given.batch}{ALONE}" if given.batch != BATCH else batch,
        samples=f"    samples: {whole[1]} # whole batches\n" if whole[1] else "",
        target=target,
        metric=ACCURACY if label else metric,
    )


def likely_inputs(given: Given) -> tuple[TensorSpec, ...]:
    """Return what a network takes that only a checkpoint is known of: the arrays, pixels as floats.

    A single array is called an image, for a transform may make one of it. Of several, those are
    taken that have more than one number for a sample. Images are taken to have their channels
    first, as layers of PyTorch want them.
    """
    found = {n: a for n, a in given.arrays[1].items() if n != labels(given.arrays[1])}
    if len(found) == 1:
        return (_likely("image", next(iter(found.values()))),)
    several = tuple(_likely(n, a) for n, a in found.items() if len(a.shape) > 1)
    return several or (TensorSpec("image", ("batch", 3, 224, 224), "float32"),)


def _likely(name: str, header: Header) -> TensorSpec:
    axes, pixels = header.shape[1:], header.dtype == np.uint8
    if pixels and len(axes) == _IMAGE_AXES - 1 and axes[-1] in _CHANNELS:
        axes = axes[-1], *axes[:-1]
    if pixels and len(axes) == _IMAGE_AXES - 2:
        axes = 1, *axes
    return TensorSpec(name, ("batch", *axes), "float32" if pixels else header.dtype.name)


def mapping_of(
    given: Given,
    inputs: Sequence[TensorSpec],
    arrays: Mapping[str, Header],
    in_steps: bool = False,
) -> str:
    """Return the lines of ``inputs``: each input of the model, and its array.

    An array that no code written here makes an input of is marked.

    Args:
        in_steps: arrays of a sequence may have its steps as one more, first axis.
    """
    names, lines = given.names(inputs, arrays), []
    for entry in inputs:
        header = arrays.get(names[entry.name])
        line = f"      {scalar(entry.name)}: {scalar(names[entry.name])}"
        fed = header is not None and _preparable(given, entry, header)
        if header is not None and in_steps and not fed:
            fed = given.fits(entry, replace(header, shape=header.shape[1:]))
        if header is not None and not fed:
            line += f" # CHECK: {header.dtype} {list(header.shape)} needs a transform"
        lines.append(line)
    return "\n".join(lines)


def _preparable(given: Given, entry: TensorSpec, header: Header) -> bool:
    """Whether an array has what an input takes, if in another type or order."""
    if given.fits(entry, header):
        return True
    move = _move(given.taken(entry, header), entry.shape)
    return move is not None and _convertible(header.dtype, entry.dtype)


def _images(inputs: Sequence[TensorSpec]) -> str:
    """Return how to read images from files, if an input looks like them."""
    for spec in inputs:
        for channels, size in ((3, spec.shape[1:3]), (1, spec.shape[2:4])):
            plain = len(spec.shape) == _IMAGE_AXES and spec.shape[channels] in _CHANNELS
            height, width = size if plain else ("", "")
            if not isinstance(height, int) or not isinstance(width, int):
                continue
            keys = [f"`size: [{height}, {width}]`"]
            keys += ["`colour: grey`"] if spec.shape[channels] == 1 else []
            keys += ["`layout: channels-first`"] if channels == 1 else []
            keys += ["`mean` and `std` as in training"] if spec.dtype != "uint8" else []
            name = printable(spec.name)
            return IMAGES.format(name=name, height=height, width=width, keys=", ".join(keys))
    return ""


@dataclass(frozen=True)
class Preparation:
    """A file of Python beside the spec whose ``prepare`` makes of arrays what the model takes."""

    path: Path
    code: str

    def check(self) -> None:
        """Check that the file can be written.

        Raises:
            SpecError: there is such a file.
        """
        if self.path.exists():
            remedy = "name another spec with -o, or remove the file"
            raise SpecError(f"file {str(self.path)!r}", "exists already", remedy)

    def named_in(self, text: str) -> str:
        """Return a spec that names the function wherever it left a transform open."""
        line = f"    transform: {self.path.stem}:prepare"
        return re.sub(r"^    # transform: my_package.*$", line, text, flags=re.MULTILINE)


def preparation(given: Given, inputs: Sequence[TensorSpec], spec: Path) -> Preparation | None:
    """Return the code that arrays need before the model; ``None`` if they fit, or cannot.

    Numbers of another width are converted, channels are moved to where the model has them, and
    levels of uint8 are scaled: to the range from 0 to 1, and where there are three channels, by
    the usual mean and deviation that fit the model's first batch norm, else ImageNet's, as images
    in a folder are. What training did is not known, so that line is marked with CHECK.

    Args:
        inputs: of the model.
        spec: the spec's path.
    """
    arrays = given.arrays[1]
    names = given.names(inputs, arrays)
    lines: list[str] = []
    mean, std, why = "0.0", "1.0", CHECK
    for entry in inputs:
        header = arrays.get(names[entry.name])
        if header is None or given.fits(entry, header):
            continue
        move = _move(given.taken(entry, header), entry.shape)
        if move is None or not _preparable(given, entry, header):
            return None
        lines += _steps(entry, header, move)
        if len(entry.shape) == _IMAGE_AXES and _COLOURS in (entry.shape[1], entry.shape[3]):
            assert given.found is not None
            place = given.found.evaluation
            mean, std, why = array_levels(given.model, given.found.kind, place, names[entry.name])
    if not lines:
        return None
    scaled = any("MEAN" in line for line in lines)
    levels = LEVELS.format(mean=mean, std=std, why=why) if scaled else ""
    code = CODE.format(spec=printable(spec.name), levels=levels, lines="\n".join(lines))
    return Preparation(code_of(spec), code)


def code_of(spec: Path) -> Path:
    """Return the file beside a spec that holds its preparation, if arrays need one."""
    return spec.with_name(re.sub(r"\W", "_", spec.stem) + "_data.py")


def _move(shape: Sequence[object], wanted: Sequence[object]) -> str | None:
    """Return what moves or adds the axis of channels; ``None`` if no move gives the shape."""
    first, *rest = shape
    moves = {"": shape}
    if len(shape) == len(wanted) == _IMAGE_AXES:
        moves[".transpose(0, 3, 1, 2)"] = [first, rest[2], *rest[:2]]
        moves[".transpose(0, 2, 3, 1)"] = [first, *rest[1:], rest[0]]
    if len(wanted) == _IMAGE_AXES:
        moves["[:, None]"], moves["[..., None]"] = [first, 1, *rest], [*shape, 1]
    return next((move for move, given in moves.items() if may_agree(given, wanted)), None)


def _convertible(held: np.dtype[Any], wanted: str) -> bool:
    """Whether numbers can be given the type of an input without a guess, levels apart."""
    floats, whole = wanted in ("float16", "float32", "float64"), "int" in wanted
    return floats if held == np.uint8 and not whole else held.kind in ("f" if floats else "iu")


def _steps(entry: TensorSpec, header: Header, move: str) -> Iterator[str]:
    """Yield the lines that prepare the array of an input."""
    name = json.dumps(entry.name)
    yield f"    value = batch[{name}]{move}  # from {header.dtype} {list(header.shape)}"
    if header.dtype == np.uint8 and "float" in entry.dtype:
        mean, std = "MEAN", "STD"
        if len(entry.shape) == _IMAGE_AXES and entry.shape[1] == _COLOURS:
            mean, std = (f"np.reshape({value}, (3, 1, 1))" for value in (mean, std))
        yield f"    value = (value.astype(np.float32) / 255 - {mean}) / {std}"
    yield f"    made[{name}] = np.ascontiguousarray(value, np.{entry.dtype})"
