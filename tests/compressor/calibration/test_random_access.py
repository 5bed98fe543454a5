"""Any sample at any time: from the files themselves, or from a copy of what is a stream."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from compressor import catalog
from compressor.calibration.sources import images as image_source
from compressor.calibration.sources.random_access import RandomAccess
from compressor.calibration.sources.user_functions import FactorySource, TransformedSource
from compressor.errors import DataError, InputError
from compressor.types.data import IndexedSource, Source
from compressor.types.tensors import Batch
from tests.paths import ROOT

SAMPLES = 11
PIXELS = np.random.default_rng(0).standard_normal((SAMPLES, 3, 4)).astype(np.float32)
LABELS = np.arange(SAMPLES, dtype=np.int64) * 7
MAPPED = ["npy", "npy-fortran", "npy-big-endian", "safetensors", "images"]
COPIED = ["npz", "npz-compressed", "factory", "text", "jsonl"]

Make = Callable[[str], Source]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return what makes a source of each kind; each has eleven samples."""
    root = tmp_path_factory.mktemp("sources")
    tokenizer = root / "tokenizer.json"
    letters = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz?")}
    Tokenizer(models.BPE(letters, [], unk_token="?")).save(str(tokenizer))
    text = "".join(chr(97 + i * i % 26) for i in range(SAMPLES * 4 + 1))
    (root / "a.txt").write_text(text)
    (root / "a.jsonl").write_text(f'{{"text": "{text}"}}\n')
    np.savez(root / "plain.npz", x=PIXELS, y=LABELS)
    np.savez_compressed(root / "compressed.npz", x=PIXELS, y=LABELS)
    save_file({"x": PIXELS, "y": LABELS}, root / "a.safetensors")
    for name, array in (
        ("npy", PIXELS),
        ("npy-fortran", np.asfortranarray(PIXELS)),
        ("npy-big-endian", PIXELS.astype(">f4")),
    ):
        (root / name).mkdir()
        np.save(root / name / "x.npy", array)
        np.save(root / name / "y.npy", LABELS)
    for index in range(SAMPLES):
        folder = root / "images" / f"class{index % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (5, 4), (index, 2 * index, 9)).save(folder / f"{index}.png")

    def source(kind: str, **options: object) -> Source:
        if kind == "factory":
            return FactorySource(batches, "pkg:batches", **options)  # type: ignore[arg-type]
        name, path, extra = {
            "npz": ("npz", root / "plain.npz", {}),
            "npz-compressed": ("npz", root / "compressed.npz", {}),
            "safetensors": ("safetensors", root / "a.safetensors", {}),
            "images": ("images", root / "images", {"size": (4, 4)}),
            "text": ("text", root / "a.txt", {"tokenizer": tokenizer, "length": 4}),
            "jsonl": ("jsonl", root / "a.jsonl", {"tokenizer": tokenizer, "length": 4}),
        }.get(kind, ("npy", root / kind, {}))
        made: Source = catalog.load("source", name)(path=path, **extra, **options)
        return made

    return source


def batches() -> Iterator[Batch]:
    for start in range(0, SAMPLES, 3):
        part = slice(start, start + 3)
        names = np.array([f"name {i}" for i in range(SAMPLES)])
        yield {"x": PIXELS[part], "y": LABELS[part], "name": names[part], "f": PIXELS[part] > 0}


def whole(source: Source) -> Batch:
    (batch,) = source.batches(100)
    return batch


def assert_same(found: Batch, wanted: Batch) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        assert np.array_equal(found[name], array), name


@pytest.mark.parametrize("kind", [*MAPPED, *COPIED])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(rows=st.lists(st.integers(0, SAMPLES - 1), max_size=20))
def test_rows_are_those_of_the_stream(make: Make, tmp_path: Path, kind: str, rows: list[int]):
    source = make(kind)
    access = RandomAccess(source, tmp_path)
    assert access.samples == SAMPLES
    assert not access.random
    wanted = {name: array[rows] for name, array in whole(source).items()}
    assert_same(access.batch(np.array(rows, np.int64), (0,)), wanted)


@pytest.mark.parametrize("kind", [*MAPPED, *COPIED])
def test_samples_limit_what_there_is(make: Make, tmp_path: Path, kind: str):
    source = make(kind, samples=5)  # type: ignore[call-arg]
    access = RandomAccess(source, tmp_path)
    assert access.samples == 5
    assert_same(
        access.batch(np.arange(5)[::-1], ()), {n: a[::-1] for n, a in whole(source).items()}
    )
    for wrong in (5, -1):
        with pytest.raises(IndexError, match="of 5 samples"):
            access.batch(np.array([0, wrong]), ())


@pytest.mark.parametrize("kind", [*MAPPED, *COPIED])
def test_batches_are_the_callers(make: Make, tmp_path: Path, kind: str):
    access = RandomAccess(make(kind), tmp_path)
    rows = np.array([3, 1])
    first = access.batch(rows, ())
    kept = {name: array.copy() for name, array in first.items()}
    for array in first.values():
        array[...] = array[::-1].copy()
    assert_same(access.batch(rows, ()), kept)


@pytest.mark.parametrize("kind", [*MAPPED, *COPIED])
def test_only_streams_are_copied(make: Make, tmp_path: Path, kind: str):
    assert isinstance(make(kind), IndexedSource) == (kind in MAPPED)
    RandomAccess(make(kind), tmp_path)
    assert len(list(tmp_path.glob("data-*"))) == (kind in COPIED)


@pytest.mark.parametrize("kind", [*MAPPED, *COPIED])
def test_other_processes_can_read_too(make: Make, tmp_path: Path, kind: str):
    access = RandomAccess(TransformedSource(make(kind), reversed_names, "m:reversed"), tmp_path)
    rows = np.array([3, 1])
    wanted = access.batch(rows, ())
    content = pickle.dumps(access)
    assert len(content) < 5000, "files are opened again, not sent"
    assert_same(pickle.loads(content).batch(rows, ()), wanted)


def test_images_are_decoded_as_they_are_asked_for(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    decoded: list[str] = []
    decode = image_source._decode
    monkeypatch.setattr(
        image_source,
        "_decode",
        lambda path, size: [decoded.append(path.stem), decode(path, size)][1],
    )
    access = RandomAccess(make("images"), tmp_path)
    assert decoded == []
    access.batch(np.array([4, 0]), ())
    assert decoded == ["1", "0"]  # class0 has 0, 3, 6 and 9


def reversed_names(batch: Batch) -> Batch:
    return {name[::-1]: array for name, array in batch.items()}


def jitter(batch: Batch, rng: np.random.Generator) -> Batch:
    return {"x": batch["x"] + rng.standard_normal(batch["x"].shape)}


def double(batch: Batch) -> Batch:
    return {**batch, "x": batch["x"] * 2}


def halve(batch: Batch) -> Batch:
    return {name: array[::2] for name, array in batch.items()}


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_the_transform_sees_the_rows_that_were_taken(make: Make, tmp_path: Path, kind: str):
    rows = np.array([7, 2, 2])
    plain = RandomAccess(TransformedSource(make(kind), double, "m:double"), tmp_path)
    assert not plain.random
    assert np.array_equal(plain.batch(rows, (1,))["x"], PIXELS[rows] * 2)
    drawn = RandomAccess(TransformedSource(make(kind), jitter, "m:jitter", seed=4), tmp_path)
    assert drawn.random
    noise = np.random.default_rng((3, 5, 1)).standard_normal((3, 3, 4))
    for _ in range(2):  # there is no state
        assert np.array_equal(drawn.batch(rows, [3, 5, 1])["x"], PIXELS[rows] + noise)
    assert not np.array_equal(drawn.batch(rows, (3, 5, 2))["x"], PIXELS[rows] + noise)
    assert len(list(tmp_path.glob("data-*"))) == (kind == "npz")  # one copy for all transforms


def test_a_transform_must_keep_the_number_of_samples(make: Make, tmp_path: Path):
    access = RandomAccess(TransformedSource(make("npy"), halve, "m:halve"), tmp_path)
    with pytest.raises(DataError, match="transform 'm:halve': returned 2 samples for 4"):
        access.batch(np.arange(4), ())


def test_a_copy_is_made_once_and_told_of(make: Make, tmp_path: Path):
    told: list[int] = []

    def tell(done: int, text: str = "") -> None:
        told.append(done)

    RandomAccess(make("npz"), tmp_path, tell)
    RandomAccess(make("npz"), tmp_path, tell)
    assert told == [SAMPLES]
    RandomAccess(make("npz", samples=5), tmp_path)  # type: ignore[call-arg]
    assert len(list(tmp_path.glob("data-*"))) == 2


@pytest.mark.parametrize("name", ["0.bin", "names.json", "seal.json"])
def test_a_damaged_copy_is_made_again(make: Make, tmp_path: Path, name: str):
    RandomAccess(make("npz"), tmp_path)
    (copy,) = tmp_path.glob("data-*")
    whole = {file.name: file.read_bytes() for file in copy.iterdir()}
    flipped = bytearray(whole[name])
    flipped[len(flipped) // 2] ^= 1
    for content in (flipped, whole[name][:-5]):
        (copy / name).write_bytes(content)
        notes: list[str] = []
        RandomAccess(make("npz"), tmp_path, note=notes.append)
        (note,) = notes
        assert note.startswith("the copy of the training data is damaged (")
        assert {file.name: file.read_bytes() for file in copy.iterdir()} == whole


def test_memory_stays_flat_while_a_copy_is_made_and_read(tmp_path: Path):
    path = tmp_path / "big.npz"
    np.savez_compressed(path, x=np.zeros((2000, 32 * 1024), np.uint8))  # 64 MB
    source = catalog.load("source", "npz")(path=path)
    tracemalloc.start()
    try:
        access = RandomAccess(source, tmp_path)
        for start in range(0, 2000, 20):
            access.batch(np.arange(start, start + 20), ())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert access.samples == 2000
    assert peak < 40e6  # one batch of 16 MiB, and the part that is on its way


def test_what_cannot_be_copied_is_refused(tmp_path: Path):
    eighth = np.zeros(2, ml_dtypes.float8_e4m3fn)
    source = FactorySource(lambda: [{"odd": eighth}], "pkg:f")
    with pytest.raises(DataError, match=r"array 'odd': has dtype float8_e4m3fn.*without pickle"):
        RandomAccess(source, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_is_copied(tmp_path: Path):
    half = np.arange(4).astype(ml_dtypes.bfloat16)
    access = RandomAccess(FactorySource(lambda: [{"x": half}], "pkg:f"), tmp_path)
    taken = access.batch(np.array([3, 1]), ())["x"]
    assert (taken.dtype, taken.tolist()) == (half.dtype, [3, 1])


def test_objects_are_refused_before_they_are_hashed():
    source = FactorySource(lambda: [{"odd": np.array([{"a": 1}, None])}], "pkg:f")
    for use in (source.info, source.digest):
        with pytest.raises(DataError, match=r"'pkg:f': yielded 'odd' with Python objects"):
            use()


def failing() -> Iterator[Batch]:
    yield {"x": np.zeros((3, 2))}
    raise RuntimeError("the network is gone")


def test_a_source_that_fails_half_way_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = FactorySource(failing, "pkg:failing")
    monkeypatch.setattr(FactorySource, "digest", lambda _: "0" * 64)
    with pytest.raises(DataError, match="the network is gone"):
        RandomAccess(source, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("compressor.calibration.sources.random_access.seal", full)
    with pytest.raises(InputError, match="is full"):
        RandomAccess(make("npz"), tmp_path)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
import numpy as np
from pathlib import Path
from compressor.calibration.sources.user_functions import FactorySource
from compressor.calibration.sources.random_access import RandomAccess

def make():
    for start in range(0, 6000, 1000):
        if start == 5000 and FactorySource.digest is told:
            os.kill(os.getpid(), signal.SIGKILL)
        yield {"x": np.arange(start, start + 1000)}

told = lambda self: "0" * 64
FactorySource.digest = told
RandomAccess(FactorySource(make, "f"), Path(sys.argv[1]))
"""


def test_a_copy_that_was_killed_half_way_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root = str(ROOT)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": root},
        check=False,
        timeout=60,
    )
    assert killed.returncode == -signal.SIGKILL
    (staged,) = tmp_path.glob(".staging-*")
    assert (staged / "0.bin").stat().st_size > 0
    monkeypatch.setattr(FactorySource, "digest", lambda _: "0" * 64)
    parts = [{"x": np.arange(start, start + 1000)} for start in range(0, 6000, 1000)]
    access = RandomAccess(FactorySource(lambda: parts, "f"), tmp_path)
    assert access.samples == 6000
    assert access.batch(np.array([5999, 4000]), ())["x"].tolist() == [5999, 4000]
