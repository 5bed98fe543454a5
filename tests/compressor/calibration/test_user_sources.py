"""Sources that call the user's code: factories and transforms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.calibration.sources.arrays import NpzSource
from compressor.calibration.sources.user_functions import FactorySource, TransformedSource, regroup
from compressor.errors import DataError, SpecError
from compressor.types.tensors import TensorSpec

SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=6)


def cut_into(sizes):
    values = np.arange(sum(sizes), dtype=np.int32)
    for part in np.split(values, np.cumsum(sizes)[:-1]):
        yield {"x": part, "y": np.stack((part, -part), 1)}


@settings(deadline=None)
@given(SIZES, st.integers(1, 9), st.none() | st.integers(0, 30))
def test_regrouping_keeps_the_samples_and_their_order(sizes, size, limit):
    batches = list(regroup(cut_into(sizes), size, limit))
    total = sum(sizes) if limit is None else min(limit, sum(sizes))
    assert [len(batch["x"]) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    assert all(0 < len(batch["x"]) <= size for batch in batches)
    values = [int(v) for batch in batches for v in batch["x"]]
    assert values == list(range(total))
    assert [int(v) for batch in batches for v in -batch["y"][:, 1]] == values


def test_regrouping_asks_for_no_more_than_it_needs():
    def endless():
        for index in range(3):
            yield {"x": np.full(4, index)}
        pytest.fail("asked for a batch beyond the limit")

    assert len(list(regroup(endless(), 5, 12))) == 3
    with pytest.raises(ValueError, match="batches of 0"):
        next(regroup(endless(), 0))


@settings(deadline=None)
@given(SIZES, SIZES)
def test_factory_digest_is_of_the_samples_not_their_batches(first, second):
    digests = [FactorySource(lambda s=s: cut_into(s), "f").digest() for s in (first, second)]
    assert (digests[0] == digests[1]) == (sum(first) == sum(second))


def test_factory_describes_renames_and_limits():
    source = FactorySource(lambda: cut_into([3, 3]), "f", {"image": "y"}, samples=5)
    assert source.info().samples is None
    assert source.info().fields == (TensorSpec("image", ("batch", 2), "int32"),)
    assert [len(batch["image"]) for batch in source.batches(2)] == [2, 2, 1]
    assert [len(batch["image"]) for batch in source.batches(2, limit=3)] == [2, 1]
    assert source.digest() != FactorySource(lambda: cut_into([3, 3]), "f", {"image": "y"}).digest()


def raises():
    yield {"x": np.zeros(2)}
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (raises, "data factory 'pkg:f': raised KeyError: 'no such thing'"),
        (lambda: 3, "raised TypeError"),
        (list, "yielded no samples"),
        (lambda: [{"x": np.zeros(0)}], "yielded no samples"),
        (lambda: [[1, 2]], "returned a list"),
        (lambda: [{}], "returned an empty dictionary"),
        (lambda: [{"x": [1, 2]}], "returned 'x' as a list"),
        (lambda: [{"x": np.zeros(2), "y": np.zeros(3)}], "first axes that differ: 'x' 2, 'y' 3"),
        (lambda: [{"x": np.float32(1) * np.ones(())}], "returned 'x' as a"),
        (lambda: [{"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))}], "yielded batches that differ"),
        (lambda: [{"x": np.zeros(2)}, {"z": np.zeros(2)}], "yielded batches that differ"),
    ],
)
def test_factories_that_fail(make, message):
    source = FactorySource(make, "pkg:f")
    with pytest.raises(DataError, match=message) as caught:
        [source.info(), *source.batches(4)]
    if "raised" in message:
        assert caught.value.__cause__ is not None


def test_a_factory_without_a_field():
    with pytest.raises(DataError, match=r"without 'images'.* it has 'x', 'y'"):
        FactorySource(lambda: cut_into([2]), "f", {"image": "images"}).info()


@pytest.fixture
def archive(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.arange(5.0))
    return NpzSource(path=tmp_path / "d.npz")


def double(batch):
    return {"x": batch["x"] * 2}


def jitter(batch, rng):
    return {"x": batch["x"] + rng.random(len(batch["x"]))}


def test_transform_is_applied_and_info_is_from_before(archive):
    source = TransformedSource(archive, double, "double")
    assert np.array_equal(np.concatenate([b["x"] for b in source.batches(2)]), np.arange(5.0) * 2)
    assert [len(b["x"]) for b in source.batches(2, limit=3)] == [2, 1]
    assert source.info() == archive.info()


def test_rng_is_seeded_by_seed_and_batch(archive):
    def values(seed: int) -> list[float]:
        batches = TransformedSource(archive, jitter, "jitter", seed).batches(2)
        return np.concatenate([batch["x"] for batch in batches]).tolist()

    assert values(1) == values(1) != values(2)
    steps = np.array(values(1)) - np.arange(5.0)
    assert len(set(steps.round(12))) == 5, "batches must not repeat each other's numbers"


def test_only_a_second_parameter_named_rng_gets_a_generator(archive):
    def other(batch, strength=3):
        return {"x": batch["x"] * strength}

    (batch,) = TransformedSource(archive, other, "other").batches(5)
    assert np.array_equal(batch["x"], np.arange(5.0) * 3)
    (same,) = TransformedSource(archive, dict, "dict").batches(5)
    assert np.array_equal(same["x"], np.arange(5.0))


def bad_transform(batch):
    return {"x": batch["x"], "y": batch["x"].tolist()}


def failing(batch):
    return batch["y"]


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (bad_transform, "transform 'pkg:t': returned 'y' as a list"),
        (failing, "inputs: has the arrays 'x', and transform 'pkg:t' asks for 'y'; name the array"),
        (lambda _: {}["x"], "transform 'pkg:t': raised KeyError: 'x'"),  # of its own
        (lambda batch: batch.clear(), "returned a NoneType"),
        (lambda batch: {1: batch["x"]}, "a dictionary with the key 1"),
    ],
)
def test_transforms_that_fail(archive, transform, message):
    with pytest.raises(DataError, match=message):
        list(TransformedSource(archive, transform, "pkg:t").batches(2))


def test_a_compressors_own_error_passes_through(archive):
    def refuse(batch):
        raise SpecError("a", "b", "c")

    with pytest.raises(SpecError):
        list(TransformedSource(archive, refuse, "t").batches(2))


def test_transform_digest_depends_on_source_name_seed_and_code(archive, tmp_path):
    def load(text: str):
        path = tmp_path / "code.py"
        path.write_text(text)
        scope = {}
        exec(compile(text, str(path), "exec"), scope)
        return scope["f"]

    first = load("def f(batch): return batch")
    before = TransformedSource(archive, first, "f").digest()
    assert TransformedSource(archive, first, "f").digest() == before
    assert TransformedSource(archive, first, "f", seed=1).digest() != before
    assert TransformedSource(archive, first, "g").digest() != before
    second = load("def f(batch): return dict(batch)")
    assert TransformedSource(archive, second, "f").digest() != before
