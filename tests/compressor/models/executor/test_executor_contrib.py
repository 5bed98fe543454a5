"""ONNX Runtime's own operators in the torch graph executor."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from tests.compressor.models.executor.parity import (
    CONTRIB,
    Arrays,
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


def test_skip_layer_norm() -> None:
    inputs = {
        "x": floats(2, 3, 8),
        "skip": floats(2, 3, 8, seed=1),
        "gamma": floats(8, seed=2),
        "beta": floats(8, seed=3),
        "bias": floats(8, seed=4),
    }
    outputs = ["y", "", "", "sum"]
    node = helper.make_node("SkipLayerNormalization", list(inputs), outputs, domain=CONTRIB)
    assert_same(make_model([node], inputs, {}), inputs)


def test_skip_rms_norm() -> None:
    inputs = {"x": floats(2, 3, 8), "skip": floats(2, 3, 8, seed=1), "gamma": floats(8, seed=2)}
    outputs = ["y", "", "", "sum"]
    node = helper.make_node(
        "SkipSimplifiedLayerNormalization", list(inputs), outputs, domain=CONTRIB, epsilon=1e-5
    )
    assert_same(make_model([node], inputs, {}), inputs)


def test_rms_norm_of_runtime() -> None:
    assert_node_same(
        "SimplifiedLayerNormalization", {"x": floats(2, 3, 8), "s": floats(8)}, {"axis": -1}
    )


@pytest.mark.parametrize(("a", "b"), [((2, 3, 4), (2, 4, 5)), ((2, 4, 3), (2, 5, 4))])
def test_fused_matmul(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    across = int(a[-1] == 3)
    attributes = {"alpha": 0.5, "transA": across, "transB": across}
    inputs = {"a": floats(*a), "b": floats(*b, seed=1)}
    assert_node_same("FusedMatMul", inputs, attributes, domain=CONTRIB)


@pytest.mark.parametrize("extras", [
    {},
    {"bias": floats(24, seed=3)},
    {"mask": np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)},
    {"mask": np.array([2, 5], np.int32)},
    {"added": floats(1, 2, 4, 5, seed=4)},
])  # fmt: skip
def test_multi_head_attention(extras: Arrays) -> None:
    inputs = {
        "q": floats(2, 4, 8),
        "k": floats(2, 5, 8, seed=1),
        "v": floats(2, 5, 8, seed=2),
        **extras,
    }
    names = ["q", "k", "v", *(name if name in extras else "" for name in ("bias", "mask", "added"))]
    node = helper.make_node("MultiHeadAttention", names, ["y"], domain=CONTRIB, num_heads=2)
    assert_same(make_model([node], inputs, {}), inputs)


def test_multi_head_attention_with_a_past() -> None:
    inputs = {
        "q": floats(2, 3, 8),
        "k": floats(2, 3, 8, seed=1),
        "v": floats(2, 3, 8, seed=2),
        "pk": floats(2, 2, 4, 4, seed=3),
        "pv": floats(2, 2, 4, 4, seed=4),
    }
    names = ["q", "k", "v", "", "", "", "pk", "pv"]
    node = helper.make_node(
        "MultiHeadAttention",
        names,
        ["y", "present_k", "present_v"],
        domain=CONTRIB,
        num_heads=2,
        unidirectional=1,
    )
    assert_same(make_model([node], inputs, {}), inputs)


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
