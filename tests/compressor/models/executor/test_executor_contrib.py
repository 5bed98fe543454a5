"""ONNX Runtime's own operators in the torch graph executor."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from tests.compressor.models.executor.parity import (
    CONTRIB,
    assert_node_same,
    assert_same,
    floats,
    make_model,
)


@pytest.mark.parametrize("name", ["Gelu", "FastGelu", "QuickGelu"])
def test_contrib_activations(name: str) -> None:
    assert_node_same(name, {"x": floats(3, 8)}, {}, domain=CONTRIB)


def test_contrib_bias_gelu() -> None:
    assert_node_same("BiasGelu", {"x": floats(3, 8), "b": floats(8)}, {}, domain=CONTRIB)


def test_rms_norm_of_runtime() -> None:
    assert_node_same(
        "SimplifiedLayerNormalization", {"x": floats(2, 3, 8), "s": floats(8)}, {"axis": -1}
    )


@pytest.mark.parametrize(
    ("bits", "columns", "zeros"),
    [
        (4, 96, None),
        (4, 96, "packed"),
        (4, 80, "packed"),
        (4, 80, "float"),
        (8, 64, None),
        (8, 64, "packed"),
    ],
)
def test_matmul_n_bits(bits: int, columns: int, zeros: str | None) -> None:
    rng = np.random.default_rng(0)
    rows, block = 6, 32
    blocks = -(-columns // block)
    weights = {
        "codes": rng.integers(0, 256, (rows, blocks, block * bits // 8), dtype=np.uint8),
        "scales": rng.random((rows, blocks), np.float32) * 0.1,
    }
    if zeros == "packed":
        packed = -(-blocks * bits // 8)
        weights["zeros"] = rng.integers(0, 256, (rows, packed), dtype=np.uint8)
    elif zeros == "float":
        weights["zeros"] = rng.random((rows, blocks), np.float32) * 9
    node = helper.make_node(
        "MatMulNBits",
        ["x", *weights],
        ["y"],
        domain=CONTRIB,
        K=columns,
        N=rows,
        bits=bits,
        block_size=block,
    )
    inputs = {"x": floats(2, 3, columns)}
    assert_same(make_model([node], inputs, weights), inputs, rtol=1e-3, atol=1e-4)
