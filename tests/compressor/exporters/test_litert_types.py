"""LiteRT files of halves, and of values that are inputs and outputs at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compressor.exporters import LitertExporter
from compressor.passes.quantize.cast.cast import Cast
from tests.compressor.exporters.test_litert import TARGET, written
from tests.compressor.passes.quantize.small_models import graph, noise

BODY = """({0}[N, 8] x) => ({0}[N, 3] y) {{
    a = MatMul (x, w)
    b = LayerNormalization (a, scale, shift)
    c, d = Split <axis = 1, num_outputs = 2> (b)
    e = Clip (c, low, high)
    f = Mul (e, d)
    y = MatMul (f, head)
}}"""
WEIGHTS = {
    "w": noise(8, 6),
    "scale": noise(6, seed=1),
    "shift": noise(6, seed=2),
    "head": noise(3, 3, seed=3),
    "low": np.array(-0.5, np.float32),
    "high": np.array(0.7, np.float32),
}


@pytest.mark.parametrize("whole", [True, False])
def test_halves_are_computed_as_floats(whole: bool, tmp_path: Path) -> None:
    """LiteRT's kernels for CPUs have no halves for most of these operators."""
    floats = graph(f"g {BODY.format('float')}", WEIGHTS)
    x = noise(5, 8, seed=4)
    if whole:
        halves = {name: array.astype(np.float16) for name, array in WEIGHTS.items()}
        carrier, x = graph(f"g {BODY.format('float16')}", halves), x.astype(np.float16)
    else:
        carrier = Cast().apply(floats, TARGET, {}).carrier
    (found,) = LitertExporter().open(written(carrier, tmp_path)).run({"x": x}).values()
    (wanted,) = floats.runner().run({"x": x.astype(np.float32)}).values()
    assert found.dtype == x.dtype
    np.testing.assert_allclose(found, wanted, atol=2e-2 * np.abs(wanted).max())


def test_an_input_that_is_turned_there_and_back_is_an_output(tmp_path: Path) -> None:
    carrier = graph(
        """g (float[N, 4, 5] x) => (float[N, 5, 4] y, float[N, 4, 5] z) {
            y = Transpose <perm = [0, 2, 1]> (x)
            z = Transpose <perm = [0, 2, 1]> (y)
        }"""
    )
    x = noise(3, 4, 5)
    found = LitertExporter().open(written(carrier, tmp_path)).run({"x": x})
    np.testing.assert_array_equal(found["y"], x.swapaxes(1, 2))
    np.testing.assert_array_equal(found["z"], x)
