"""Codes of 5 and 6 bits in formats that have no kernels for them: packed, in 8 bits, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compressor.errors import SpecError
from compressor.exporters import OnnxExporter
from compressor.exporters.archive.exporter import ArchiveExporter
from compressor.exporters.safetensors.exporter import SafetensorsExporter
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.torch.carrier import open_module
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.exporter import ExportContext, Exporter
from compressor.types.passes import PassContext
from compressor.types.tensors import TensorSpec
from tests.compressor.exporters.hugging_face import tiny

CONTEXT = ExportContext("net", "spec")
EXPORTERS: dict[str, Exporter] = {
    "onnx": OnnxExporter(),
    "graph": SafetensorsExporter(layout="graph"),
    "archive": ArchiveExporter(),
}
WEIGHTS = 128 * 256 + 256 * 64


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [5, 6])
@pytest.mark.parametrize("name", EXPORTERS)
def test_what_is_written_computes_what_the_codes_mean(
    name: str, bits: int, symmetric: bool, tmp_path: Path
):
    exporter: Any = EXPORTERS[name]
    spec = TensorSpec("x", ("batch", 128), "float32")
    model = open_module(network, {}, [spec], "model.factory")
    step = QuantizeWeights.model_validate({"bits": bits, "group": 32, "symmetric": symmetric})
    carrier = step.apply(model, PassContext(targets=exporter.targets), {}).carrier
    exporter.check(carrier)
    paths = exporter.write(carrier, tmp_path, CONTEXT)
    size = sum(path.stat().st_size for path in paths)
    assert size <= exporter.predict(carrier)
    assert (size < WEIGHTS) == (name != "onnx")
    feed = {"x": np.random.default_rng(0).standard_normal((16, 128)).astype(np.float32)}
    (wanted,) = carrier.runner().run(feed).values()
    (found,) = exporter.open(paths[0]).run(feed).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq"])
def test_directories_for_servers_refuse_them(layout: Any, tmp_path: Path):
    tiny("Llama", torch.float16).save_pretrained(tmp_path)
    exporter = SafetensorsExporter(layout=layout)
    context = PassContext(targets=exporter.targets)
    carrier = QuantizeWeights(bits=5, group=32).apply(open_checkpoint(tmp_path), context, {})
    with pytest.raises(SpecError, match=r"its scheme is int5/group 32.*cannot store"):
        exporter.check(carrier.carrier)
