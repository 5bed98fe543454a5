"""Which inputs have their samples first, and how far outputs differ."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.types.tensors import TensorSpec, unstackable, worst_difference


def first_apart(*shapes: tuple[int | str | None, ...]) -> int | None:
    specs = [TensorSpec(str(i), shape, "float32") for i, shape in enumerate(shapes)]
    found = unstackable(specs)
    return None if found is None else specs.index(found)


@pytest.mark.parametrize(
    ("shapes", "apart"),
    [
        ([("batch", 4), ("batch", "time", 3)], None),
        ([("N", 4), ("M", 3)], None),  # exporters name one axis twice
        ([("N", "time"), ("N", "time", "time")], None),
        ([("N", "N")], None),
        ([("time", "batch", 8)], 0),
        ([("batch", 64), ("time", "batch", 8)], 1),
        ([("N", 64), ("time", "N", 8)], 1),
        ([("time", "N", 8), ("N", 64)], 0),
        ([("batch", "time"), ("time",)], 1),
        ([("batch", 4), (2, "batch", 8)], 1),
        ([("batch", 4), ()], 1),
        ([(1, 4), (1, None, 8)], None),
        ([(1, 4), (2, 8)], 1),
    ],
)
def test_an_input_without_an_axis_for_samples_is_found(
    shapes: list[tuple[int | str | None, ...]], apart: int | None
) -> None:
    assert first_apart(*shapes) == apart


def test_differences_of_outputs():
    x = {"y": np.array([1.0, -4.0], np.float32), "n": np.array([3])}
    assert worst_difference(x, x)[0] == 0
    other = {"z": np.array([1.5, -4.0], np.float32), "n": np.array([4])}
    assert worst_difference(x, other)[0] == pytest.approx(0.125)
    missing = {"y": np.array([np.nan, -4.0], np.float32), "n": np.array([3])}
    assert worst_difference(x, missing)[0] == np.inf
    assert worst_difference(missing, x)[0] == np.inf
    assert worst_difference(missing, missing)[0] == 0
    shorter = {"y": np.array([1.0], np.float32), "n": np.array([3])}
    assert worst_difference(x, shorter)[0] == np.inf
    half = {"y": np.array([1.0, 100.0], np.float16)}
    assert worst_difference(half, half)[1] == 2e-2
