"""The canonical form of a weight: rows are output channels, columns all that is summed over."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.types.layers import Layer
from compressor.types.tensors import TensorSpec

sizes = st.integers(1, 4)


def conv(shape: tuple[int, ...], **changes: Any) -> Layer:
    return Layer("layer", "Conv", "layer.weight", shape, **changes)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    kind = draw(st.sampled_from(["Conv", "ConvTranspose", "Gemm", "MatMul", "Gather"]))
    if kind in ("Conv", "ConvTranspose"):
        groups, kernel = draw(sizes), draw(st.lists(sizes, min_size=1, max_size=3))
        first, second = draw(sizes) * groups, draw(sizes)
        return Layer("a", kind, "a.weight", (first, second, *kernel), groups=groups)
    transposed = kind == "MatMul" or (kind == "Gemm" and draw(st.booleans()))
    return Layer("a", kind, "a.weight", (draw(sizes), draw(sizes)), transposed=transposed)


@given(layers())
def test_stored_inverts_canonical(layer: Layer):
    weight = torch.arange(layer.parameters).reshape(layer.shape)
    matrix = layer.canonical(weight)
    assert matrix.shape == (layer.rows, layer.columns)
    assert layer.rows * layer.columns == layer.parameters
    back = layer.stored(matrix)
    assert torch.equal(back, weight)
    assert back.is_contiguous()
    assert torch.equal(layer.canonical(back), matrix)


@given(layers(), st.data())
def test_a_row_is_a_slice_along_the_output_axis(layer: Layer, data: st.DataObject):
    """Scaling one row changes what lies at one index of the output axis, and nothing else."""
    row = data.draw(st.integers(0, layer.rows - 1))
    matrix = torch.zeros(layer.rows, layer.columns)
    matrix[row] = 1
    stored = layer.stored(matrix)
    index = row % stored.shape[layer.output_axis] if layer.groups > 1 else row
    if layer.kind == "Conv":
        index = row
    others = [i for i in range(stored.shape[layer.output_axis]) if i != index]
    assert not stored.index_select(layer.output_axis, torch.tensor(others, dtype=torch.int64)).any()
    assert int(stored.sum()) == layer.columns


def test_rows_of_a_linear_layer_both_ways():
    weight = torch.arange(6.0).reshape(2, 3)
    plain = Layer("fc", "Gemm", "fc.weight", (2, 3))
    assert (plain.rows, plain.columns, plain.output_axis) == (2, 3, 0)
    assert torch.equal(plain.canonical(weight), weight)
    turned = Layer("fc", "MatMul", "fc.weight", (2, 3), transposed=True)
    assert (turned.rows, turned.columns, turned.output_axis) == (3, 2, 1)
    assert torch.equal(turned.canonical(weight), weight.T)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_canonical_rows_compute_the_layer(groups: int):
    """Row times patch is the output channel, for convolutions and their transposes."""
    torch.manual_seed(groups)
    forward = torch.nn.Conv2d(6, 12, 3, groups=groups, bias=False)
    layer = conv(tuple(forward.weight.shape), groups=groups)
    x = torch.randn(1, 6, 3, 3)
    per_group = x.reshape(groups, -1)
    rows = layer.canonical(forward.weight.detach()).reshape(groups, -1, layer.columns)
    wanted = torch.einsum("grc,gc->gr", rows, per_group).reshape(-1)
    assert torch.allclose(forward(x).reshape(-1), wanted, atol=1e-5)

    backward = torch.nn.ConvTranspose2d(6, 12, 2, groups=groups, bias=False)
    shape = tuple(backward.weight.shape)
    layer = Layer("up", "ConvTranspose", "up.weight", shape, groups=groups)
    assert (layer.rows, layer.columns) == (12, 6 // groups * 4)
    point = torch.randn(1, 6, 1, 1)
    matrix = layer.canonical(backward.weight.detach()).reshape(groups, 12 // groups, -1, 4)
    wanted = torch.einsum("grik,gi->grk", matrix, point.reshape(groups, -1)).reshape(12, 2, 2)
    assert torch.allclose(backward(point)[0], wanted, atol=1e-5)


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"layer.weight: shape \(2, 2\) is not \(2, 3\)"):
        conv((2, 3)).canonical(torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("shape", "dtype", "problem"),
    [
        ((5, 3), "float32", None),
        ((1, 3), "float32", None),
        ((5, 3), "float64", "dtype is float64, the model expects float32"),
        ((5, 4), "float32", "shape is [5, 4], the model expects x float32[n, 3]"),
        ((5,), "float32", "shape is [5], the model expects x float32[n, 3]"),
        ((5, 4), "uint8", "shape is [5, 4], the model expects x float32[n, 3]"),
    ],
)
def test_arrays_against_an_input(shape: tuple[int, ...], dtype: str, problem: str | None):
    assert TensorSpec("x", ("n", 3), "float32").mismatch(shape, dtype) == problem


def test_an_input_is_written_shortly():
    assert str(TensorSpec("x", ("n", None, 3), "int64")) == "x int64[n, ?, 3]"
