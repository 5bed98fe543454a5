"""Images in a folder, decoded and prepared as a model wants them."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, PositiveInt, model_validator

from compressor.calibration.sources.class_folders import ClassFolderSource, Item
from compressor.calibration.sources.file_source import Header, ReadAt
from compressor.calibration.sources.image_processors import processor_file, processor_steps
from compressor.calibration.sources.image_steps import (
    UNIT,
    Colour,
    ImageSteps,
    Interpolation,
    Layout,
    Resized,
)
from compressor.errors import DataError
from compressor.types.options import Options
from compressor.types.tensors import Array, TensorSpec

_PIXEL = 8  # bytes, as it is decoded and as RGB
_LEVELS = 257  # of 16 bits, for one of 8: from 0 to 65,535, and from 0 to 255
_AT_ONCE = 200_000_000  # bytes, beyond ten times a file, that it may take in memory

_Sides: TypeAlias = Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]
_Channels: TypeAlias = float | Annotated[tuple[float, ...], Field(strict=False, min_length=1)]
_GEOMETRY = ("size", "resize", "crop")


class Letterbox(Options):
    """Scale to fit, with borders on both sides."""

    letterbox: _Sides = Field(description="height and width in pixels")
    fill: int = Field(default=0, ge=0, le=255, description="level of the borders, in all channels")


class ImageFolderSource(ClassFolderSource):
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
    files_are: ClassVar[str] = "images"
    suffixes: ClassVar[frozenset[str]] = frozenset(
        (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
    )
    says_how: ClassVar[frozenset[str]] = frozenset(
        (*_GEOMETRY, "interpolation", "colour", "scale", "mean", "std", "layout", "preprocessor")
    )

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
        description="side of a square, or [height, width], cut out of the centre; a smaller image "
        "gets black borders",
    )
    interpolation: Interpolation | None = Field(
        default=None, description="Pillow's filter for sizes; default bilinear"
    )
    colour: Colour | None = Field(
        default=None, description="order of the channels, or one channel; default rgb"
    )
    scale: float | None = Field(
        default=None,
        description="factor on pixel values from 0 to 255; default 1/255 with `mean` or `std`, "
        "otherwise values stay uint8",
    )
    mean: _Channels | None = Field(
        default=None, description="subtracted after scaling, one number or one per channel"
    )
    std: _Channels | None = Field(
        default=None, description="divisor after that, one number or one per channel"
    )
    layout: Layout | None = Field(
        default=None,
        description="position of the channel axis; default: channels-last, or that of "
        "`preprocessor`",
    )
    preprocessor: Path | None = Field(
        default=None,
        strict=False,
        description="preprocessor_config.json of transformers, config.json of timm, or the folder "
        "of one; keys beside it override its values",
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

    def forms(self, items: list[Item]) -> dict[str, Header]:
        """Return the header of the images."""
        return {"image": Header((len(items), *self.steps.shape), self.steps.dtype)}

    def preparation(self) -> tuple[Any, str]:
        """Return the steps, and a description of them."""
        read = "" if self.preprocessor is None else f"as {processor_file(self.preprocessor)} has it"
        return asdict(self.steps), "; ".join(filter(None, (self.steps.words(), read)))

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

    def readers(self, items: list[Item]) -> dict[str, ReadAt]:
        """Return how images are decoded."""
        steps = self.steps

        def images(rows: NDArray[np.int64]) -> Array:
            if not len(rows):
                return np.empty((0, *steps.shape), steps.dtype)
            return steps.values(np.stack([_decode(items[row][0], steps) for row in rows.tolist()]))

        return {"image": images}


def _sides(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _resized(value: int | tuple[int, int] | Letterbox) -> Resized:
    if isinstance(value, Letterbox):
        return Resized("letterbox", value.letterbox, value.fill)
    return Resized("shorter" if isinstance(value, int) else "both", _sides(value))


def _each(value: float | tuple[float, ...] | None) -> tuple[float, ...] | None:
    return (value,) if isinstance(value, int | float) else value


def _decode(path: Path, steps: ImageSteps) -> Array:
    try:
        with Image.open(path) as image:
            takes = image.width * image.height * _PIXEL
            if takes > _AT_ONCE + 10 * path.stat().st_size:
                raise ValueError(f"{takes >> 20:,} MiB of pixels in so small a file")
            rgb = _of_eight_bits(image).convert("RGB")
        return steps.pixels(rgb)
    # Pillow raises SyntaxError and TypeError where headers are damaged.
    except (OSError, SyntaxError, TypeError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"image '{path}'",
            f"cannot be decoded: {error}",
            "replace or remove it",
        ) from error


def _of_eight_bits(image: Image.Image) -> Image.Image:
    """Return grey levels of 16 bits in 8, since Pillow cuts them off at 255 and leaves white.

    Raises:
        ValueError: they are numbers of 32 bits, of which nothing says what is white.
    """
    # Levels of other files than PNG and PGM may be any numbers of the wider types.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise ValueError("its grey levels have 32 bits; save it with 8 or 16")
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray(np.round(np.asarray(image) / _LEVELS).astype(np.uint8))
