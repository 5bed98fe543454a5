"""The keys with which a starter spec makes of images and sounds what an input takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from compressor.calibration.sources.audio import WavFolderSource, extractor_file, form_of
from compressor.calibration.sources.image_processors import processor_file, processor_steps
from compressor.calibration.sources.waveforms import WaveForm
from compressor.errors import DataError, printable
from compressor.lab.found_data import Found
from compressor.lab.starter_levels import level_keys
from compressor.spec.source_text import scalar, seen_from
from compressor.types.tensors import TensorSpec

_SIDE = 224  # of images, where the model does not say
_RATE = 16_000  # samples a second, where nothing says
_MONO, _CHANNELS = 2, 3  # axes of sounds in batches, without and with one for channels


def keys_for(spec: TensorSpec, found: Found, model: Path, folder: Path) -> tuple[str, list[str]]:
    """Return the array and the keys that make of files what an input takes; empty if none do.

    Args:
        folder: that of the spec.

    Raises:
        DataError: the first sound cannot be read.
    """
    if found.kind == "wav":
        own = model if model.is_dir() else model.parent
        if extractor_file(own) is None:
            return "audio", list(_sound_keys(spec, _first_sound(found.evaluation)))
        return spec.name, _prepared_keys(spec, scalar(seen_from(folder, own)))
    if spec.dtype not in ("uint8", "float32") or len(spec.shape) != 4:
        return "", []
    for axis, sides in ((1, spec.shape[2:]), (3, spec.shape[1:3])):
        channels = spec.shape[axis]
        if channels in (1, 3):
            return "image", list(_image_keys(spec, axis, sides, model, found, folder))
    return "", []


def _sound_keys(spec: TensorSpec, first: WaveForm) -> Iterator[str]:
    """Yield the keys for an input that takes waveforms, with or without an axis for channels."""
    axes, length = len(spec.shape), spec.shape[-1] if spec.shape else None
    apart = axes == _CHANNELS and spec.shape[1] == first.channels
    if spec.dtype != "float32" or not (axes == _MONO or apart):
        return
    yield f"rate: {first.rate} # CHECK: samples a second, as in training"
    if apart:
        yield "mono: false # an axis for channels, as the model has it"
    yield _cut(length if isinstance(length, int) else first.length)


def _prepared_keys(spec: TensorSpec, place: str) -> list[str]:
    """Return the keys for an input whose sounds an extractor beside the model prepares."""
    if spec.dtype != "float32" or len(spec.shape) != _MONO:
        return ["# prepared as preprocessor_config.json beside the model says"]
    length = spec.shape[1]
    return [f"preprocessor: {place}", _cut(length if isinstance(length, int) else _RATE)]


def _cut(length: int) -> str:
    return f"length: {length} # CHECK: samples of each sound; what is longer is cut"


def _first_sound(folder: Path) -> WaveForm:
    """Return the header of a folder's first sound.

    Raises:
        DataError: it cannot be read.
    """
    suffixes = WavFolderSource.suffixes
    return form_of(next(p for p in sorted(folder.rglob("*")) if p.suffix.lower() in suffixes))


def _image_keys(
    spec: TensorSpec,
    axis: int,
    sides: Sequence[int | str | None],
    model: Path,
    found: Found,
    folder: Path,
) -> Iterator[str]:
    file, grey = processor_file(model if model.is_dir() else model.parent), spec.shape[axis] == 1
    if file is not None and spec.dtype == "float32":
        yield from _as_processor(file, axis, sides, folder)
        return
    height, width = (side if isinstance(side, int) else _SIDE for side in sides)
    why = "CHECK: or resize and crop, as in training"
    yield f"size: [{height}, {width}] # {why}"
    if grey:
        yield "colour: grey"
    if spec.dtype == "float32":
        yield from level_keys(model, found.calibration, (height, width), grey=grey)
    if axis == 1:
        yield "layout: channels-first"


def _as_processor(
    file: Path, axis: int, sides: Sequence[int | str | None], folder: Path
) -> Iterator[str]:
    """Yield the keys for images that a model's own file prepares, and for where that misfits."""
    name = printable(file.name)
    yield f"# prepared as {name} beside the model says"
    try:
        steps = processor_steps(file)
    except DataError:  # the plan says what the file asks for that is not done here
        return
    first = steps.layout == "channels-first"
    own = steps.shape[1:] if first else steps.shape[:2]
    size = [n if isinstance(n, int) else o for n, o in zip(sides, own, strict=True)]
    keys = []
    if size != list(own):
        keys.append(f"size: {size} # CHECK: the model's; {name} has {list(own)}")
    if first != (axis == 1):
        keys.append(f"layout: channels-{'first' if axis == 1 else 'last'}")
    yield from [f"preprocessor: {scalar(seen_from(folder, file))}", *keys] if keys else []
