"""Float8 weights are read as wider floats, with whatever scales lie beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compressor.errors import ModelError
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.checkpoint.reading import RowReader

ROWS, COLUMNS = 300, 200


def codes() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, COLUMNS, generator=generator).to(torch.float8_e4m3fn)


def spread(scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """One scale for each element."""
    rows, columns = torch.arange(ROWS) // block[0], torch.arange(COLUMNS) // block[1]
    return scale[rows[:, None], columns[None, :]]


def written(folder: Path, scale: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    save_file({"a.weight": codes(), "n": torch.ones(3), **scale}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


BLOCK = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 32]}}


@pytest.mark.parametrize(
    ("suffix", "shape", "block", "config"),
    [
        ("_scale_inv", (3, 2), (128, 128), {}),
        ("_scale_inv", (5, 7), (64, 32), BLOCK),
        ("_scale", (3, 2), (128, 128), {}),
        ("_scale", (ROWS, 1), (1, COLUMNS), {}),
        ("_scale", (ROWS,), (1, COLUMNS), {}),
        ("_scale", (1,), (ROWS, COLUMNS), {}),
        ("_scale", (), (ROWS, COLUMNS), {}),
        ("_scale", (1, 1), (ROWS, COLUMNS), {}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scales_are_multiplied_in(
    tmp_path: Path,
    suffix: str,
    shape: tuple[int, ...],
    block: tuple[int, int],
    config: dict[str, Any],
    dtype: str,
) -> None:
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    others = {f"a.weight{suffix}": scale, "a.input_scale": torch.ones(1)}
    carrier = open_checkpoint(written(tmp_path, others, {**config, "torch_dtype": dtype}))
    assert carrier.tensors().keys() == {"a.weight", "n"}
    (layer,) = carrier.layers()
    assert layer.dtype == dtype
    grid = (-(-ROWS // block[0]), -(-COLUMNS // block[1]))
    expected = codes().float() * spread(scale.reshape(grid), block)
    expected = expected.to(getattr(torch, dtype))
    assert torch.equal(carrier.weight(layer), expected)
    read = carrier.tensors()["a.weight"].read
    assert isinstance(read, RowReader)
    parts = [read.rows(start, min(start + 77, ROWS)) for start in range(0, ROWS, 77)]
    assert torch.equal(torch.cat(parts), expected)


def test_without_scales_the_codes_are_the_values(tmp_path: Path) -> None:
    carrier = open_checkpoint(written(tmp_path, {}, {}))
    assert torch.equal(carrier.weight(carrier.layers()[0]), codes().to(torch.bfloat16))


@pytest.mark.parametrize(
    "scale",
    [
        torch.ones(4, 3),
        torch.ones(COLUMNS),
        torch.ones(1, COLUMNS),
        torch.ones(3, 2, 1, 2),
        torch.ones(3, 2, dtype=torch.uint8),
    ],
)
def test_scales_of_an_unknown_form_are_refused(tmp_path: Path, scale: torch.Tensor) -> None:
    folder = written(tmp_path, {"a.weight_scale": scale}, {})
    with pytest.raises(ModelError, match=r"'a\.weight'.* has a scale of an unknown form"):
        open_checkpoint(folder)
