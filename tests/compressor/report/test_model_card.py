"""The card of a directory says what opens it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from compressor.lab.quantizing import QuantizedFormat, QuantizeOptions, quantization_spec
from compressor.progress import quiet_libraries
from compressor.report.run import run_spec
from compressor.spec.load import check_spec
from compressor.spec.source_text import Document
from tests.compressor.cli.test_cli_quantize import llama


@pytest.mark.parametrize("skip", [(), ("*experts*",)])
@pytest.mark.parametrize("form", ["gptq", "awq", "compressed-tensors"])
def test_experts_that_transformers_does_not_read_are_for_gptqmodel(
    tmp_path: Path, form: QuantizedFormat, skip: tuple[str, ...]
):
    config = transformers.Qwen3MoeConfig(
        vocab_size=48, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, decoder_sparse_step=1,
    )  # fmt: skip
    torch.manual_seed(0)
    with quiet_libraries():
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "float")
    preset = "fp8" if form == "compressed-tensors" else "int4-g32"
    options = QuantizeOptions(preset=preset, format=form, skip=skip)
    run_spec(quantization_spec(tmp_path / "float", tmp_path / "small", options))
    card = (tmp_path / "small" / "README.md").read_text()
    lost = form != "compressed-tensors" and not skip
    assert ("experts in this layout at random values, without an error" in card) is lost
    assert ('model = GPTQModel.load("small")' in card) is lost
    assert ('AutoModelForCausalLM.from_pretrained("small")' in card) is not lost


def test_the_folder_of_a_spec_without_output_is_that_of_its_name(tmp_path: Path):
    value = {
        "version": 1,
        "name": "small",
        "model": {"checkpoint": str(llama(tmp_path / "float", layers=1, hidden=64))},
        "passes": [{"pass": "quantize-weights", "preset": "int8"}],
        "exports": [{"format": "safetensors"}],
    }
    run_spec(check_spec(Document(tmp_path / "spec.yaml", value)))
    card = (tmp_path / "out" / "small" / "README.md").read_text()
    assert 'from_pretrained("small")' in card
