"""Hugging Face directories of networks that lost channels: true, or not written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import compressor
from compressor.errors import SpecError
from compressor.exporters import SafetensorsExporter
from compressor.exporters.safetensors.transformers_runner import TransformersRunner
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.saved_module import Alterations
from compressor.models.torch.smaller_module import random_batch, run_module
from compressor.models.transformers.carrier import open_pretrained
from compressor.models.transformers.classes import auto_class_for
from compressor.passes.prune.structured.structured import PruneStructured
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.progress import quiet_libraries
from compressor.run.evaluate import RunSamples
from compressor.types.exporter import ExportContext
from compressor.types.passes import PassContext
from compressor.types.tensors import TensorSpec
from tests.compressor.exporters.tiny_directories import class_of, save_tiny

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

IDS = (TensorSpec("input_ids", ("batch", "sequence"), "int64"),)
CONTEXT = ExportContext("smaller", "0" * 64)
TOKENS = np.random.default_rng(0).integers(3, 40, (2, 9))
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "max_position_embeddings": 24,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
}
LAYOUT = SafetensorsExporter(layout="compressed-tensors")


def llama(**sizes: int) -> Any:
    with quiet_libraries():
        config = transformers.LlamaConfig(**{**SIZES, **sizes})
        config._attn_implementation = "eager"
        module = transformers.LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            torch.nn.init.uniform_(parameter, -0.3, 0.4, generator=generator)
    return module


def save(folder: Path, module: Any) -> Path:
    folder.mkdir()
    with quiet_libraries():
        module.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    return folder


def worst(found: Any, wanted: Any) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def logits(module: Any) -> Any:
    with torch.inference_mode():
        return module(input_ids=torch.from_numpy(TOKENS), use_cache=False).logits.numpy()


def test_transformers_loads_a_smaller_network_as_it_is(tmp_path: Path) -> None:
    whole = llama()
    small = llama(intermediate_size=40, num_attention_heads=2, num_key_value_heads=1)
    small.config = whole.config  # a pruned module keeps it
    folder = save(tmp_path / "whole", whole)
    altered = Alterations(attributes={})
    carrier = TorchCarrier(small, IDS, folder=folder, altered=altered)
    LAYOUT.check(carrier)
    out = tmp_path / "out"
    out.mkdir()
    paths = LAYOUT.write(carrier, out, CONTEXT)
    assert sum(path.stat().st_size for path in paths) == LAYOUT.predict(carrier)
    LAYOUT.check_written(carrier, paths[0])
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    before = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert {k for k in before if config[k] != before[k]} == {
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    }
    assert (out / "tokenizer_config.json").is_file()
    assert not (out / "model.json").exists()
    found = TransformersRunner(out).run({"input_ids": TOKENS})["output"]
    assert worst(found, logits(small)) < 1e-6


def test_what_no_configuration_describes_is_refused_beforehand(tmp_path: Path) -> None:
    small = llama()
    folder = save(tmp_path / "whole", small)
    mlp = small.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = (torch.nn.Linear(32, 44, bias=False) for _ in range(2))
    mlp.down_proj = torch.nn.Linear(44, 32, bias=False)
    carrier = TorchCarrier(small, IDS, folder=folder, altered=Alterations(attributes={}))
    out = tmp_path / "out"
    out.mkdir()
    for step in (LAYOUT.check, LAYOUT.predict, lambda c: LAYOUT.write(c, out, CONTEXT)):
        with pytest.raises(SpecError, match=r"config\.json of .* export layout: graph"):
            step(carrier)
    assert list(out.iterdir()) == []


@pytest.mark.slow
def test_from_pruning_to_both_layouts(tmp_path: Path) -> None:
    folder = save(tmp_path / "whole", llama())
    carrier = open_pretrained("AutoModelForCausalLM", folder, {}, ())
    step = PruneStructured.model_validate({"target": {"ratio": 0.5}, "criterion": "l1"})
    context = PassContext(targets=LAYOUT.targets)
    samples = RunSamples(carrier.inputs, None, 0)
    small = step.apply(carrier, replace(context, samples=samples), {}).carrier
    wanted = small.runner().run({"input_ids": TOKENS})["output"]

    graph = tmp_path / "graph"
    graph.mkdir()
    exporter = SafetensorsExporter()
    exporter.check(small)
    exporter.write(small, graph, CONTEXT)
    assert sorted(path.name for path in graph.iterdir()) == ["model.json", "model.safetensors"]
    with torch.inference_mode():
        loaded = compressor.load(graph)(input_ids=torch.from_numpy(TOKENS))["output"].numpy()
    assert worst(loaded, wanted) < 1e-5

    out = tmp_path / "out"
    out.mkdir()
    preview = step.preview(carrier, context, {})
    LAYOUT.check(preview)
    assert LAYOUT.predict(preview) == LAYOUT.predict(small)
    LAYOUT.write(small, out, CONTEXT)
    found = TransformersRunner(out).run({"input_ids": TOKENS})["output"]
    assert worst(found, wanted) < 1e-5
    coded = QuantizeWeights(preset="int8").apply(small, context, {}).carrier
    codes = tmp_path / "codes"
    codes.mkdir()
    LAYOUT.check(coded)
    LAYOUT.write(coded, codes, CONTEXT)
    config = json.loads((codes / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" in config
    assert config["intermediate_size"] == 32
    found = TransformersRunner(codes).run({"input_ids": TOKENS})["output"]
    assert 1e-5 < worst(found, wanted) < 0.1
    saved = tmp_path / "saved"
    saved.mkdir()
    small.save(saved)
    restored = carrier.restore(saved)
    assert isinstance(restored, TorchCarrier)
    assert isinstance(small, TorchCarrier)
    assert restored.config == small.config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("wav2vec2", "input_values", ("batch", 400)),
        ("hubert", "input_values", ("batch", 400)),
        # The only head of its first stage becomes narrower: queries take up what it scales by.
        ("segformer", "pixel_values", ("batch", 3, 32, 32)),
    ],
)
def test_a_half_network_is_of_its_class(
    kind: str, name: str, shape: tuple[str | int, ...], tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "whole", kind)
    spec = TensorSpec(name, shape, "float32")
    auto = auto_class_for(class_of(kind).__name__)
    whole = open_pretrained(auto, folder, {}, (spec,))
    step = PruneStructured.model_validate({"target": {"ratio": 0.5}})
    small = step.apply(whole, PassContext(targets=LAYOUT.targets), {}).carrier
    assert isinstance(small, TorchCarrier)
    assert type(small.module) is class_of(kind)
    preview = step.preview(whole, PassContext(targets=LAYOUT.targets), {})
    LAYOUT.check(preview)
    assert LAYOUT.predict(preview) == LAYOUT.predict(small)
    out = tmp_path / "out"
    out.mkdir()
    paths = LAYOUT.write(small, out, CONTEXT)
    LAYOUT.check_written(small, paths[0])
    batch = random_batch((spec,))
    with quiet_libraries():
        read = class_of(kind).from_pretrained(out).eval()
    assert worst(run_module(read, (spec,), batch)[0], small.module_outputs(batch)[0]) < 1e-5
