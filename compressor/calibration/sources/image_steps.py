"""From a decoded image to an array: resize, crop, colour, scale, normalize, layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from PIL import Image, ImageOps

from compressor.types.tensors import Array

Interpolation: TypeAlias = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
Colour: TypeAlias = Literal["rgb", "bgr", "grey"]
Layout: TypeAlias = Literal["channels-last", "channels-first"]
Way: TypeAlias = Literal["cover", "shorter", "both", "letterbox"]

UNIT = 1 / 255
"""The scale that takes the levels 0 to 255 to 0 to 1."""


@dataclass(frozen=True)
class Resized:
    """Resizing of an image, before it is cropped.

    Attributes:
        way: ``cover``: scaled to cover ``size``, and the rest is cut off on both sides;
            ``shorter``: the shorter side becomes the first number of ``size``, and the longer one
            keeps the proportion, rounded down, as torchvision's ``Resize`` of one number;
            ``both``: stretched to ``size``; ``letterbox``: scaled to fit into ``size``, with
            borders on both sides.
        size: height and width.
        fill: level of a letterbox's borders.
    """

    way: Way
    size: tuple[int, int]
    fill: int = 0

    def __call__(self, image: Image.Image, resample: Image.Resampling) -> Image.Image:
        """Return the image in its new size."""
        height, width = self.size
        match self.way:
            case "cover":
                return ImageOps.fit(image, (width, height), resample)
            case "letterbox":
                colour = (self.fill,) * len(image.getbands())
                return ImageOps.pad(image, (width, height), resample, color=colour)
            case "both":
                return image.resize((width, height), resample)
            case "shorter":
                short, long = sorted(image.size)
                sides = height, height * long // short
                wide = sides[::-1] if image.width > image.height else sides
                return image.resize(wide, resample)


@dataclass(frozen=True)
class ImageSteps:
    """The steps that prepare an image, in this order.

    Attributes:
        crop: height and width that are cut out of the centre; an image that is smaller gets black
            borders, as from torchvision's ``CenterCrop``.
        scale: what levels are multiplied with. With ``None`` they stay uint8 and are not
            normalized.
        mean: for each channel, or one for all; taken away after scaling.
        std: for each channel, or one for all; the divisor after that.
        centred_down: of an odd number of pixels around a crop, the smaller half lies before it, as
            ``transformers`` cuts; torchvision rounds half of them to an even number.
    """

    resize: Resized | None = None
    crop: tuple[int, int] | None = None
    interpolation: Interpolation = "bilinear"
    colour: Colour = "rgb"
    scale: float | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    layout: Layout = "channels-last"
    centred_down: bool = False

    def __post_init__(self) -> None:
        """Raise ``ValueError`` where images would differ in shape, or cannot be normalized."""
        if self.resize is None and self.crop is None:
            raise ValueError(
                "images may differ in size; give size, or resize and crop, or preprocessor"
            )
        if self.crop is None and self.resize is not None and self.resize.way == "shorter":
            side = self.resize.size[0]
            raise ValueError(
                f"resize: {side} keeps each image's proportion, so that sizes differ; add crop, or "
                f"give both sides: resize: [{side}, {side}]"
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (0, 1, self.channels):
                raise ValueError(
                    f"{name} has {len(values)} values for colour: {self.colour}; give one, or "
                    f"{self.channels}"
                )
        if 0.0 in self.std:
            raise ValueError("std contains 0, which cannot be a divisor; remove std")

    @property
    def channels(self) -> int:
        """How many channels an array has."""
        return 1 if self.colour == "grey" else 3

    @property
    def shape(self) -> tuple[int, int, int]:
        """The array of one image."""
        size = self.crop
        if size is None:
            assert self.resize is not None
            size = self.resize.size
        first = self.layout == "channels-first"
        return (self.channels, *size) if first else (*size, self.channels)

    @property
    def dtype(self) -> np.dtype[np.uint8] | np.dtype[np.float32]:
        """The arrays' element type."""
        return np.dtype(np.uint8) if self.scale is None else np.dtype(np.float32)

    def pixels(self, rgb: Image.Image) -> Array:
        """Return the levels of one RGB image, uint8 ``[height, width, channels]``."""
        image = rgb.convert("L") if self.colour == "grey" else rgb
        if self.resize is not None:
            image = self.resize(image, Image.Resampling[self.interpolation.upper()])
        if self.crop is not None:
            image = self._cropped(image, self.crop)
        array = np.asarray(image)
        array = array[..., None] if array.ndim == 2 else array
        return array[..., ::-1] if self.colour == "bgr" else array

    def values(self, pixels: Array) -> Array:
        """Return a batch as the model gets it.

        In float32 and in the order of torchvision's ``ToTensor`` and ``Normalize``: levels are
        divided by 255 where ``scale`` is that, and otherwise multiplied.

        Args:
            pixels: uint8 ``[samples, height, width, channels]``.
        """
        batch = pixels
        if self.scale is not None:
            batch = pixels.astype(np.float32)
            if self.scale == UNIT:
                batch /= np.float32(255)
            else:
                batch *= np.float32(self.scale)
            if self.mean:
                batch -= np.array(self.mean, np.float32)
            if self.std:
                batch /= np.array(self.std, np.float32)
        if self.layout == "channels-first":
            batch = np.ascontiguousarray(np.moveaxis(batch, -1, 1))
        return batch

    def _cropped(self, image: Image.Image, size: tuple[int, int]) -> Image.Image:
        """Cut the centre out; outside of the image Pillow gives zeros."""
        places = []
        for have, want in ((image.width, size[1]), (image.height, size[0])):
            if have < want:  # borders: the smaller half comes first, in torchvision
                places.append(-((want - have + self.centred_down) // 2))
            else:
                places.append((have - want) // 2 if self.centred_down else round((have - want) / 2))
        left, top = places
        return image.crop((left, top, left + size[1], top + size[0]))

    def words(self) -> str:
        """Return the steps for people, such as ``shorter side to 256 (bilinear), crop 224 x 224``.

        >>> ImageSteps(Resized("both", (8, 9)), scale=UNIT).words()
        'resize to 8 x 9 (bilinear), divide by 255, channels-last'
        """
        parts = []
        if self.resize is not None:
            height, width = self.resize.size
            to = {
                "cover": f"scale to cover {height} x {width} and cut",
                "shorter": f"resize the shorter side to {height}",
                "both": f"resize to {height} x {width}",
                "letterbox": f"letterbox {height} x {width}, borders {self.resize.fill}",
            }[self.resize.way]
            parts.append(f"{to} ({self.interpolation})")
        if self.crop is not None:
            parts.append(f"crop {self.crop[0]} x {self.crop[1]}")
        if self.colour != "rgb":
            parts.append(self.colour.upper() if self.colour == "bgr" else self.colour)
        if self.scale is not None:
            unit = self.scale == UNIT
            parts.append("divide by 255" if unit else f"multiply by {self.scale:g}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values:
                parts.append(f"{name} {', '.join(f'{v:g}' for v in values)}")
        return ", ".join([*parts, self.layout])
