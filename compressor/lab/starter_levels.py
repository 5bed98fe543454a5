"""How the pixels of images were scaled in training, as far as a model shows it.

A batch norm that is not folded holds the mean and variance of what reached it in training. Images
in the scale of training give nearly these, those in another do not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from compressor import catalog
from compressor.errors import ModelError
from compressor.graph.operators import operator
from compressor.graph.values import constant_array
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.models.torch.lowering import OPSET
from compressor.types.carrier import Capability
from compressor.types.tensors import Array

Levels = tuple[str, str, str]
"""Mean and deviation of levels from 0 to 1, and a comment on them."""

CHECK = "CHECK: as in training, of levels from 0 to 1"
_SEEN = "CHECK: the usual scale nearest to what the first batch norm saw"
IMAGENET = "[0.485, 0.456, 0.406]", "[0.229, 0.224, 0.225]"
_USUAL = (
    IMAGENET,
    ("[0, 0, 0]", "[1, 1, 1]"),
    ("[0.5, 0.5, 0.5]", "[0.5, 0.5, 0.5]"),
    ("[0, 0, 0]", "[0.00392157, 0.00392157, 0.00392157]"),  # levels from 0 to 255
)
_IMAGES = 16
_AXES, _COLOURS = 4, 3
_CLEARLY = 0.5  # of the next divergence
_LEAST = 1e-12


def level_keys(model: Path, folder: Path, size: Sequence[int], *, grey: bool) -> Iterator[str]:
    """Yield the keys of a folder of images that scale their levels.

    Args:
        size: height and width.
    """
    of_colours = None if grey else _levels(model, "images", folder, size=tuple(size))
    mean, std, why = of_colours or ("0", "1", CHECK)
    yield f"mean: {mean} # {why}"
    yield f"std: {std}"


def array_levels(model: Path, kind: str, file: Path, name: str) -> Levels:
    """Return the levels of an array of colour images in a file."""
    if not file.is_file():  # of a folder, each file is a sample
        return (*_USUAL[0], CHECK)
    return _levels(model, kind, file, array=name)


@cache
def _levels(
    model: Path, kind: str, place: Path, *, array: str = "", size: tuple[int, ...] = ()
) -> Levels:
    default = (*_USUAL[0], CHECK)
    if model.suffix != ".onnx":
        return default
    chosen: dict[str, Any] = {"fields": {array: array}} if array else {"size": size}
    source = catalog.load("source", kind).model_validate({"path": place, **chosen})
    batches = [next(iter(batch.values())) for batch in source.batches(1, _IMAGES)]
    images = np.concatenate(batches)
    if images.dtype != np.uint8 or images.ndim != _AXES or _COLOURS not in images.shape[1::2]:
        return default
    images = images if images.shape[-1] == _COLOURS else np.moveaxis(images, 1, -1)
    try:
        found = _divergences(open_onnx(model, OPSET), images)
    except ModelError:  # such as one that takes another size
        return default
    order = np.argsort(found)
    clear = len(found) and found[order[0]] < _CLEARLY * found[order[1]]
    return (*_USUAL[order[0]], _SEEN) if clear else default


def _divergences(carrier: OnnxCarrier, images: Array) -> list[float]:
    """Return how far the values at the first batch norm are from its own, for each usual scale.

    The divergence is that of normal distributions (Kullback and Leibler 1951), the median over
    channels.

    Args:
        images: uint8 ``[N, height, width, 3]``.

    Returns:
        Nothing where the model has no such norm, or other inputs.
    """
    nodes = [n for n in carrier.graph().graph if operator(n).running_statistics]
    constants = [constant_array(v) for v in nodes[0].inputs[3:5]] if nodes else [None]
    (spec, *others), (tap, *_) = carrier.inputs, nodes[0].inputs if nodes else [None]
    known = [c.astype(np.float64) for c in constants if c is not None]
    if others or spec.dtype != "float32" or tap is None or len(known) < len(constants):
        return []
    if Capability.RUN not in carrier.offers or len(spec.shape) != _AXES:
        return []
    runner, found, (mean, variance) = carrier.runner([tap.name or ""]), [], known
    count = spec.shape[0] if isinstance(spec.shape[0], int) else 1
    for middle, spread in (map(json.loads, usual[:2]) for usual in _USUAL):
        scaled = ((images / 255 - middle) / spread).astype(np.float32)
        scaled = scaled if spec.shape[-1] == _COLOURS else np.moveaxis(scaled, -1, 1)
        starts = range(0, len(scaled) - count + 1, count)
        given = (np.ascontiguousarray(scaled[i : i + count]) for i in starts)
        values = [runner.run({spec.name: part})[tap.name or ""] for part in given]
        if not values:
            return []
        rows = np.moveaxis(np.concatenate(values), 1, 0).reshape(len(mean), -1).astype(np.float64)
        ratio = np.maximum(rows.var(1), _LEAST) / np.maximum(variance, _LEAST)
        off = (rows.mean(1) - mean) ** 2 / np.maximum(variance, _LEAST)
        found.append(float(np.median(ratio + off - 1 - np.log(ratio)) / 2))
    return found
