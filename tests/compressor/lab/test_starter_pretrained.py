"""A starter spec for a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import save_file

from compressor.errors import ModelError
from compressor.lab.starter import write_starter


def directory(folder: Path, **config: Any) -> Path:
    path = folder / "my model"
    path.mkdir()
    save_file({"w": torch.zeros(3, 4)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def written(model: Path, folder: Path) -> dict[str, Any]:
    output = folder / "spec.yaml"
    write_starter(model, output)
    text = output.read_text()
    assert "(1 tensors, 12 parameters)" in text
    assert max(map(len, text.splitlines())) <= 100
    spec: dict[str, Any] = YAML(typ="safe").load(text)
    return spec


@pytest.mark.parametrize(("longest", "length"), [(256, 256), (4096, 512), (None, 512)])
def test_of_a_language_model(tmp_path: Path, longest: int | None, length: int) -> None:
    model = directory(
        tmp_path,
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        max_position_embeddings=longest,
    )
    spec = written(model, tmp_path)
    assert spec["model"] == {
        "factory": "transformers.AutoModelForCausalLM",
        "checkpoint": "my model",
    }
    evaluation = spec["data"]["evaluation"]
    assert evaluation["tokenizer"] == "my model"
    assert (evaluation["length"], evaluation["target"]) == (length, "labels")
    assert spec["metric"] == "perplexity"
    assert spec["passes"] == [{"pass": "quantize-weights", "preset": "int4-g128", "method": "gptq"}]
    assert spec["name"] == "my-model"


def test_of_other_models(tmp_path: Path) -> None:
    model = directory(
        tmp_path,
        model_type="vit",
        architectures=["ViTForImageClassification"],
        image_size=224,
    )
    spec = written(model, tmp_path)
    assert spec["model"]["factory"] == "transformers.AutoModelForImageClassification"
    assert spec["data"]["calibration"]["inputs"] == {"pixel_values": "pixel_values"}
    assert [step["pass"] for step in spec["passes"]] == ["fuse", "quantize-static"]


def test_of_a_quantized_model(tmp_path: Path) -> None:
    model = directory(tmp_path, model_type="llama", quantization_config={"quant_method": "awq"})
    with pytest.raises(ModelError, match="quantized already"):
        write_starter(model, tmp_path / "spec.yaml")
    assert not (tmp_path / "spec.yaml").exists()
