"""How a published model wants its images, read from the files that come with it.

Two kinds are read: ``preprocessor_config.json`` of ``transformers``, for the processors that do
nothing but resize, crop, rescale and normalize; and the ``pretrained_cfg`` in ``timm``'s
``config.json``, whose evaluation resizes to the size over ``crop_pct`` and cuts the centre out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from PIL import Image

from compressor.calibration.sources.image_steps import UNIT, ImageSteps, Interpolation, Resized
from compressor.errors import DataError, SpecError

_FILES = ("preprocessor_config.json", "processor_config.json", "config.json")
_CONFIG = "config.json"
_MOST = 4 << 20  # bytes of a file that is read
_SHORT = 384  # ConvNeXT: a size from which images are stretched and not cropped
_LEVIT = 256 / 224


@dataclass(frozen=True)
class _Family:
    """Defaults of a processor of ``transformers``, for what its file leaves out.

    Attributes:
        resample: Pillow's number of the interpolation.
        square: a single number as size is both sides, and otherwise the shorter side.
        crops: the centre is cut out.
    """

    resample: int = 3
    square: bool = True
    crops: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "Beit": _Family(),
    "Bit": _Family(square=False, crops=True),
    "Blip": _Family(),
    "CLIP": _Family(square=False, crops=True),
    "ChineseCLIP": _Family(square=False, crops=True),
    "ConvNext": _Family(square=False),
    "DeiT": _Family(crops=True),
    "EfficientNet": _Family(),
    "Levit": _Family(square=False, crops=True),
    "MobileNetV1": _Family(resample=2, square=False, crops=True),
    "MobileNetV2": _Family(resample=2, square=False, crops=True),
    "MobileViT": _Family(square=False, crops=True),
    "Pvt": _Family(),
    "Segformer": _Family(resample=2),
    "Siglip": _Family(),
    "ViT": _Family(resample=2),
}
_DONE = {"resize", "center_crop", "rescale", "normalize", "convert_rgb", "flip_channel_order"}
_OF_LABELS = {"reduce_labels"}  # says nothing about images
_REMEDY = "write resize, crop, mean and std into the spec instead of preprocessor"


def processor_file(place: Path) -> Path | None:
    """Return the file that says how images are prepared; ``None`` if there is none.

    Args:
        place: the file itself, or the folder of a model; of a folder named ``onnx``, the one around
            it counts too.

    Raises:
        DataError: a file in the folder that may say so is damaged.
    """
    if place.is_file():
        return place
    folders = [place, place.parent] if place.name == "onnx" else [place]
    for folder in folders:
        for name in _FILES:
            path = folder / name
            if path.is_file() and _of_images(path):
                return path
    return None


def _of_images(path: Path) -> bool:
    value = _section(_read(path))
    return _type(value) != "" or isinstance(value.get("pretrained_cfg"), Mapping)


def processor_steps(place: Path) -> ImageSteps:
    """Return the image steps that a model's own file describes.

    Args:
        place: the file, or the folder that has it.

    Raises:
        SpecError: there is no such file.
        DataError: it is damaged, or does more than :class:`ImageSteps` can.
    """
    path = processor_file(place)
    if path is None:
        problem = f"has none of {', '.join(_FILES)} that describes how images are prepared"
        raise SpecError(f"preprocessor '{place}'", problem, _REMEDY)
    value = _section(_read(path))
    subject = f"preprocessor '{path}'"
    timm = value.get("pretrained_cfg")
    try:
        return _of_timm(timm) if isinstance(timm, Mapping) else _of_transformers(value)
    except KeyError as error:
        raise DataError(subject, f"has no {error.args[0]!r}", _REMEDY) from error
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(subject, str(error), _REMEDY) from error


def classes_beside(place: Path) -> dict[str, int]:
    """Return the numbers of classes by name, from ``label2id`` in ``config.json`` beside a file."""
    path = processor_file(place)
    config = None if path is None else path.with_name(_CONFIG)
    if config is None or not config.is_file():
        return {}
    table = _read(config).get("label2id")
    entries = table.items() if isinstance(table, Mapping) else ()
    return {str(name): number for name, number in entries if isinstance(number, int)}


def _read(path: Path) -> dict[str, Any]:
    subject, remedy = f"preprocessor '{path}'", "download it again"
    try:
        if path.stat().st_size > _MOST:
            raise DataError(subject, f"has more than {_MOST >> 20} MiB", remedy)
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(subject, f"cannot be read ({error})", remedy) from error
    if not isinstance(value, dict):
        raise DataError(subject, "holds no JSON object", remedy)
    return value


def _section(value: dict[str, Any]) -> dict[str, Any]:
    """Return the part about images of a file that may be about text or sound too."""
    inner = value.get("image_processor")
    return inner if isinstance(inner, dict) else value


def _type(value: Mapping[str, Any]) -> str:
    """Return the name of a processor of images, such as ``ViT``; empty if it is none."""
    name = value.get("image_processor_type", value.get("feature_extractor_type"))
    if not isinstance(name, str):
        return ""
    named = name.removesuffix("Fast").removesuffix("Pil").removesuffix("ImageProcessor")
    named = named.removesuffix("FeatureExtractor")
    return named if "image_processor_type" in value or named in _FAMILIES else ""


def _of_transformers(value: Mapping[str, Any]) -> ImageSteps:
    name = _type(value)
    if name not in _FAMILIES:
        raise ValueError(
            f"is of the processor {name!r}, but supported ones are {', '.join(sorted(_FAMILIES))}"
        )
    family = _FAMILIES[name]
    steps = [k.removeprefix("do_") for k, v in value.items() if k.startswith("do_") and v]
    other = sorted({*steps} - _DONE - _OF_LABELS)
    if other:
        raise ValueError(f"does more than resize, crop and normalize: do_{other[0]}")
    resize, crop = _sizes(value, name, family)
    offset = 1.0 if name == "EfficientNet" and value.get("rescale_offset") else 0.0
    scale = float(value.get("rescale_factor", UNIT)) if value.get("do_rescale", True) else 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if value.get("do_normalize", name != "MobileViT"):
        mean, std = _channels(value["image_mean"]), _channels(value["image_std"])
    mean = tuple(m + offset for m in mean or (0.0,) * bool(offset))
    if name == "EfficientNet" and value.get("include_top", True):  # divided once more
        again = _channels(value["image_std"])
        std = tuple(a * b for a, b in zip(std or (1.0,) * len(again), again, strict=True))
    flipped = value.get("do_flip_channel_order", name == "MobileViT")
    return ImageSteps(
        resize,
        crop,
        _interpolation(value.get("resample", family.resample)),
        "bgr" if flipped else "rgb",
        scale,
        mean,
        std,
        "channels-first",
        centred_down=True,
    )


def _sizes(
    value: Mapping[str, Any], name: str, family: _Family
) -> tuple[Resized | None, tuple[int, int] | None]:
    """Return how a processor of ``transformers`` resizes and crops."""
    resize: Resized | None = None
    crop: tuple[int, int] | None = None
    if value.get("do_resize", True):
        short, both = _size(value["size"], square=family.square)
        if name == "ConvNext":
            side = short or both[0]
            if side < _SHORT:
                wider = int(side / float(value.get("crop_pct") or 224 / 256))
                return Resized("shorter", (wider, wider)), (side, side)
            return Resized("both", (side, side)), None
        if short and name == "Levit":
            short = int(_LEVIT * short)
        resize = Resized("shorter", (short, short)) if short else Resized("both", both)
    if value.get("do_center_crop", family.crops):
        short, both = _size(value["crop_size"], square=True)
        crop = (short, short) if short else both
    return resize, crop


def _size(size: Any, *, square: bool) -> tuple[int, tuple[int, int]]:
    """Return the length of the shorter side, or 0, and height and width."""
    if isinstance(size, Mapping):
        keys = {key for key, length in size.items() if length is not None}
        if keys == {"shortest_edge"}:
            return _length(size["shortest_edge"]), (0, 0)
        if keys != {"height", "width"}:
            raise ValueError(f"has a size by {', '.join(sorted(map(str, keys)))}")
        return 0, (_length(size["height"]), _length(size["width"]))
    if isinstance(size, list) and len(size) == 2:
        return 0, (_length(size[0]), _length(size[1]))
    side = _length(size)
    return (0, (side, side)) if square else (side, (0, 0))


def _length(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 1 << 16:
        raise ValueError(f"has the size {value!r}")
    return value


def _channels(value: Any) -> tuple[float, ...]:
    values = tuple(float(v) for v in (value if isinstance(value, list) else [value]))
    if not all(map(math.isfinite, values)):
        raise ValueError(f"has {value} as mean or std")
    return values


def _interpolation(number: Any) -> Interpolation:
    """Return the interpolation by Pillow's number."""
    return cast("Interpolation", Image.Resampling(number).name.lower())


def _of_timm(value: Mapping[str, Any]) -> ImageSteps:
    """Return the evaluation of a model of ``timm`` by the values in its ``pretrained_cfg``."""
    height, width = (_length(side) for side in value["input_size"][1:])
    ratio = float(value.get("crop_pct") or 0.875)
    if not 0 < ratio <= 1:
        raise ValueError(f"has crop_pct {ratio:g}")
    mode = value.get("crop_mode") or "center"
    larger = math.floor(height / ratio), math.floor(width / ratio)
    way: Literal["shorter", "both"] = "both" if mode == "squash" else "shorter"
    if mode not in ("center", "squash") or (way == "shorter" and height != width):
        raise ValueError(f"has crop_mode {mode!r} for {height} x {width}")
    name = value.get("interpolation") or "bilinear"
    if str(name).upper() not in Image.Resampling.__members__:
        raise ValueError(f"has the interpolation {name!r}")
    return ImageSteps(
        Resized(way, larger),
        (height, width),
        cast("Interpolation", Image.Resampling[str(name).upper()].name.lower()),
        "rgb",
        UNIT,
        _channels(value["mean"]),
        _channels(value["std"]),
        "channels-first",
    )
