"""Images in a folder, decoded and prepared as a model wants them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, PositiveInt, model_validator

from compressor.calibration.sources.file_source import Header, IndexedFileSource, ReadAt
from compressor.calibration.sources.image_processors import (
    classes_beside,
    processor_file,
    processor_steps,
)
from compressor.calibration.sources.image_steps import (
    UNIT,
    Colour,
    ImageSteps,
    Interpolation,
    Layout,
    Resized,
)
from compressor.errors import DataError, listed, suggestion
from compressor.files import json_sha256
from compressor.types.options import Options
from compressor.types.tensors import Array, TensorSpec

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


_PIXEL = 8  # bytes, as it is decoded and as RGB
_AT_ONCE = 200_000_000  # bytes, beyond ten times a file, that it may take in memory

_Item: TypeAlias = tuple[Path, int]  # an image and its label
_Sides: TypeAlias = Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]
_Channels: TypeAlias = float | Annotated[tuple[float, ...], Field(strict=False, min_length=1)]
_GEOMETRY = ("size", "resize", "crop")
_PREPARING = {
    *_GEOMETRY,
    "interpolation",
    "colour",
    "scale",
    "mean",
    "std",
    "layout",
    "preprocessor",
    "classes",
}


class Letterbox(Options):
    """Scale to fit, with borders on both sides."""

    letterbox: _Sides = Field(description="height and width in pixels")
    fill: int = Field(default=0, ge=0, le=255, description="level of the borders, in all channels")


class ImageFolderSource(IndexedFileSource):
    """A folder of images, or one of class folders with images in them.

    The arrays are ``image``, ``[samples, height, width, channels]``, and where there are class
    folders ``label``, int64 ``[samples]``: the place of the image's folder among all of them,
    sorted by name, or its number in ``classes``. Images come sorted by name; ``samples`` takes that
    many spread evenly over all of them, so that every class is represented.

    Images are decoded to RGB by Pillow and prepared in this order: ``resize``, ``crop``,
    ``colour``, ``scale``, ``mean``, ``std``, ``layout``. The results are those of torchvision's
    ``Resize``, ``CenterCrop``, ``ToTensor`` and ``Normalize``: uint8, or float32 with one of
    ``scale``, ``mean`` and ``std``. Give ``size``, or ``resize`` and ``crop``, or let
    ``preprocessor`` name the model's own file; without all of these, the file in the model's folder
    is read.
    """

    kind: ClassVar[str] = "folder of images"

    size: _Sides | None = Field(
        default=None,
        description="height and width in pixels: an image is scaled to cover them and its centre "
        "is cut out; instead of `resize` and `crop`",
    )
    resize: PositiveInt | _Sides | Letterbox | None = Field(
        default=None,
        description="length of the shorter side, the proportion kept; or [height, width], "
        "stretched; or {letterbox: [height, width], fill: 114}, scaled to fit with borders",
    )
    crop: PositiveInt | _Sides | None = Field(
        default=None,
        description="side of a square, or [height, width], that is cut out of the centre; where "
        "an image is smaller it gets black borders",
    )
    interpolation: Interpolation | None = Field(
        default=None, description="Pillow's filter for sizes; default bilinear"
    )
    colour: Colour | None = Field(
        default=None, description="order of the channels, or one channel; default rgb"
    )
    scale: float | None = Field(
        default=None,
        description="what levels from 0 to 255 are multiplied with; default 1/255 with `mean` or "
        "`std`, otherwise levels stay uint8",
    )
    mean: _Channels | None = Field(
        default=None, description="taken away after scaling, one number or one for each channel"
    )
    std: _Channels | None = Field(
        default=None, description="divisor after that, one number or one for each channel"
    )
    layout: Layout | None = Field(
        default=None,
        description="where the axis of channels lies; default channels-last, or as `preprocessor` "
        "has it",
    )
    preprocessor: Path | None = Field(
        default=None,
        strict=False,
        description="preprocessor_config.json of transformers, config.json of timm, or the folder "
        "of one; keys beside it replace what it says",
    )
    classes: dict[str, Annotated[int, Field(ge=0)]] | None = Field(
        default=None,
        description="class folder: its label; default label2id in config.json beside the "
        "preprocessor's file if it names all folders, otherwise their order by name",
    )

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        if self.size is not None and (self.resize is not None or self.crop is not None):
            raise ValueError("has size beside resize or crop; give size, or resize and crop")
        if self.preprocessor is None:
            self._own(None)
        return self

    @cached_property
    def steps(self) -> ImageSteps:
        """What is done to each image.

        Raises:
            SpecError: the preprocessor's file does not exist.
            DataError: it cannot be used, or does not fit the keys beside it.
        """
        if self.preprocessor is None:
            return self._own(None)
        read = processor_steps(self.preprocessor)
        try:
            return self._own(read)
        except ValueError as error:
            problem, _, remedy = str(error).partition("; ")
            raise DataError(self.subject, problem, remedy) from error

    def _own(self, read: ImageSteps | None) -> ImageSteps:
        """Return the steps with the spec's keys in place of those that were read, if any were.

        Raises:
            ValueError: they do not fit together.
        """
        changes: dict[str, Any] = {
            "interpolation": self.interpolation,
            "colour": self.colour,
            "scale": self.scale,
            "mean": _each(self.mean),
            "std": _each(self.std),
            "layout": self.layout,
        }
        if self.size is not None:
            changes |= {"resize": Resized("cover", self.size), "crop": ()}
        if self.resize is not None:
            changes["resize"] = _resized(self.resize)
        if self.crop is not None:
            changes["crop"] = _sides(self.crop)
        if self.scale is None and (read is None or read.scale is None):
            normalized = self.mean is not None or self.std is not None
            changes["scale"] = UNIT if normalized else None
        given = {key: value for key, value in changes.items() if value is not None}
        given |= {"crop": None} if given.get("crop") == () else {}
        return ImageSteps(**given) if read is None else replace(read, **given)

    def headers(self) -> dict[str, Header]:
        """Return the headers of images and labels, from the names of the files."""
        items, labelled = self._items()
        if not items:
            raise DataError(
                self.subject, "has no images", f"it needs files like {', '.join(sorted(_SUFFIXES))}"
            )
        headers = {"image": Header((len(items), *self.steps.shape), self.steps.dtype)}
        if labelled:
            headers["label"] = Header((len(items),), np.dtype(np.int64))
        return headers

    def open_at(self, arrays: Mapping[str, str]) -> dict[str, ReadAt]:
        """List the images; each is decoded when it is requested."""
        readers = self._arrays(self._items()[0])
        return {name: readers[stored] for name, stored in arrays.items()}

    def files(self) -> list[tuple[str, Path]]:
        """Return the images."""
        items, _ = self._items()
        return [(path.relative_to(self.path).as_posix(), path) for path, _ in items]

    def digest(self) -> str:
        """Return a SHA-256 of the images, of what is done to them, and of the labels."""
        with self._guard():
            named = ((name.encode() + b"\0", path) for name, path in self.files())
            content = self.hashed({"path", *_PREPARING}, named)
        own = [asdict(self.steps), sorted(self._numbers.items()) if self._folders else []]
        return json_sha256([content, own])

    def described(self) -> str:
        """Return in one line what becomes of the images."""
        parts = [self.steps.words()]
        if self.preprocessor is not None:
            parts.append(f"as {processor_file(self.preprocessor)} has it")
        if self._folders:
            numbers = sorted(self._numbers.items(), key=lambda entry: entry[1])
            parts.append(f"{len(numbers)} classes: {listed([name for name, _ in numbers], 3)}")
        return "; ".join(parts)

    def misfit(self, spec: TensorSpec) -> str:
        """Return which keys make of the images what an input takes; empty if none are known."""
        keys = []
        other: Layout = (
            "channels-first" if self.steps.layout == "channels-last" else "channels-last"
        )
        turned = replace(self.steps, layout=other)
        count = spec.shape[0] if spec.shape and isinstance(spec.shape[0], int) else 1
        if spec.mismatch((count, *turned.shape), spec.dtype) is None:
            keys.append(f"layout: {other}")
        if spec.dtype == "float32" and self.steps.scale is None:
            keys.append("mean and std as in training")
        return f"set {' and '.join(keys)} beside images" if keys else ""

    @classmethod
    def completed(cls, options: dict[str, Any], model: Path) -> dict[str, Any]:
        """Return a spec's options, with the file of the model if they say nothing about sizes."""
        if not {*_GEOMETRY, "preprocessor"}.isdisjoint(options):
            return options
        found = processor_file(model)
        return options if found is None else {**options, "preprocessor": str(found)}

    def _arrays(self, items: list[_Item]) -> dict[str, ReadAt]:
        labels = np.array([label for _, label in items], np.int64)
        steps = self.steps

        def images(rows: NDArray[np.int64]) -> Array:
            if not len(rows):
                return np.empty((0, *steps.shape), steps.dtype)
            return steps.values(np.stack([_decode(items[row][0], steps) for row in rows.tolist()]))

        return {"image": images, "label": lambda rows: labels[rows]}

    @cached_property
    def _folders(self) -> list[Path]:
        return sorted(p for p in self.path.iterdir() if p.is_dir() and not p.name.startswith("."))

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
        known = {} if self.preprocessor is None else classes_beside(self.preprocessor)
        if known and all(name in known for name in names):
            return {name: known[name] for name in names}
        return {name: label for label, name in enumerate(names)}

    def _items(self) -> tuple[list[_Item], bool]:
        folders, numbers = self._folders, self._numbers
        loose = sorted(path for path in self.path.iterdir() if _is_image(path))
        if folders and loose:
            raise DataError(
                self.subject,
                f"has class folders and also loose images, such as '{loose[0].name}'",
                "put every image into a class folder, or none",
            )
        items: list[_Item] = [(path, 0) for path in loose]
        for folder in folders:
            images = (path for path in folder.rglob("*") if _is_image(path))
            items += [(path, numbers[folder.name]) for path in sorted(images)]
        if self.samples is not None and self.samples < len(items):
            items = [items[i * len(items) // self.samples] for i in range(self.samples)]
        return items, bool(folders)


def _sides(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _resized(value: int | tuple[int, int] | Letterbox) -> Resized:
    if isinstance(value, Letterbox):
        return Resized("letterbox", value.letterbox, value.fill)
    return Resized("shorter" if isinstance(value, int) else "both", _sides(value))


def _each(value: float | tuple[float, ...] | None) -> tuple[float, ...] | None:
    return (value,) if isinstance(value, int | float) else value


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _SUFFIXES and not path.name.startswith(".") and path.is_file()


def _decode(path: Path, steps: ImageSteps) -> Array:
    try:
        with Image.open(path) as image:
            takes = image.width * image.height * _PIXEL
            if takes > _AT_ONCE + 10 * path.stat().st_size:
                raise ValueError(f"{takes >> 20:,} MiB of pixels in so small a file")
            rgb = image.convert("RGB")
        return steps.pixels(rgb)
    # Pillow raises SyntaxError and TypeError where headers are damaged.
    except (OSError, SyntaxError, TypeError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"image '{path}'",
            f"cannot be decoded: {error}",
            "replace or remove it",
        ) from error
