"""What a teacher gave, on the disk: found again, never wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.errors import InputError
from compressor.passes.train.distill import teacher_outputs as teacher_cache
from compressor.passes.train.distill.teacher_outputs import Field, Page

FIELDS = (Field("logits", (3,)), Field("layer", (2, 2)))


def values(rows: np.ndarray) -> dict[str, np.ndarray]:
    logits = np.stack([rows, rows + 0.5, -rows], axis=1).astype(np.float32)
    return {"logits": logits, "layer": np.repeat(logits[:, :1, None], 4, 1).reshape(-1, 2, 2)}


def page(folder: Path, samples: int = 10, **key: Any) -> Page:
    return Page(folder, {"teacher": "one", **key}, FIELDS, samples)


def test_rows_are_found_again(tmp_path: Path) -> None:
    rows = np.array([7, 2, 5])
    assert page(tmp_path).read(rows) is None
    page(tmp_path).write(rows, values(rows))
    again = page(tmp_path)
    found = again.read(np.array([5, 7]))
    assert found is not None
    for name, array in values(np.array([5, 7])).items():
        np.testing.assert_array_equal(found[name], array)
    assert again.read(np.array([5, 6])) is None


@pytest.mark.parametrize("key", [{"teacher": "two"}, {"seed": 1}])
def test_what_depends_on_something_else_is_not_found(tmp_path: Path, key: dict[str, Any]) -> None:
    rows = np.arange(3)
    page(tmp_path).write(rows, values(rows))
    assert page(tmp_path, **key).read(rows) is None
    assert page(tmp_path).read(rows) is not None


@pytest.mark.parametrize("file", ["0.bin", "1.bin", "checksums.bin"])
@pytest.mark.parametrize("harm", ["flip", "lose"])
def test_damaged_rows_are_not_used(tmp_path: Path, file: str, harm: str) -> None:
    rows = np.arange(10)
    page(tmp_path).write(rows, values(rows + 1))
    path = page(tmp_path).folder / file
    data = bytearray(path.read_bytes())
    width = len(data) // 10
    own = slice(4 * width, 5 * width)
    data[own] = bytes(width) if harm == "lose" else bytes(b ^ 1 for b in data[own])
    path.write_bytes(data)
    again = page(tmp_path)
    assert again.read(np.array([4])) is None
    assert again.read(np.array([3, 5])) is not None


def test_a_process_that_ends_while_it_writes_leaves_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, written = np.arange(4), 0
    whole = teacher_cache._write_all

    def cut(file: Any, data: bytes) -> None:
        nonlocal written
        written += 1
        if written > 6:  # the logits of all rows, and two rows of the layer
            raise KeyboardInterrupt
        whole(file, data)

    monkeypatch.setattr(teacher_cache, "_write_all", cut)
    with pytest.raises(KeyboardInterrupt):
        page(tmp_path).write(rows, values(rows + 1))
    for row in rows:
        assert page(tmp_path).read(np.array([row])) is None


def test_a_cut_file_is_begun_anew(tmp_path: Path) -> None:
    rows = np.arange(10)
    page(tmp_path).write(rows, values(rows))
    path = page(tmp_path).folder / "0.bin"
    path.write_bytes(path.read_bytes()[:-1])
    again = page(tmp_path)
    assert again.read(rows) is None
    again.write(rows, values(rows))
    assert page(tmp_path).read(rows) is not None
    assert [p.name for p in tmp_path.iterdir()] == [again.folder.name]


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any, data: bytes) -> None:
        del file, data
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(teacher_cache, "_write_all", full)
    with pytest.raises(InputError, match="is full"):
        page(tmp_path).write(np.arange(2), values(np.arange(2)))
