"""Samples of a run as pictures or text, read again from their source."""

from __future__ import annotations

import base64
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compressor import catalog
from compressor.calibration.sources.tokens import TokenSource
from compressor.report.samples import shown_samples
from compressor.run.data import Data
from compressor.types.data import Source, SourceInfo
from compressor.types.tensors import Array, Batch

ROOT = Path(__file__).parents[3]


class Stream:
    """Batches, one after the other, as a user's factory gives them."""

    def __init__(self, **arrays: Array):
        self.arrays = arrays

    def info(self) -> SourceInfo:
        return SourceInfo(None, ())

    def batches(self, size: int, limit: int | None = None) -> Any:
        count = min(len(next(iter(self.arrays.values()))), limit or 10**9)
        for start in range(0, count, size):
            yield {n: a[start : min(start + size, count)] for n, a in self.arrays.items()}

    def digest(self) -> str:
        return ""


class Indexed(Stream):
    def take(self, rows: Array) -> Batch:
        return {name: array[rows] for name, array in self.arrays.items()}


def data(source: Source, target: str | None = "label") -> Data:
    return Data("evaluation", source, target, 32, "", "")


def report(*indices: int, place: int | None = None) -> dict[str, Any]:
    worst = [
        {"index": i, "place": place, "target": 1, "float": 1, "artifact": 2, "margin": 0.5}
        for i in indices
    ]
    return {"flipped": {"worst": worst}}


def decoded(address: str, kind: str = "png") -> Array:
    form, _, content = address.partition(",")
    assert form == f"data:image/{kind};base64"
    return np.asarray(Image.open(BytesIO(base64.b64decode(content))))


@pytest.mark.parametrize("kind", [Stream, Indexed])
@pytest.mark.parametrize(
    ("shape", "seen"), [((8, 9, 3), (8, 9, 3)), ((3, 8, 9), (8, 9, 3)), ((1, 8, 9), (8, 9))]
)
def test_images_are_shown_as_they_are(
    kind: type[Stream], shape: tuple[int, ...], seen: tuple[int, ...]
):
    images = np.random.default_rng(0).integers(0, 256, (600, *shape)).astype(np.uint8)
    source = kind(image=images, label=np.zeros(600, np.int64))
    found = shown_samples(report(513, 2), data(source))
    assert [(sample.index, sample.wrong) for sample in found] == [(513, True), (2, True)]
    for sample in found:
        want = images[sample.index]
        want = want.transpose(1, 2, 0) if shape[0] in (1, 3) else want
        np.testing.assert_array_equal(decoded(sample.picture), want.reshape(seen))


def test_floats_span_black_to_white_and_large_images_shrink():
    image = np.linspace(-2.0, 2.0, 300 * 400, dtype=np.float32).reshape(1, 300, 400)
    (sample,) = shown_samples(report(0), data(Stream(image=image)))
    pixels = decoded(sample.picture, "jpeg")
    assert pixels.shape == (96, 128, 3)
    assert pixels.min() <= 5
    assert pixels.max() >= 250
    small = image[:, ::20, ::20]
    (sample,) = shown_samples(report(0), data(Stream(image=small)))
    pixels = decoded(sample.picture)
    assert (pixels.shape, pixels.min(), pixels.max()) == ((15, 20), 0, 255)


def test_what_is_neither_picture_nor_text_has_its_number():
    (sample,) = shown_samples(report(1), data(Stream(x=np.zeros((3, 17), np.float32))))
    assert (sample.picture, sample.text) == ("", "")
    assert (sample.index, sample.target, sample.answers) == (1, "1", ("1", "2"))
    assert shown_samples({}, None) == []
    assert shown_samples({"flipped": None}, data(Stream(x=np.zeros((3, 17))))) == []


def test_text_is_decoded_up_to_the_decision():
    pytest.importorskip("tokenizers")
    folder = ROOT / "samples" / "tiny-llama"
    from compressor.calibration.sources import tokenizer, tokens

    kinds = [c for c in vars(tokens).values() if isinstance(c, type) and issubclass(c, TokenSource)]
    text = next(c for c in kinds if getattr(c, "suffix", None) == ".txt")
    source = text(path=folder / "evaluation.txt", tokenizer=folder / "checkpoint", length=32)
    batch = next(iter(source.batches(1)))
    opened = tokenizer.open_tokenizer(folder / "checkpoint")
    entry = report(0, place=9)
    (sample,) = shown_samples(entry, replace(data(source), target="labels"))
    assert sample.text == opened.decode(batch["input_ids"][0][:10].tolist())
    assert sample.answers[0] == f"“{opened.decode([1])}”"


def test_lines_of_text_are_shown_as_they_are(tmp_path: Path):
    pytest.importorskip("tokenizers")
    (tmp_path / "lines.txt").write_text("What light\nthrough yonder window\n")
    source = catalog.load("source", "text")(
        path=tmp_path / "lines.txt",
        tokenizer=ROOT / "samples" / "tiny-llama" / "checkpoint",
        samples_per="line",
        length=64,
        fields={"mask": "attention_mask", "ids": "input_ids"},
    )
    (sample,) = shown_samples(report(1), replace(data(source), batch=1))
    assert sample.text == "through yonder window"
    assert sample.answers == ("1", "2")  # classes, not tokens
