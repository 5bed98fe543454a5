"""A starter spec for a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import save_file

from compressor.errors import ModelError
from compressor.lab.starter import write_starter
from compressor.run.model import open_model
from compressor.spec.load import load_spec
from tests.compressor.models.transformers_folders import save


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


def test_of_an_encoder_and_decoder(tmp_path: Path) -> None:
    """The encoder, with the inputs that it has, and what suits it."""
    save(tmp_path / "speech", "whisper")
    output = tmp_path / "spec.yaml"
    write_starter(tmp_path / "speech", output)
    np.savez(tmp_path / "evaluation.npz", input_features=np.zeros((2, 8, 40), np.float32))
    spec = load_spec(output)
    assert spec.model.factory == "transformers.AutoModelForSpeechSeq2Seq"
    assert spec.model.part == "model.encoder"
    opened = open_model(spec)
    assert spec.data["evaluation"].keys.inputs == {i.name: i.name for i in opened.carrier.inputs}
    assert [step.name for step in spec.passes] == ["fuse", "quantize-dynamic"]
    # What the encoder becomes is not compared with a file that holds the decoder too.
    assert opened.own_bytes("safetensors") is None


def test_inputs_that_nobody_knows_are_left_to_fill_in(tmp_path: Path) -> None:
    model = directory(tmp_path, model_type="unheard-of", architectures=["UnheardOfModel"])
    assert written(model, tmp_path)["model"] == {
        "factory": "transformers.AutoModel",
        "checkpoint": "my model",
    }
    assert "  # inputs: # FILL IN" in (tmp_path / "spec.yaml").read_text()
