"""Folds: roles that share a source and no sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from compressor.calibration.sources.arrays import NpySource
from compressor.calibration.sources.folds import Fold, IndexedFold, fold_of
from compressor.calibration.sources.images import ImageFolderSource
from compressor.calibration.sources.user_functions import FactorySource
from compressor.errors import DataError, SpecError
from compressor.spec.load import check_spec
from compressor.spec.source_text import Document


def stream(count: int) -> FactorySource:
    return FactorySource(lambda: iter([{"x": np.arange(count)}]), "test:stream")


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 9), st.none() | st.integers(1, 9))
def test_folds_part_a_stream_whatever_the_batch(count, of, size, most):
    seen = []
    for number in range(1, of + 1):
        batches = [b["x"] for b in fold_of(stream(count), f"{number}/{of}", most).batches(size)]
        expected = list(range(count))[number - 1 :: of][:most]
        assert [int(v) for b in batches for v in b] == expected
        assert all(0 < len(b) <= size for b in batches)
        seen += expected
    assert len(set(seen)) == len(seen)


@pytest.fixture
def rows(tmp_path: Path) -> NpySource:
    np.save(tmp_path / "x.npy", np.arange(11))
    return NpySource(path=tmp_path / "x.npy", fields={"x": "x"})


def test_a_fold_of_rows_is_read_by_number_and_counted(rows: NpySource):
    fold = fold_of(rows, "2/4", 2)
    assert isinstance(fold, IndexedFold)
    assert fold.info().samples == 2
    assert fold_of(rows, "2/4", None).info().samples == 3
    assert fold.take(np.array([1, 0]))["x"].tolist() == [5, 1]
    assert [b["x"].tolist() for b in fold_of(rows, "3/4", None).batches(2, 3)] == [[2, 6], [10]]


def test_each_fold_has_a_digest_of_its_own(rows: NpySource):
    folds = [("1/2", None), ("2/2", None), ("1/4", None), ("1/2", 3)]
    digests = {fold_of(rows, fold, most).digest() for fold, most in folds}
    assert len(digests) == len(folds)
    assert rows.digest() not in digests


def test_a_fold_without_samples_is_refused(rows: NpySource):
    with pytest.raises(DataError, match="fold 12/12: holds nothing of 11 samples"):
        fold_of(rows, "12/12", None).info()


def test_a_limited_fold_of_class_folders_has_all_classes(tmp_path: Path):
    for label, name in enumerate("abc"):
        (tmp_path / name).mkdir()
        for number in range(8):
            Image.new("RGB", (2, 2), (label, number, 0)).save(tmp_path / name / f"{number}.png")
    source = ImageFolderSource(path=tmp_path, size=(2, 2))
    ours, theirs = fold_of(source, "1/2", 6), fold_of(source, "2/2", None)
    assert next(ours.batches(9))["label"].tolist() == [0, 0, 1, 1, 2, 2]
    pixels = [
        {tuple(p) for b in fold.batches(4) for p in b["image"][:, 0, 0]} for fold in (ours, theirs)
    ]
    assert len(pixels[0]) == 6
    assert pixels[0].isdisjoint(pixels[1])


def test_a_fold_of_a_stream_cannot_be_read_by_number():
    assert type(fold_of(stream(4), "1/2", None)) is Fold


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fold": "3/2"}, "fold 3/2 does not exist: write 1/2 to 2/2"),
        ({"fold": "half"}, "fold"),
    ],
)
def test_what_is_no_fold_is_refused(tmp_path: Path, keys, message: str):
    data = {"calibration": {"factory": "a:b", **keys}}
    value = {"version": 1, "name": "t", "model": {"onnx": "m.onnx"}, "data": data}
    with pytest.raises(SpecError, match=message):
        check_spec(Document(tmp_path / "spec.yaml", value))
