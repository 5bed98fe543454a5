"""How the image source prepares images: parity with Pillow and torchvision's formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from compressor.calibration.sources.image_steps import UNIT, ImageSteps, Resized
from compressor.calibration.sources.images import ImageFolderSource
from compressor.errors import SpecError
from compressor.types.tensors import TensorSpec

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return noise that is smooth in places, so that filters and offsets show."""
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    levels[: height // 2] = np.arange(width, dtype=np.uint8)[None, :, None]
    return Image.fromarray(levels)


def read(folder: Path, image: Image.Image, **options: Any) -> np.ndarray:
    image.save(folder / "a.png")
    (batch,) = ImageFolderSource(path=folder, **options).batches(1)
    return batch["image"][0]


def shorter_side(image: Image.Image, side: int, resample: Image.Resampling) -> Image.Image:
    """Resize as torchvision documents it: "the smaller edge ... to size * height / width"."""
    if image.width <= image.height:
        return image.resize((side, int(side * image.height / image.width)), resample)
    return image.resize((int(side * image.width / image.height), side), resample)


def centre(image: Image.Image, side: int) -> np.ndarray:
    """Crop as torchvision does: pad by halves, the smaller first; then round to even halves."""
    array = np.asarray(image)
    pads = [(max(side - n, 0) // 2, (max(side - n, 0) + 1) // 2) for n in array.shape[:2]]
    array = np.pad(array, [*pads, (0, 0)])
    top, left = (int(round((n - side) / 2.0)) for n in array.shape[:2])  # noqa: RUF046
    return array[top : top + side, left : left + side]


def normalized(array: np.ndarray) -> torch.Tensor:
    """Return what ``ToTensor`` and ``Normalize`` give, channels first."""
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1).to(torch.float32).div(255)
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return tensor.sub(mean).div(std)


@settings(max_examples=60, deadline=None)
@given(
    sides=st.tuples(st.integers(5, 60), st.integers(5, 60)),
    side=st.integers(4, 40),
    crop=st.integers(3, 44),
    name=st.sampled_from(["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]),
)
def test_shorter_side_and_crop_are_torchvisions(sides, side, crop, name):
    image = noise(*sides)
    steps = ImageSteps(
        Resized("shorter", (side, side)), (crop, crop), name, "rgb", UNIT, MEAN, STD,
        "channels-first",
    )  # fmt: skip
    expected = centre(shorter_side(image, side, Image.Resampling[name.upper()]), crop)
    pixels = steps.pixels(image)
    np.testing.assert_array_equal(pixels, expected)
    values = steps.values(pixels[None])[0]
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, normalized(expected).numpy())  # bit for bit


def test_both_sides_stretch(tmp_path):
    image = noise(31, 20)
    made = read(tmp_path, image, resize=(12, 17), interpolation="bicubic")
    expected = image.resize((17, 12), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(made, np.asarray(expected))
    assert made.dtype == np.uint8


@pytest.mark.parametrize("sides", [(10, 31), (31, 10), (20, 20)])
def test_a_letterbox_keeps_the_proportion_between_borders(tmp_path, sides):
    image = Image.fromarray(np.full((*sides, 3), 200, np.uint8))
    made = read(tmp_path, image, resize={"letterbox": [16, 24], "fill": 114})
    expected = ImageOps.pad(image, (24, 16), Image.Resampling.BILINEAR, color=(114, 114, 114))
    np.testing.assert_array_equal(made, np.asarray(expected))
    inside = (made == 200).all(axis=-1)
    rows, columns = inside.any(axis=1).sum(), inside.any(axis=0).sum()
    scale = min(16 / sides[0], 24 / sides[1])
    assert (rows, columns) == (round(sides[0] * scale), round(sides[1] * scale))
    assert (made[~inside] == 114).all()


def test_colours(tmp_path):
    image = noise(9, 9)
    rgb = np.asarray(image)
    np.testing.assert_array_equal(read(tmp_path, image, crop=9, colour="bgr"), rgb[..., ::-1])
    grey = read(tmp_path, image, crop=9, colour="grey", layout="channels-first")
    assert grey.shape == (1, 9, 9)
    # ITU-R 601, as Pillow documents it for mode L
    weights = rgb.astype(np.float64) @ [0.299, 0.587, 0.114]
    assert np.abs(grey[0] - weights).max() <= 0.51


def test_mean_of_bgr_is_in_its_order(tmp_path):
    image = Image.new("RGB", (4, 4), (10, 20, 30))
    made = read(tmp_path, image, crop=4, colour="bgr", scale=1, mean=[30, 20, 9])
    assert made[0, 0].tolist() == [0, 0, 1]


def test_scale_alone_gives_floats_without_normalizing(tmp_path):
    image = Image.new("RGB", (4, 4), (0, 51, 255))
    made = read(tmp_path, image, crop=4, scale=2.0)
    assert (made.dtype, made[0, 0].tolist()) == (np.float32, [0.0, 102.0, 510.0])
    unit = read(tmp_path, image, crop=4, mean=0)
    assert unit[0, 0].tolist() == [0.0, np.float32(0.2), 1.0]


def test_headers_tell_shape_and_type_before_decoding(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    source = ImageFolderSource(
        path=tmp_path, resize=16, crop=(8, 12), std=MEAN, layout="channels-first"
    )
    assert source.info().fields == (TensorSpec("image", ("batch", 3, 8, 12), "float32"),)
    (batch,) = source.batches(4)
    assert (batch["image"].shape, batch["image"].dtype) == ((1, 3, 8, 12), np.float32)
    assert source.take(np.array([], np.int64))["image"].shape == (0, 3, 8, 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give size, or resize and crop, or preprocessor"),
        ({"size": (4, 4), "crop": 4}, "has size beside resize or crop"),
        ({"resize": 16}, r"add crop, or give both sides: resize: \[16, 16\]"),
        ({"crop": 4, "mean": [1, 2]}, "mean has 2 values for colour: rgb; give one, or 3"),
        ({"crop": 4, "colour": "grey", "std": STD}, "std has 3 values for colour: grey"),
        ({"crop": 4, "std": [1, 0, 1]}, "std contains 0"),
    ],
)
def test_what_does_not_fit_together(tmp_path, options, message):
    with pytest.raises(SpecError, match=message):
        ImageFolderSource(path=tmp_path, **options)


def test_classes_number_the_folders(tmp_path):
    for name in ("ant", "bee", "cat"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / name / "a.png")
    numbers = {"bee": 0, "cat": 7, "ant": 3, "dog": 1}
    source = ImageFolderSource(path=tmp_path, crop=4, classes=numbers)
    (batch,) = source.batches(9)
    assert batch["label"].tolist() == [3, 0, 7]
    assert source.described().endswith("3 classes: 'bee', 'ant', 'cat'")
    other = ImageFolderSource(path=tmp_path, crop=4)
    assert other.digest() != source.digest()


@pytest.mark.slow
def test_torchvision_gives_the_same(tmp_path):
    transforms = pytest.importorskip("torchvision.transforms")
    modes = {"bilinear": "BILINEAR", "bicubic": "BICUBIC", "nearest": "NEAREST", "box": "BOX"}
    for seed, (height, width) in enumerate([(40, 61), (61, 40), (33, 33), (20, 97), (9, 300)]):
        image = noise(height, width, seed)
        for name, mode in modes.items():
            for side, crop in ((32, 27), (32, 24), (30, 45), (11, 64)):
                theirs = transforms.Compose([
                    transforms.Resize(side, transforms.InterpolationMode[mode]),
                    transforms.CenterCrop(crop),
                    transforms.ToTensor(),
                    transforms.Normalize(MEAN, STD),
                ])(image)  # fmt: skip
                options = {"mean": MEAN, "std": STD, "layout": "channels-first"}
                made = read(tmp_path, image, resize=side, crop=crop, interpolation=name, **options)
                np.testing.assert_array_equal(made, theirs.numpy())
