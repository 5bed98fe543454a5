"""Lines that are longer than a sample: how many there are, and when that is doubted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compressor.run.verdicts.data_doubts import lines_that_are_cut
from compressor.spec.keys import DataKeys
from tests.compressor.calibration.test_line_sources import letters, lines, write

__all__ = ["letters"]  # a fixture


def test_lines_that_are_longer_than_a_sample_are_counted(tmp_path: Path, letters: Path) -> None:
    path = write(tmp_path / "a.txt", "abcdefgh", "ab", "abcd", "abcde")
    assert lines(path, letters, length=6).cut(1000) == (2, 4)
    assert lines(path, letters, length=6, padding="length").cut(3) == (1, 3)
    assert lines(path, letters, length=6, samples=2).cut(3) == (1, 2)
    assert lines(path, letters, length=10).cut(1000) == (0, 4)


@pytest.mark.parametrize(
    ("length", "doubt"),
    [
        (12, []),
        (
            6,
            [
                "2 of the first 4 lines of data.evaluation are longer than 6 tokens and are cut: "
                "raise length, as far as the model has positions"
            ],
        ),
    ],
)
def test_lines_that_are_cut_are_doubted_where_they_judge(
    tmp_path: Path, letters: Path, length: int, doubt: list[str]
) -> None:
    source = lines(write(tmp_path / "a.txt", "abcdefgh", "ab", "abcd", "abcde"), letters)
    entry = SimpleNamespace(
        role="evaluation", options=source.model_copy(update={"length": length}), keys=DataKeys()
    )
    carrier: Any = SimpleNamespace(inputs=())
    spec: Any = SimpleNamespace(data={"evaluation": entry})
    assert lines_that_are_cut(spec, carrier) == doubt
    spec.data = {"calibration": entry}
    assert lines_that_are_cut(spec, carrier) == []
