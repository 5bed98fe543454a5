"""Sources of arrays in files: what they read, and what they say of files they cannot."""

from __future__ import annotations

import io
import pickle
import tracemalloc
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from compressor import catalog
from compressor.calibration.sources.file_source import FileSource
from compressor.errors import DataError, ExitCode, SpecError
from compressor.types.tensors import Array, Batch, TensorSpec

IMAGES = np.arange(10 * 3 * 4, dtype=np.float32).reshape(10, 3, 4)
LABELS = np.arange(10, dtype=np.int64) * 7
FIELDS = {"image": "images", "label": "labels"}
KINDS = ["npz", "npz-compressed", "npy", "safetensors"]
kinds = pytest.mark.parametrize("kind", KINDS)


def write(folder: Path, kind: str, **arrays: Array) -> Path:
    path = folder / f"data.{kind}"
    if kind == "npz":
        np.savez(path, **arrays)
    elif kind == "npz-compressed":
        path = folder / "data.npz"
        np.savez_compressed(path, **arrays)
    elif kind == "safetensors":
        save_file({name: array.copy(order="C") for name, array in arrays.items()}, path)
    else:
        path = folder / "arrays"
        path.mkdir()
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)
    return path


def source(path: Path, kind: str, **options: object) -> FileSource:
    return catalog.load("source", kind.removesuffix("-compressed"))(path=path, **options)


def joined(batches: list[Batch], name: str) -> Array:
    return np.concatenate([batch[name] for batch in batches])


@kinds
def test_reads_what_was_written(tmp_path, kind):
    path = write(tmp_path, kind, images=IMAGES, labels=LABELS, other=np.zeros(3))
    data = source(path, kind, fields=FIELDS)
    info = data.info()
    assert info.samples == 10
    assert info.fields == (
        TensorSpec("image", ("batch", 3, 4), "float32"),
        TensorSpec("label", ("batch",), "int64"),
    )
    for _ in range(2):
        batches = list(data.batches(4))
        assert [len(batch["label"]) for batch in batches] == [4, 4, 2]
        assert [list(batch) for batch in batches] == [["image", "label"]] * 3
        assert np.array_equal(joined(batches, "image"), IMAGES)
        assert np.array_equal(joined(batches, "label"), LABELS)
        batches[0]["image"][0] = 0  # batches are the caller's


@kinds
def test_samples_and_limit_take_the_first(tmp_path, kind):
    path = write(tmp_path, kind, images=IMAGES, labels=LABELS)
    data = source(path, kind, fields=FIELDS, samples=7)
    assert data.info().samples == 7
    assert np.array_equal(joined(list(data.batches(3)), "label"), LABELS[:7])
    assert np.array_equal(joined(list(data.batches(3, limit=5)), "label"), LABELS[:5])
    assert list(data.batches(3, limit=0)) == []
    assert source(path, kind, samples=99).info().samples == 10
    with pytest.raises(ValueError, match="batches of 0"):
        next(data.batches(0))


@kinds
def test_without_fields_all_arrays_keep_their_names(tmp_path, kind):
    path = write(tmp_path, kind, images=IMAGES, labels=LABELS)
    assert {spec.name for spec in source(path, kind).info().fields} == {"images", "labels"}


@pytest.mark.parametrize("kind", ["npz", "npz-compressed", "npy"])
@pytest.mark.parametrize("dtype", [">f4", "<f2", ">i8", "?", "u1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_byte_orders_and_fortran_order(tmp_path, kind, dtype, order):
    array = np.asarray(IMAGES, dtype=dtype, order=order)
    data = source(write(tmp_path, kind, x=array), kind)
    read = joined(list(data.batches(3)), "x")
    assert np.array_equal(read, array)
    assert read.dtype == array.dtype.newbyteorder("=")
    assert read.dtype.isnative
    assert data.info().fields[0].dtype == read.dtype.name


def test_a_single_npy_file_answers_to_any_name(tmp_path):
    np.save(tmp_path / "calib.npy", IMAGES)
    data = source(tmp_path / "calib.npy", "npy", fields={"image": "whatever"})
    assert np.array_equal(joined(list(data.batches(10)), "image"), IMAGES)
    with pytest.raises(DataError, match=r"has no array 'images'.* it has 'calib'"):
        source(tmp_path / "calib.npy", "npy", fields=FIELDS).info()


@kinds
def test_a_missing_array_is_named_with_what_there_is(tmp_path, kind):
    path = write(tmp_path, kind, images=IMAGES, labels=LABELS)
    with pytest.raises(DataError) as caught:
        source(path, kind, fields={"image": "image"}).info()
    text = str(caught.value)
    assert "has no array 'image'" in text
    assert "did you mean 'images'?" in text
    assert "'images', 'labels'" in text
    assert caught.value.exit_code == ExitCode.BAD_INPUT


@kinds
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": IMAGES, "labels": LABELS[:9]}, "different lengths: 'images' 10, 'labels' 9"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "'images' is empty"),
        ({"images": IMAGES[:, :0], "labels": LABELS}, "'images' is empty"),
        ({"images": np.array(1.0), "labels": LABELS}, "'images' is a single number"),
        ({"images": IMAGES.astype(ml_dtypes.bfloat16), "labels": LABELS}, "'images' has dtype"),
    ],
)
def test_unusable_arrays(tmp_path, kind, arrays, message):
    data = source(write(tmp_path, kind, **arrays), kind, fields=FIELDS)
    with pytest.raises(DataError, match=message):
        data.info()
    with pytest.raises(DataError, match=message):
        next(data.batches(2))


class Bomb:
    """Unpickling this would fail the test."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_pickles_are_refused(tmp_path, kind):
    path = write(tmp_path, kind, images=np.array([Bomb()], object), labels=LABELS[:1])
    data = source(path, kind, fields=FIELDS)
    for use in (data.info, lambda: next(data.batches(1))):
        with pytest.raises(DataError, match="Python objects"):
            use()
    assert source(path, kind, fields={"label": "labels"}).info().samples == 1


@kinds
def test_other_content_is_refused(tmp_path, kind):
    path = tmp_path / "data"
    for content in (b"", b"not arrays at all", pickle.dumps([1, 2]), b"\x93NUMPY\x01\x00"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):
            source(path, kind).info()


@kinds
def test_truncated_files_are_refused(tmp_path, kind):
    big = np.random.default_rng(0).random((50, 40))
    path = write(tmp_path, kind, x=big)
    file = path / "x.npy" if path.is_dir() else path
    whole = file.read_bytes()
    for keep in (20, 70, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:keep])
        data = source(path, kind)
        with pytest.raises(DataError, match="cannot be read"):
            list(data.batches(7))


def test_damaged_compressed_data_are_an_error_of_the_file(tmp_path):
    path = write(tmp_path, "npz-compressed", x=np.random.default_rng(0).random((500, 40)))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)
    data = source(path, "npz")
    assert data.info().samples == 500
    with pytest.raises(DataError, match="cannot be read"):
        list(data.batches(7))


def test_a_header_that_lies_about_the_size_is_refused_before_any_allocation(tmp_path):
    stream = io.BytesIO()
    np.save(stream, IMAGES)
    lie = stream.getvalue().replace(b"(10, 3, 4), ", b"(1<<60, 3), ")
    honest_form = stream.getvalue().replace(b"(10, 3, 4), }", b"(10**9, 3), }")
    huge = stream.getvalue().replace(b"(10, 3, 4), } ", b"(99999999999,)} ")
    negative = stream.getvalue().replace(b"(10, 3, 4), }", b"(-10, -3,4),}")
    for content in (lie, honest_form, huge, negative):
        assert content != stream.getvalue()
        (tmp_path / "x.npy").write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):
            source(tmp_path / "x.npy", "npy").info()
        with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
            archive.writestr("x.npy", content)
        with pytest.raises(DataError, match="cannot be read"):
            source(tmp_path / "x.npz", "npz").info()


def test_an_archive_without_arrays(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(DataError, match="holds no arrays"):
        source(tmp_path / "x.npz", "npz").info()


@kinds
def test_digest_is_of_content_and_options_and_not_of_the_place(tmp_path, kind):
    first, second, third = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    for folder in (first, second, third):
        folder.mkdir()
    digests = [
        source(write(first, kind, x=IMAGES), kind).digest(),
        source(write(second, kind, x=IMAGES), kind).digest(),
        source(write(third, kind, x=IMAGES + 1), kind).digest(),
    ]
    assert digests[0] == digests[1] != digests[2]
    path = next(first.iterdir())
    assert source(path, kind, samples=3).digest() != digests[0]
    assert source(path, kind, fields={"y": "x"}).digest() != digests[0]


def test_digest_of_a_folder_is_of_the_files_used(tmp_path):
    path = write(tmp_path, "npy", images=IMAGES, labels=LABELS)
    before = source(path, "npy", fields={"image": "images"}).digest()
    np.save(path / "labels.npy", LABELS + 1)
    assert source(path, "npy", fields={"image": "images"}).digest() == before


@pytest.mark.parametrize("kind", ["npz-compressed", "npy", "safetensors"])
def test_memory_is_that_of_a_batch(tmp_path, kind):
    rows = np.zeros((400, 25_000), np.float32)  # 40 MB
    data = source(write(tmp_path, kind, x=rows), kind)
    tracemalloc.start()
    try:
        read = sum(len(batch["x"]) for batch in data.batches(4))  # 0.4 MB each
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read == 400
    assert peak < 4_000_000


def test_info_reads_no_data(tmp_path):
    path = write(tmp_path, "npz-compressed", x=np.zeros((400, 25_000), np.float32))
    tracemalloc.start()
    try:
        source(path, "npz").info()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 500_000


def test_a_file_that_goes_away_is_an_error_of_the_spec(tmp_path):
    path = write(tmp_path, "npz", x=IMAGES)
    data = source(path, "npz")
    path.unlink()
    for use in (data.info, data.digest, lambda: next(data.batches(1))):
        with pytest.raises(SpecError, match="does not exist"):
            use()


@pytest.mark.parametrize("kind", ["npz", "safetensors", "images"])
def test_a_path_of_the_wrong_kind(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "images":
        path.write_bytes(b"a file")
    else:
        path.mkdir()
    size = {"size": [8, 8]} if kind == "images" else {}
    with pytest.raises(DataError, match="cannot be read"):
        source(path, kind, **size).info()


def test_every_option_is_described():
    for kind in catalog.names("source"):
        cls = catalog.load("source", kind)
        for name, field in cls.model_fields.items():
            assert field.description, f"{kind}: {name}"
