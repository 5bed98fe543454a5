"""A quantized directory is proved before the command is done, or the verdict says why not."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from compressor.cli.application import application
from compressor.exporters.safetensors import proof
from compressor.models.transformers.reading import Reading
from compressor.passes.quantize.weights import layers
from compressor.types.layers import StoredTensor
from tests.compressor.exporters.tiny_directories import save_tiny

for _package in ("transformers", "compressed_tensors"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("experts"), "qwen2_moe")


def quantize(source: Path, output: Path, *more: str) -> Result:
    arguments = ["quantize", str(source), "-o", str(output), "--preset", "int8", *more]
    return CliRunner().invoke(application, arguments)


def checks(output: Path) -> list[dict[str, Any]]:
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = report["artifacts"][0]["checks"][1:]
    return found


def test_places_and_outputs(experts: Path, tmp_path: Path) -> None:
    done = quantize(experts, tmp_path / "out")
    assert done.exit_code == 0, done.output
    places, outputs = checks(tmp_path / "out")
    assert places["detail"].endswith("tensors of Qwen2MoeForCausalLM")
    assert outputs["detail"] == "equal, input_ids"
    assert "3 checks held, quality not measured" in done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    schemes = {row["name"]: row["scheme"] for row in report["passes"][0]["layers"]}
    assert schemes["model.layers.0.mlp.gate"] == "float32"
    assert schemes["model.layers.0.mlp.experts.3.up_proj"] == "int8/channel"


@pytest.mark.parametrize("named", ["bfloat16", "float16"])
def test_the_type_of_the_weights_counts_not_that_of_the_configuration(
    experts: Path, tmp_path: Path, named: str
) -> None:
    """As where a network of 16 bits was trained on in float32."""
    shutil.copytree(experts, tmp_path / "in")
    config = json.loads((experts / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "in" / "config.json").write_text(json.dumps({**config, "dtype": named}))
    done = quantize(tmp_path / "in", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert checks(tmp_path / "out")[1]["detail"] == "equal, input_ids"


def test_a_router_as_codes_is_found(
    experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "routers", lambda _: {})
    monkeypatch.setattr(layers, "_unread", lambda _: {})
    # Asked to dequantize, which it would be, transformers reads codes of any module.
    monkeypatch.setattr(Reading, "initializes", lambda *_: False)
    done = quantize(experts, tmp_path / "out")
    assert done.exit_code == 4
    assert "'model.layers.0.mlp.gate.weight_packed'" in done.stderr
    assert "are read by no layer of Qwen2MoeForCausalLM" in done.stderr
    assert not (tmp_path / "out" / "config.json").exists()


def test_other_outputs_are_found(
    experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = proof.dequantized

    def wrong(tensor: StoredTensor) -> torch.Tensor:
        return genuine(tensor) * (1.1 if "q_proj" in tensor.name else 1.0)

    monkeypatch.setattr(proof, "dequantized", wrong)
    done = quantize(experts, tmp_path / "out")
    assert done.exit_code == 4
    assert "dB from those of the dequantized weights" in done.stderr


def test_values_that_are_made_up_are_the_same_on_both_sides(experts: Path, tmp_path: Path) -> None:
    """The library draws at random what a checkpoint lacks, which is no fault of the artifact's."""
    shutil.copytree(experts, tmp_path / "in")
    weights = load_file(tmp_path / "in" / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    done = quantize(tmp_path / "in", tmp_path / "out")
    assert done.exit_code == 0, done.output
    noted = "; the model lacks 'lm_head.weight', and values were made up"
    assert checks(tmp_path / "out")[1]["detail"] == f"equal, input_ids{noted}"


def test_rounding_of_equal_weights_is_no_error(
    experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seen with jamba in bfloat16: a token goes to another expert by the order of a sum.
    monkeypatch.setattr(proof, "_distance_db", lambda *_: 27.0)
    done = quantize(experts, tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert checks(tmp_path / "out")[1]["detail"] == "27 dB with equal weights, input_ids"


def test_a_package_that_is_missing_leaves_it_unknown(
    experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    done = quantize(experts, tmp_path / "out")
    assert done.exit_code == 0
    (places,) = checks(tmp_path / "out")
    assert places["verdict"] == "unknown"
    assert "1 check held" in done.stderr
    assert "a place for each tensor” not proved: install compressed-tensors" in done.stderr
    assert quantize(experts, tmp_path / "strict", "--no-check").exit_code == 0
    assert checks(tmp_path / "strict") == []


def test_larger_models_are_not_opened(
    experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_MOST_BYTES", 1 << 10)
    monkeypatch.setattr(proof, "load_directory", lambda *_: pytest.fail("it is opened"))
    assert quantize(experts, tmp_path / "out").exit_code == 0
    places, outputs = checks(tmp_path / "out")
    assert "verdict" not in places
    assert outputs["verdict"] == "unknown"
    assert "GB of float weights are more than 1 GiB" in outputs["detail"]


def test_a_class_that_is_not_to_be_had_leaves_it_unknown(experts: Path, tmp_path: Path) -> None:
    source = tmp_path / "own"
    source.mkdir()
    config = json.loads((experts / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["OwnModel"]}))
    (source / "model.safetensors").write_bytes((experts / "model.safetensors").read_bytes())
    done = quantize(source, tmp_path / "out")
    assert done.exit_code == 0, done.output
    (places,) = checks(tmp_path / "out")
    assert "is a 'OwnModel', which transformers" in places["detail"]


def test_experts_of_three_axes_are_noted(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "fused", "gpt_oss")
    done = quantize(source, tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "Note: 88 % of the bytes stay float: GptOssExperts holds its weights in" in done.stderr
    assert "88 % of the bytes stay float" in (tmp_path / "out" / "report.md").read_text()
    assert "88 % of the bytes stay float" in (tmp_path / "out" / "report.html").read_text()
