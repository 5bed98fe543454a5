"""The samples whose decision flipped, as pictures or text where they are such."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from compressor.calibration.sources.folds import Fold
from compressor.calibration.sources.tokenizer import open_tokenizer
from compressor.calibration.sources.tokens import TokenSource
from compressor.calibration.sources.user_functions import TransformedSource
from compressor.report import formats
from compressor.report.verdict import Report
from compressor.run.data import Data
from compressor.types.data import IndexedSource, Source
from compressor.types.tensors import Array, Batch, Feed, samples_in

_CHANNELS = (1, 3, 4)
_LEAST_SIDE, _MOST_SIDE = 4, 128
_MOST_WORDS = 160  # characters of text in front of a decision


@dataclass(frozen=True)
class Sample:
    """One sample, as the page shows it.

    Attributes:
        picture: an address that holds the whole image, which is text of our own however long it
            is; empty where the sample is not an image.
        text: what comes before the decision; empty where that is not text.
        wrong: the artifact's answer is not the target's.
    """

    index: int
    target: str
    answers: tuple[str, str]
    picture: Markup
    text: str
    wrong: bool


def shown_samples(report: Report, data: Data | None) -> list[Sample]:
    """Return the samples that the report names as flipped, read again from their source."""
    worst = (report.get("flipped") or {}).get("worst") or []
    if data is None or not worst:
        return []
    source: Source = data.source
    while isinstance(source, TransformedSource):
        source = source.source
    rows = _rows(source, [int(entry["index"]) for entry in worst], data.batch)
    words = source.source if isinstance(source, Fold) else source
    reader = _Reader(words) if isinstance(words, TokenSource) else None
    return [_sample(entry, rows, data.target, reader) for entry in worst]


class _Reader:
    """Makes text of tokens."""

    def __init__(self, source: TokenSource):
        self._tokenizer = open_tokenizer(source.tokenizer)
        self._windows = source.in_windows

    def text(self, arrays: Mapping[str, Array], place: int | None) -> str:
        """Return the text in front of a decision; of a line with one decision, its beginning."""
        rows = [a for a in arrays.values() if a.ndim == 1 and a.dtype.kind in "iu"]
        if not rows or (self._windows and place is None):
            return ""
        # Of tokens, masks and types of tokens, tokens have the largest numbers.
        ids = rows[0] if self._windows else max(rows, key=lambda row: int(row.max(initial=0)))
        if place is None:
            return self._tokenizer.decode(ids.tolist())[:_MOST_WORDS]
        return self._tokenizer.decode(ids[: place + 1].tolist())[-_MOST_WORDS:]

    def answer(self, value: int) -> str:
        """Return what a decision means: in windows, the token that follows."""
        return f"“{self._tokenizer.decode([value])}”" if self._windows else str(value)


def _rows(source: Source, indices: Sequence[int], size: int) -> dict[int, Batch]:
    """Return single samples by their place in the stream of batches.

    Args:
        size: samples in a batch, as they were evaluated: padding depends on it.
    """
    if isinstance(source, IndexedSource):
        batch = source.take(np.asarray(indices, np.int64))
        return {i: {n: a[row] for n, a in batch.items()} for row, i in enumerate(indices)}
    found: dict[int, Batch] = {}
    start = 0
    for batch in source.batches(size, max(indices) + 1):
        count = samples_in(batch)
        for i in set(indices) & set(range(start, start + count)):
            whole = isinstance(batch, Feed)
            found[i] = batch if whole else {n: array[i - start] for n, array in batch.items()}
        start += count
    return found


def _sample(
    entry: Mapping[str, Any],
    rows: Mapping[int, Batch],
    target: str | None,
    reader: _Reader | None,
) -> Sample:
    arrays = {n: a for n, a in rows.get(entry["index"], {}).items() if n != target}
    text = "" if reader is None else reader.text(arrays, entry["place"])
    pictures = () if text else map(_picture, arrays.values())
    picture = next((p for p in pictures if p), Markup())
    answers = [entry[key] for key in ("target", "float", "artifact")]
    words = [_answer(answer, reader if text else None) for answer in answers]
    wrong = answers[0] is not None and answers[0] != answers[2]
    return Sample(entry["index"], words[0], (words[1], words[2]), picture, text, wrong)


def _answer(value: int | None, reader: _Reader | None) -> str:
    if value is None:
        return formats.NOTHING
    return str(value) if reader is None else reader.answer(value)


def _picture(array: Array) -> Markup:
    """Return an image as an address that holds it; empty for what is not an image.

    Args:
        array: ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]``; floats are spread over the range that
            they span.
    """
    if array.ndim == 3 and array.shape[-1] not in _CHANNELS and array.shape[0] in _CHANNELS:
        array = array.transpose(1, 2, 0)
    flat = array.ndim == 2
    if not flat and (array.ndim != 3 or array.shape[-1] not in _CHANNELS):
        return Markup()
    if min(array.shape[:2]) < _LEAST_SIDE or array.dtype.kind not in "uif":
        return Markup()
    pixels = array if flat or array.shape[-1] > 1 else array[..., 0]
    if pixels.dtype != np.uint8:
        values = np.nan_to_num(pixels.astype(np.float64))
        low, span = values.min(), np.ptp(values) or 1.0
        pixels = np.round((values - low) / span * 255).astype(np.uint8)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    form = "png"
    if max(image.size) > _MOST_SIDE:  # its pixels are not those of the sample any more
        form, image = "jpeg", image.convert("RGB")
        image.thumbnail((_MOST_SIDE, _MOST_SIDE))
    stream = BytesIO()
    image.save(stream, form, optimize=True)
    code = base64.b64encode(stream.getvalue()).decode("ascii")
    return Markup(f"data:image/{form};base64,{code}")
