"""What a model's own file says about images: parity with the processors of transformers."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compressor.calibration.sources.image_processors import classes_beside, processor_steps
from compressor.calibration.sources.image_steps import UNIT, ImageSteps, Resized
from compressor.calibration.sources.images import ImageFolderSource
from compressor.errors import DataError, SpecError

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
NORMAL = {"image_mean": MEAN, "image_std": STD}
SQUARE = {"height": 12, "width": 12}


def write(folder: Path, name: str = "preprocessor_config.json", /, **value: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


# Each family as its models are saved, and older files, which leave keys out.
PROCESSORS: dict[str, dict[str, Any]] = {
    "vit": {"image_processor_type": "ViTImageProcessor", "size": SQUARE, "resample": 2, **NORMAL},
    "vit-old": {"feature_extractor_type": "ViTFeatureExtractor", "size": 12, **NORMAL},
    "clip": {
        "image_processor_type": "CLIPImageProcessorFast",
        "size": {"shortest_edge": 17},
        "crop_size": SQUARE,
        **NORMAL,
    },
    "clip-old": {
        "feature_extractor_type": "CLIPFeatureExtractor",
        "size": 15,
        "crop_size": 12,
        "resample": 3,
        **NORMAL,
    },
    "deit": {"image_processor_type": "DeiTImageProcessor", "size": 16, "crop_size": 11, **NORMAL},
    "beit": {"image_processor_type": "BeitImageProcessor", "size": SQUARE, **NORMAL},
    "bit": {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": 16},
        "crop_size": {"height": 9, "width": 12},
        **NORMAL,
    },
    "convnext": {
        "image_processor_type": "ConvNextImageProcessor",
        "size": {"shortest_edge": 12},
        "crop_pct": 0.8,
        **NORMAL,
    },
    "convnext-large": {"image_processor_type": "ConvNextImageProcessor", "size": 384, **NORMAL},
    "mobilenet_v2": {
        "image_processor_type": "MobileNetV2ImageProcessor",
        "size": {"shortest_edge": 16},
        "crop_size": SQUARE,
        "do_reduce_labels": False,
        **NORMAL,
    },
    "mobilevit": {
        "image_processor_type": "MobileViTImageProcessor",
        "size": {"shortest_edge": 14},
        "crop_size": SQUARE,
    },
    "levit": {
        "image_processor_type": "LevitImageProcessor",
        "size": {"shortest_edge": 14},
        "crop_size": SQUARE,
        **NORMAL,
    },
    "siglip": {"image_processor_type": "SiglipImageProcessor", "size": SQUARE, **NORMAL},
    "efficientnet": {
        "image_processor_type": "EfficientNetImageProcessor",
        "size": SQUARE,
        "resample": 0,
        "rescale_offset": True,
        "rescale_factor": 1 / 127.5,
        **NORMAL,
    },
    "pvt": {
        "image_processor_type": "PvtImageProcessor",
        "size": SQUARE,
        "do_rescale": False,
        **NORMAL,
    },
}
CLASSES = {"vit": "ViT", "clip": "CLIP", "deit": "DeiT", "convnext": "ConvNext"}
CLASSES |= {"mobilenet_v2": "MobileNetV2", "mobilevit": "MobileViT"}
CLASSES |= {"efficientnet": "EfficientNet"}


@pytest.mark.parametrize("case", PROCESSORS)
def test_values_are_those_of_transformers(tmp_path, case):
    pytest.importorskip("transformers")
    family = case.partition("-")[0]
    module = import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    cls = getattr(module, f"{CLASSES.get(family, family.title())}ImageProcessorPil")
    options = PROCESSORS[case]
    given = {k: v for k, v in options.items() if not k.endswith("_type")}
    write(tmp_path, **options)
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, sides in (("a", (23, 40)), ("b", (31, 18)), ("c", (10, 26))):
        image = Image.fromarray(rng.integers(0, 256, (*sides, 3), np.uint8))
        image.save(folder / f"{name}.png")
        processed = cls(**given)(image, do_convert_rgb=True, return_tensors="np")
        expected = processed["pixel_values"][0]
        (batch,) = ImageFolderSource(path=folder, preprocessor=tmp_path).batches(1)
        np.testing.assert_allclose(batch["image"][0], expected, rtol=1e-5, atol=1e-5)
        (folder / f"{name}.png").unlink()


def test_timm_resizes_to_the_size_over_crop_pct(tmp_path):
    cfg = {
        "input_size": [3, 15, 15],
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": MEAN,
        "std": STD,
    }
    write(tmp_path, "config.json", architecture="resnet50", pretrained_cfg=cfg)
    expected = ImageSteps(
        Resized("shorter", (16, 16)),  # floor(15 / 0.9) = floor(16.67)
        (15, 15),
        "bicubic",
        "rgb",
        UNIT,
        tuple(MEAN),
        tuple(STD),
        "channels-first",
    )
    assert processor_steps(tmp_path) == expected
    write(tmp_path, "config.json", pretrained_cfg=cfg | {"crop_mode": "squash"})
    assert processor_steps(tmp_path).resize == Resized("both", (16, 16))
    write(tmp_path, "config.json", pretrained_cfg=cfg | {"crop_mode": "border"})
    with pytest.raises(DataError, match="has crop_mode 'border' for 15 x 15"):
        processor_steps(tmp_path)


@pytest.mark.slow
def test_timm_gives_the_same(tmp_path):
    data = pytest.importorskip("timm.data")
    rng = np.random.default_rng(0)
    folder = tmp_path / "images"
    folder.mkdir()
    for crop_pct, mode in ((0.875, "center"), (0.95, "squash"), (1.0, "center")):
        cfg = {
            "input_size": [3, 24, 24],
            "crop_pct": crop_pct,
            "crop_mode": mode,
            "interpolation": "bicubic",
            "mean": MEAN,
            "std": STD,
        }
        write(tmp_path, "config.json", pretrained_cfg=cfg)
        resolved = data.resolve_data_config(pretrained_cfg=cfg)
        transform = data.create_transform(**resolved)
        for sides in ((40, 61), (61, 40), (33, 33)):
            image = Image.fromarray(rng.integers(0, 256, (*sides, 3), np.uint8))
            image.save(folder / "a.png")
            (batch,) = ImageFolderSource(path=folder, preprocessor=tmp_path).batches(1)
            np.testing.assert_array_equal(batch["image"][0], transform(image).numpy())


def test_keys_of_the_spec_replace_what_the_file_says(tmp_path):
    write(tmp_path, **PROCESSORS["clip"])
    folder = tmp_path / "images"
    folder.mkdir()

    def steps(**options: Any) -> ImageSteps:
        return ImageFolderSource(path=folder, preprocessor=tmp_path, **options).steps

    read = steps()
    assert (read.resize, read.crop) == (Resized("shorter", (17, 17)), (12, 12))
    assert steps(resize=20).resize == Resized("shorter", (20, 20))
    assert steps(resize=20).crop == (12, 12)
    whole = steps(size=(8, 9), mean=0, layout="channels-last", scale=1)
    assert (whole.resize, whole.crop) == (Resized("cover", (8, 9)), None)
    assert (whole.mean, whole.std, whole.scale) == ((0,), tuple(STD), 1)
    assert whole.shape == (8, 9, 3)
    with pytest.raises(DataError, match="mean has 2 values"):
        steps(mean=[1, 2])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"image_processor_type": "SamImageProcessor"}, "is of the processor 'Sam'"),
        (PROCESSORS["vit"] | {"do_pad": True}, "does more than .* do_pad"),
        (PROCESSORS["vit"] | {"size": {"longest_edge": 9}}, "has a size by longest_edge"),
        (PROCESSORS["vit"] | {"size": 0}, "has the size 0"),
        (PROCESSORS["vit"] | {"resample": 9}, "9 is not a valid Resampling"),
        (PROCESSORS["vit"] | {"image_mean": ["a"]}, "could not convert"),
        ({"image_processor_type": "ViTImageProcessor", "size": 4}, "has no 'image_mean'"),
        (PROCESSORS["clip"] | {"do_center_crop": False}, "add crop"),
    ],
)
def test_what_cannot_be_followed_is_refused(tmp_path, value, message):
    path = write(tmp_path, **value)
    with pytest.raises(DataError, match=message) as raised:
        processor_steps(path)
    assert str(path) in str(raised.value)
    assert "write resize, crop, mean and std" in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_damaged_files(tmp_path, content):
    path = tmp_path / "preprocessor_config.json"
    path.write_bytes(content)
    for place in (path, tmp_path):
        with pytest.raises(DataError, match=r"config.json': (cannot be read|holds no JSON object)"):
            processor_steps(place)


def test_a_place_without_such_a_file(tmp_path):
    with pytest.raises(SpecError, match=r"has none of preprocessor_config\.json"):
        processor_steps(tmp_path)


def test_a_file_about_sound_or_text_is_passed_over(tmp_path):
    write(tmp_path, feature_extractor_type="WhisperFeatureExtractor")
    write(tmp_path, "config.json", model_type="whisper")
    with pytest.raises(SpecError, match="has none of"):
        processor_steps(tmp_path)
    write(tmp_path, "processor_config.json", image_processor=PROCESSORS["vit"])
    assert processor_steps(tmp_path).resize == Resized("both", (12, 12))


def test_labels_come_from_label2id_if_it_names_all_folders(tmp_path):
    write(tmp_path, **PROCESSORS["vit"])
    write(tmp_path, "config.json", label2id={"dog": 0, "cat": 4, "eel": 2, "bad": "x"})
    assert classes_beside(tmp_path) == {"dog": 0, "cat": 4, "eel": 2}
    folder = tmp_path / "images"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / name / "a.png")
    source = ImageFolderSource(path=folder, preprocessor=tmp_path)
    (batch,) = source.batches(9)
    assert batch["label"].tolist() == [4, 0]
    (folder / "cat").rename(folder / "cow")
    (batch,) = ImageFolderSource(path=folder, preprocessor=tmp_path).batches(9)
    assert batch["label"].tolist() == [0, 1]


def test_the_digest_is_of_what_the_file_says_and_not_of_its_place(tmp_path):
    digests = []
    for name, width in (("one", 12), ("two", 12), ("three", 13)):
        place = tmp_path / name
        (place / "images").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(place / "images" / "a.png")
        write(place, **PROCESSORS["vit"] | {"size": {"height": 12, "width": width}})
        digests.append(ImageFolderSource(path=place / "images", preprocessor=place).digest())
    assert digests[0] == digests[1] != digests[2]
