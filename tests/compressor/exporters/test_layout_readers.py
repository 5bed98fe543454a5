"""transformers with GPTQModel reads the layouts of GPTQ and AWQ, and gives the meant outputs.

The environment variable COMPRESSOR_LANGUAGE_PEERS names a folder that
``tests/benchmarks/language_peers_environment.sh`` made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressor.exporters.safetensors.exporter import SafetensorsExporter
from compressor.exporters.safetensors.inputs_first import InputsFirst
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.passes.quantize.weights.layers import WeightRule
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.exporter import ExportContext
from compressor.types.passes import PassContext
from tests.compressor.exporters.hugging_face import tiny

PEERS = Path(__file__).parents[3] / "tests" / "benchmarks" / "language_peers.py"
CASES: dict[str, tuple[InputsFirst, dict[str, Any]]] = {
    "gptq-4": ("gptq", {"bits": 4, "group": 32}),
    "gptq-4-zeros": ("gptq", {"bits": 4, "group": 64, "symmetric": False}),
    "gptq-8-rows": ("gptq", {"bits": 8}),
    "gptq-2-zeros": ("gptq", {"bits": 2, "group": 32, "symmetric": False}),
    "awq-4": ("awq", {"bits": 4, "group": 32}),
    "awq-4-zeros": ("awq", {"bits": 4, "group": 64, "symmetric": False}),
}
KEPT = (WeightRule(match="*.o_proj", skip=True), WeightRule(match="*.1.mlp.down_proj", skip=True))
LEAST_DB = 60.0  # 66 to 123: its kernels round weights to 16 bits; with a wrong layer 0 to 20


@pytest.fixture(scope="module")
def python() -> Path:
    folder = os.environ.get("COMPRESSOR_LANGUAGE_PEERS")
    if folder is None:
        pytest.skip("COMPRESSOR_LANGUAGE_PEERS names no folder with GPTQModel")
    return Path(folder) / "gptqmodel" / "bin" / "python"


def written(
    source: Path, target: Path, kind: InputsFirst, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Write a directory; return the weights that its codes stand for."""
    exporter = SafetensorsExporter(layout=kind, consumer="transformers")
    context = PassContext(targets=exporter.targets)
    after = QuantizeWeights(**options).apply(open_checkpoint(source), context, {}).carrier
    exporter.check(after)
    target.mkdir()
    exporter.write(after, target, ExportContext("tiny", "spec"))
    shutil.copy(source / "generation_config.json", target)
    weights = {}
    for name, tensor in after.tensors().items():
        value = tensor.read()
        if tensor.codes is not None:
            layer = tensor.codes.layer
            value = layer.stored(tensor.codes.compute(layer.canonical(value)).dequantize())
        weights[name] = value
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Llama", "Qwen2"])  # without and with biases
def test_outputs_of_transformers_are_those_that_were_meant(
    python: Path, tmp_path: Path, architecture: str
):
    network = tiny(architecture, torch.float32).eval()
    network.save_pretrained(tmp_path / "source")
    tokens = torch.arange(2 * 48).reshape(2, 48)
    np.save(tmp_path / "tokens.npy", tokens.numpy())
    wanted = {}
    for title, (kind, options) in CASES.items():
        for name, rules in ((title, ()), (f"{title}-some-kept", KEPT)):
            given = {**options, "layers": rules}
            weights = written(tmp_path / "source", tmp_path / name, kind, given)
            network.load_state_dict(weights, strict=False)
            with torch.inference_mode():
                wanted[name] = network(input_ids=tokens).logits
    folders = [str(tmp_path / name) for name in wanted]
    command = [str(python), str(PEERS), "logits", str(tmp_path / "tokens.npy"), "found.npz"]
    subprocess.run([*command, *folders], cwd=tmp_path, check=True)
    found = np.load(tmp_path / "found.npz")
    for name, reference in wanted.items():
        error = torch.from_numpy(found[name]) - reference
        ratio = float(reference.square().sum() / error.square().sum().clamp(min=1e-30))
        assert 10 * np.log10(ratio) > LEAST_DB, name
