"""Quantize a checkpoint simply and stream it, for tests of what is written."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from compressor.exporters.safetensors.compressed_tensors import stored_tensors
from compressor.exporters.safetensors.exporter import SafetensorsExporter
from compressor.models.checkpoint.carrier import CheckpointCarrier
from compressor.types.exporter import ExportContext
from compressor.types.layers import QuantizedTensor, Scheme, WeightCodes

CONTEXT = ExportContext("streamed", "spec")
SYMMETRIC = Scheme(
    4, granularity="group", group=32, scale_type="bfloat16", narrow=False, signed_scale=True
)
ASYMMETRIC = Scheme(
    4, symmetric=False, signed=False, granularity="group", group=32, scale_type="bfloat16"
)
CHANNEL = Scheme(8, scale_type="bfloat16", narrow=False)


class Rank:
    """One of several processes that wait for nobody."""

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size

    def wait(self) -> None:
        """Go on."""

    def gathered(self, value: Any) -> list[Any]:
        """Return the own value only."""
        return [value]


def rounded(matrix: torch.Tensor, scheme: Scheme) -> QuantizedTensor:
    """Quantize row by row, simply."""
    rows, columns = matrix.shape
    values = matrix.float().reshape(rows, scheme.groups(columns), -1)
    low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
    if scheme.symmetric:
        scale = torch.maximum(-low, high) / scheme.high
        zero = torch.zeros_like(scale)
    else:
        scale = (high - low) / (scheme.high - scheme.low)
        zero = torch.round(-low / scale.clamp(min=1e-9))
    scale = torch.where(scale > 0, scale, 1.0).to(torch.bfloat16).float()
    codes = torch.round(values / scale[:, :, None]) + zero[:, :, None]
    dtype = torch.int8 if scheme.signed else torch.uint8
    codes = codes.clamp(scheme.low, scheme.high).to(dtype).reshape(rows, columns)
    return QuantizedTensor(codes, scale, zero.to(dtype), scheme)


def quantized(
    carrier: CheckpointCarrier, scheme: Scheme = SYMMETRIC, *, by_rows: bool = True
) -> CheckpointCarrier:
    layers = [layer for layer in carrier.layers() if "layers" in layer.name]
    compute = partial(rounded, scheme=scheme)
    return carrier.with_codes(
        {layer.weight: WeightCodes(layer, scheme, compute, by_rows) for layer in layers}
    )


def written(carrier: CheckpointCarrier, target: Path, **options: Any) -> dict[str, bytes]:
    """Export, and return the files' bytes by name."""
    target.mkdir()
    exporter = SafetensorsExporter(**options)
    exporter.check(carrier)
    paths = exporter.write(carrier, target, CONTEXT)
    found = {path.name: path.read_bytes() for path in target.iterdir()}
    assert sorted(found) == sorted(path.name for path in paths)
    assert sum(map(len, found.values())) == exporter.predict(carrier)
    exporter.check_written(carrier, paths[0])
    return found


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()
    }


def expected_tensors(carrier: CheckpointCarrier) -> dict[str, torch.Tensor]:
    """What should be in the file, each tensor computed whole."""
    expected = {}
    for name, tensor in carrier.tensors().items():
        if tensor.codes is None:
            expected[name] = tensor.read().clone()
        else:
            expected.update(stored_tensors(tensor, tensor.codes.compute(tensor.read())))
    return expected


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def threads() -> set[str]:
    return {
        t.name for t in threading.enumerate() if t.name.startswith(("stream", "finish", "read"))
    }
