"""Sources of whole feeds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.calibration.sources.feeds import FeedFactory, FeedFolder
from compressor.calibration.sources.user_functions import TransformedSource
from compressor.errors import DataError
from compressor.types.tensors import Feed, cut, picked, samples_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in (2, 0, 1):
        boxes = np.full((i, 4), i, ">f4")  # of the first there are none
        np.savez(tmp_path / f"{i}.npz", boxes=boxes, size=np.int64(10 * i), spare=np.zeros(3))
    return tmp_path


FIELDS = {"roi": "boxes", "size": "size"}


def test_files_are_feeds_in_the_order_of_their_names(folder: Path):
    source = FeedFolder(folder, FIELDS)
    feeds = list(source.batches(32))
    assert [feed["roi"].shape for feed in feeds] == [(0, 4), (1, 4), (2, 4)]
    assert [(int(feed["size"]), feed["size"].ndim) for feed in feeds] == [(0, 0), (10, 0), (20, 0)]
    assert all(feed.keys() == FIELDS.keys() and isinstance(feed, Feed) for feed in feeds)
    assert feeds[2]["roi"].dtype == np.dtype(np.float32)
    assert source.info().samples == 3
    assert [str(field) for field in source.info().fields] == ["roi float32[?, ?]", "size int64[]"]
    assert len(list(source.batches(1, limit=2))) == 2
    (single,) = FeedFolder(folder / "1.npz").batches(1)
    assert single.keys() == {"boxes", "size", "spare"}


def test_the_digest_is_of_content_and_names(folder: Path, tmp_path: Path):
    whole = FeedFolder(folder, FIELDS).digest()
    assert FeedFolder(folder, FIELDS).digest() == whole
    assert FeedFolder(folder, {"roi": "boxes"}).digest() != whole
    np.savez(folder / "1.npz", boxes=np.ones((1, 4), np.float32), size=np.int64(11))
    assert FeedFolder(folder, FIELDS).digest() != whole


def test_only_the_first_feeds_are_read_where_they_are_bounded(folder: Path):
    (folder / "2.npz").write_bytes(b"damaged")  # which nobody sees
    source = FeedFolder(folder, FIELDS, most=2)
    assert source.info().samples == 2
    assert [int(feed["size"]) for feed in source.batches(1)] == [0, 10]
    assert len(list(source.batches(1, limit=1))) == 1
    assert source.digest() != FeedFolder(folder, FIELDS, most=1).digest()

    def make() -> Iterator[dict[str, Any]]:
        for i in range(2):
            yield {"n": np.int64(i)}
        raise RuntimeError("was asked for a third")

    made = FeedFactory(make, "m:make", most=2)
    assert [int(feed["n"]) for feed in made.batches(1)] == [0, 1]
    assert [int(feed["n"]) for feed in made.batches(1, limit=1)] == [0]
    assert made.digest() != FeedFactory(make, "m:make", most=1).digest()


@pytest.mark.parametrize("most", [None, 1])
def test_folds_share_no_feed(folder: Path, most: int | None):
    def make() -> Iterator[dict[str, Any]]:
        return ({"size": np.int64(10 * i)} for i in range(3))

    for fold, sizes in (((1, 2), [0, 20]), ((2, 2), [10])):
        files = FeedFolder(folder, FIELDS, most, fold=fold)
        made = FeedFactory(make, "m:make", most=most, fold=fold)
        for source in (files, made):
            assert [int(feed["size"]) for feed in source.batches(1)] == sizes[:most]
        assert files.info().samples == len(sizes[:most])
        assert files.digest() != FeedFolder(folder, FIELDS, most).digest() or most == fold[0] == 1
    with pytest.raises(DataError, match=r"fold 4/4: holds nothing of 3 feeds"):
        FeedFolder(folder, FIELDS, fold=(4, 4)).info()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"boxes": np.zeros((1, 4), np.float32)}, "1.npz': has no array 'size'; it has 'boxes'"),
        ({"boxes": np.zeros((1, 4)), "size": np.int64(1)}, "holds roi float64"),
        ({"boxes": np.zeros(4, np.float32), "size": np.int64(1)}, r"holds roi float32\[\?\], size"),
        ({"boxes": np.array(["a"]), "size": np.int64(1)}, "array 'boxes' has dtype <U1"),
        ({"boxes": np.array([{}]), "size": np.int64(1)}, "holds Python objects"),
    ],
)
def test_files_that_differ_are_refused_by_their_headers(
    folder: Path, arrays: dict[str, Any], message: str
):
    np.savez(folder / "1.npz", **arrays)
    with pytest.raises(DataError, match=message):
        FeedFolder(folder, FIELDS).info()


def test_a_damaged_file_is_named(folder: Path):
    path = folder / "2.npz"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"2\.npz': cannot be read"):
        FeedFolder(folder, FIELDS).info()


def test_a_factory_yields_dictionaries_of_arrays_and_numbers():
    def make() -> list[dict[str, Any]]:
        return [{"x": np.zeros((i, 2), np.float32), "n": i, "rate": np.float32(2)} for i in (3, 1)]

    source = FeedFactory(make, "m:make", {"x": "x", "length": "n", "rate": "rate"})
    feeds = list(source.batches(32))
    assert [(len(feed["x"]), int(feed["length"])) for feed in feeds] == [(3, 3), (1, 1)]
    assert all(feed["rate"].shape == () for feed in feeds)
    assert source.digest() == FeedFactory(make, "other", source.fields).digest()
    assert source.digest() != FeedFactory(make, "m:make", {"x": "x"}).digest()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([], "yielded no feeds"),
        ([np.zeros(3)], "returned a numpy.ndarray; return a dictionary of numpy arrays and numb"),
        ([{"x": [1, 2]}], "returned 'x' as a list"),
        ([{"y": np.zeros(3)}], "yielded a feed without 'x'; it has 'y'"),
    ],
)
def test_what_is_no_feed_is_refused(made: list[Any], message: str):
    with pytest.raises(DataError, match=message):
        FeedFactory(lambda: made, "m:make", {"x": "x"}).info()


def test_a_transform_receives_and_returns_one_feed(folder: Path):
    def transform(feed: dict[str, Any]) -> dict[str, Any]:
        return {**feed, "roi": feed["roi"] + 1, "count": len(feed["roi"])}

    feeds = list(TransformedSource(FeedFolder(folder, FIELDS), transform, "m:fn").batches(1))
    assert [int(feed["count"]) for feed in feeds] == [0, 1, 2]
    assert all(isinstance(feed, Feed) for feed in feeds)


def test_a_feed_is_one_sample_and_is_not_cut():
    feed = Feed(x=np.zeros((5, 2)), n=np.int64(3))
    assert samples_in(feed) == 1
    assert cut(feed, 0, 1) is feed
    assert isinstance(picked(feed, ["x"]), Feed)
    batch = {"x": np.zeros((5, 2)), "y": np.zeros(5)}
    assert samples_in(batch) == 5
    assert samples_in(cut(batch, 1, 3)) == 2


def test_an_array_that_is_far_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "feed.npz", x=np.zeros((1, 210_000_000), bool))
    with pytest.raises(DataError, match="would take 200 MiB of memory at once"):
        FeedFolder(tmp_path / "feed.npz").info()
