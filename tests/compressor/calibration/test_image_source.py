"""The image folder source."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from compressor.calibration.sources.images import ImageFolderSource
from compressor.errors import DataError
from compressor.types.tensors import TensorSpec


def paint(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (12, 10)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def classes(folder: Path) -> Path:
    paint(folder / "dog" / "b.png", (2, 0, 0))
    paint(folder / "dog" / "a.png", (1, 0, 0))
    paint(folder / "cat" / "deep" / "z.png", (0, 0, 9))
    paint(folder / "eel" / "x.bmp", (3, 3, 3))
    (folder / "dog" / "notes.txt").write_text("not an image")
    (folder / ".hidden").mkdir()
    return folder


def test_class_folders_give_labels_in_sorted_order(tmp_path):
    data = ImageFolderSource(
        path=classes(tmp_path), size=(4, 6), fields={"x": "image", "y": "label"}
    )
    info = data.info()
    assert info.samples == 4
    assert info.fields == (
        TensorSpec("x", ("batch", 4, 6, 3), "uint8"),
        TensorSpec("y", ("batch",), "int64"),
    )
    batches = list(data.batches(3))
    assert [batch["x"].shape for batch in batches] == [(3, 4, 6, 3), (1, 4, 6, 3)]
    assert np.concatenate([batch["y"] for batch in batches]).tolist() == [0, 1, 1, 2]
    colours = np.concatenate([batch["x"] for batch in batches])[:, 0, 0].tolist()
    assert colours == [[0, 0, 9], [1, 0, 0], [2, 0, 0], [3, 3, 3]]


def test_a_flat_folder_has_no_labels(tmp_path):
    paint(tmp_path / "a.PNG", (5, 6, 7))
    data = ImageFolderSource(path=tmp_path, size=(2, 2))
    assert [spec.name for spec in data.info().fields] == ["image"]
    with pytest.raises(DataError, match="has no array 'label'"):
        ImageFolderSource(path=tmp_path, size=(2, 2), fields={"y": "label"}).info()


def test_scales_to_cover_and_cuts_the_centre(tmp_path):
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200
    Image.fromarray(wide).save(tmp_path / "a.png")
    (batch,) = ImageFolderSource(path=tmp_path, size=(10, 10)).batches(1)
    assert (batch["image"] == 200).all()
    (small,) = ImageFolderSource(path=tmp_path, size=(5, 15)).batches(1)
    assert small["image"].shape == (1, 5, 15, 3)
    assert (small["image"][0, :, :4] == 0).all()
    assert (small["image"][0, :, 6:9] == 200).all()


def test_levels_of_16_bits(tmp_path):
    levels = np.array([[0, 257], [32896, 65535]], np.uint16)
    Image.fromarray(levels).save(tmp_path / "a.png")
    (batch,) = ImageFolderSource(path=tmp_path, size=(2, 2)).batches(1)
    assert batch["image"][0, ..., 0].tolist() == [[0, 1], [128, 255]]


def test_levels_of_16_bits_in_pgm(tmp_path):
    levels = np.array([[0, 257], [32896, 65535]], ">u2")
    (tmp_path / "a.pgm").write_bytes(b"P5\n2 2\n65535\n" + levels.tobytes())
    (batch,) = ImageFolderSource(path=tmp_path, size=(2, 2)).batches(1)
    assert batch["image"][0, ..., 0].tolist() == [[0, 1], [128, 255]]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_levels_of_32_bits_are_refused(dtype, tmp_path):
    Image.fromarray(np.full((2, 2), 1, dtype)).save(tmp_path / "a.tiff")
    with pytest.raises(DataError, match=r"a\.tiff.*grey levels have 32 bits"):
        list(ImageFolderSource(path=tmp_path, size=(2, 2)).batches(1))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "CMYK"])
def test_any_mode_becomes_rgb(tmp_path, mode):
    image = Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode)
    image.save(tmp_path / ("a.tiff" if mode == "CMYK" else "a.png"))
    (batch,) = ImageFolderSource(path=tmp_path, size=(4, 4)).batches(1)
    assert (batch["image"] == 255).all()


def test_samples_are_spread_over_the_classes(tmp_path):
    for label in "abcd":
        for index in range(5):
            paint(tmp_path / label / f"{index}.png", (0, 0, 0))
    data = ImageFolderSource(path=tmp_path, size=(2, 2), samples=4)
    (batch,) = data.batches(8)
    assert batch["label"].tolist() == [0, 1, 2, 3]
    assert data.info().samples == 4


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n" + bytes(40)])
def test_an_unreadable_image_is_named(tmp_path, content):
    paint(tmp_path / "a.png", (0, 0, 0))
    (tmp_path / "broken.png").write_bytes(content)
    batches = ImageFolderSource(path=tmp_path, size=(2, 2)).batches(1)
    next(batches)
    with pytest.raises(DataError, match=r"broken\.png.* cannot be decoded"):
        next(batches)


def test_a_truncated_image_is_named(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.jpg")
    whole = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.jpg"):
        list(ImageFolderSource(path=tmp_path, size=(8, 8)).batches(1))


def test_a_picture_of_far_more_pixels_than_bytes_is_refused(tmp_path):
    whole = bytearray(png(tmp_path / "a.png"))
    whole[16:24] = struct.pack(">II", 7000, 7000)
    whole[29:33] = struct.pack(">I", zlib.crc32(whole[12:29]))
    (tmp_path / "a.png").write_bytes(whole)
    with pytest.raises(DataError, match="373 MiB of pixels in so small a file"):
        list(ImageFolderSource(path=tmp_path, size=(8, 8)).batches(1))


def png(path: Path) -> bytes:
    paint(path, (1, 2, 3))
    return path.read_bytes()


def test_unusable_folders(tmp_path):
    with pytest.raises(DataError, match="has no images"):
        ImageFolderSource(path=tmp_path, size=(2, 2)).info()
    paint(tmp_path / "a" / "x.png", (0, 0, 0))
    paint(tmp_path / "loose.png", (0, 0, 0))
    with pytest.raises(DataError, match=r"loose images, such as 'loose\.png'"):
        ImageFolderSource(path=tmp_path, size=(2, 2)).info()


def test_digest_is_of_names_bytes_and_options(tmp_path):
    first, second = classes(tmp_path / "1"), classes(tmp_path / "2")

    def digest(path: Path, size: tuple[int, int] = (4, 4)) -> str:
        return ImageFolderSource(path=path, size=size).digest()

    before = digest(first)
    assert digest(second) == before
    assert digest(first, (4, 5)) != before
    (second / "dog" / "b.png").rename(second / "dog" / "c.png")
    assert digest(second) != before
