"""Images in a folder, decoded to RGB and brought to one size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from pydantic import Field, PositiveInt

from compressor.calibration.sources.file_source import (
    Header,
    IndexedFileSource,
    ReadAt,
)
from compressor.errors import DataError
from compressor.types.tensors import Array

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


_PIXEL = 8  # bytes, as it is decoded and as RGB
_AT_ONCE = 200_000_000  # bytes, beyond ten times a file, that it may take in memory

_Item: TypeAlias = tuple[Path, int]  # an image and its label


class ImageFolderSource(IndexedFileSource):
    """A folder of images, or one of class folders with images in them.

    The arrays are ``image``, uint8 ``[samples, height, width, 3]``, and where there are class
    folders ``label``, int64 ``[samples]``: the place of the image's folder among all of them,
    sorted by name. Images come sorted by name; ``samples`` takes that many spread evenly over
    all of them, so that every class is represented. An image is scaled (bilinear) to cover
    ``size`` and its centre is cut out.
    """

    kind: ClassVar[str] = "folder of images"
    size: tuple[PositiveInt, PositiveInt] = Field(
        strict=False, description="height and width in pixels"
    )

    def headers(self) -> dict[str, Header]:
        """Return the headers of images and labels, from the names of the files."""
        items, labelled = self._items()
        if not items:
            raise DataError(
                self.subject, "has no images", f"it needs files like {', '.join(sorted(_SUFFIXES))}"
            )
        headers = {"image": Header((len(items), *self.size, 3), np.dtype(np.uint8))}
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

    def _arrays(self, items: list[_Item]) -> dict[str, ReadAt]:
        labels = np.array([label for _, label in items], np.int64)

        def images(rows: NDArray[np.int64]) -> Array:
            batch = np.empty((len(rows), *self.size, 3), np.uint8)
            for row, image in zip(rows.tolist(), batch, strict=True):
                image[:] = _decode(items[row][0], self.size)
            return batch

        return {"image": images, "label": lambda rows: labels[rows]}

    def _items(self) -> tuple[list[_Item], bool]:
        entries = sorted(path for path in self.path.iterdir() if not path.name.startswith("."))
        folders = [path for path in entries if path.is_dir()]
        loose = [path for path in entries if _is_image(path)]
        if folders and loose:
            raise DataError(
                self.subject,
                f"has class folders and also loose images, such as '{loose[0].name}'",
                "put every image into a class folder, or none",
            )
        items: list[_Item] = [(path, 0) for path in loose]
        for label, folder in enumerate(folders):
            images = (path for path in folder.rglob("*") if _is_image(path))
            items += [(path, label) for path in sorted(images)]
        if self.samples is not None and self.samples < len(items):
            items = [items[i * len(items) // self.samples] for i in range(self.samples)]
        return items, bool(folders)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _SUFFIXES and not path.name.startswith(".") and path.is_file()


def _decode(path: Path, size: tuple[int, int]) -> Array:
    height, width = size
    try:
        with Image.open(path) as image:
            takes = image.width * image.height * _PIXEL
            if takes > _AT_ONCE + 10 * path.stat().st_size:
                raise ValueError(f"{takes >> 20:,} MiB of pixels in so small a file")
            rgb = image.convert("RGB")
        return np.asarray(ImageOps.fit(rgb, (width, height), Image.Resampling.BILINEAR))
    # Pillow raises SyntaxError and TypeError where headers are damaged.
    except (OSError, SyntaxError, TypeError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"image '{path}'",
            f"cannot be decoded: {error}",
            "replace or remove it",
        ) from error
