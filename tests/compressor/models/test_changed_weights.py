"""Weights that are changed as they are read, or at once where the model is in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.checkpoint.rows import ChangedRows, all_rows, read_rows
from compressor.types.carrier import WeightChange
from compressor.types.layers import Layer
from tests.compressor.passes.prune.magnitude_models import matrices, weights
from tests.two_linears import on_onnx, on_torch

ROWS, COLUMNS = 37, 5


def numbered(matrix: torch.Tensor, row: int) -> torch.Tensor:
    """Add its own number to each row; wrong numbers or rows that do not belong would show."""
    return matrix + torch.arange(row, row + len(matrix))[:, None]


class Numbers:
    """A tensor by rows, without a file."""

    multiple = 1

    def __call__(self) -> torch.Tensor:
        return self.rows(0, ROWS)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop)[:, None].expand(-1, COLUMNS) * 100.0

    def span(self, start: int, stop: int) -> tuple[int, int]:
        return start, stop


@given(st.integers(1, 50), st.integers(0, ROWS), st.integers(0, ROWS))
def test_any_rows_are_those_of_the_whole(step: int, first: int, second: int):
    start, stop = sorted((first, second))

    def compute(matrix: torch.Tensor, row: int) -> torch.Tensor:
        assert row % step == 0
        assert len(matrix) % step == 0 or row + len(matrix) == ROWS
        return numbered(matrix, row)

    change = WeightChange(Layer("a", "MatMul", "a.weight", (ROWS, COLUMNS)), compute, step)
    tensor = ChangedRows(Numbers(), change, step, ROWS)  # type: ignore[arg-type]  # no file
    assert torch.equal(tensor.rows(start, stop), tensor()[start:stop])
    assert torch.equal(tensor()[:, 0], torch.arange(ROWS) * 101.0)
    span = tensor.span(start, stop)
    assert span[0] % step == 0  # type: ignore[index]  # the pair that Numbers gives
    assert tensor.multiple == step


@pytest.mark.parametrize("multiple", [1, 8, None])
def test_carriers_agree(tmp_path: Path, multiple: int | None):
    tensors = weights()
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    for carrier in (on_torch(tensors), on_onnx(tensors, tmp_path), checkpoint):
        changes = {x.weight: WeightChange(x, numbered, multiple) for x in carrier.layers()}
        before = matrices(carrier)
        after = carrier.with_changes(changes)
        for layer in carrier.layers():
            expected = numbered(before[layer.name], 0)
            assert torch.equal(matrices(after)[layer.name], expected)
            assert torch.equal(read_rows(after, layer, 3, 21), expected[3:21])
            assert torch.equal(torch.cat(list(all_rows(after, layer))), expected)
        same = matrices(carrier)
        assert all(torch.equal(same[name], own) for name, own in before.items())


def test_there_must_be_such_a_float_weight(tmp_path: Path):
    tensors = weights()
    save_file(tensors, tmp_path / "model.safetensors")
    change = WeightChange(Layer("x", "MatMul", "x.weight", (2, 2)), numbered)
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    for carrier in (on_torch(tensors), on_onnx(tensors, tmp_path), checkpoint):
        with pytest.raises(KeyError, match=r"x\.weight"):
            carrier.with_changes({"x.weight": change})
    with pytest.raises(KeyError, match=r"no layer has a float weight 'up\.bias'"):
        checkpoint.with_changes({"up.bias": change})
