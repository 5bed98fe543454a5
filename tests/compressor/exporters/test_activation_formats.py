"""Directories whose activations are rounded: transformers computes what the report judged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from compressor.errors import CompressorError
from compressor.progress import quiet_libraries
from compressor.report.run import run_spec
from compressor.run.plan import make_plan
from compressor.spec.load import check_spec
from compressor.spec.source_text import Document

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

WORDS, LENGTH = 50, 24
TOKENS = np.random.default_rng(0).integers(0, WORDS, (6, LENGTH))
STATIC = {"preset": "int8-w8a8-static", "method": "gptq"}
MIXED = {
    "preset": "int8-w8a8",
    "layers": [
        {"match": "*.0.mlp.down_proj", "format": "fp8-e4m3", "activations": "fp8-e4m3"},
        {"match": "*.1.mlp.down_proj", "activations": "int8", "static": True},
        {"match": "*.o_proj", "activations": "float"},
        {"match": "*.q_proj", "skip": True},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small Llama in two types, and tokens."""
    path = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with quiet_libraries():
        network = transformers.LlamaForCausalLM(config)
        for parameter in network.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        network.save_pretrained(path / "float32")
        network.to(torch.bfloat16).save_pretrained(path / "bfloat16")
    labels = np.concatenate([TOKENS[:, 1:], np.full((len(TOKENS), 1), -100)], axis=1)
    np.savez(path / "tokens.npz", input_ids=TOKENS, labels=labels)
    return path


def spec(
    folder: Path, dtype: str, options: Mapping[str, Any], output: Path, **keys: Any
) -> dict[str, Any]:
    data = {"npz": str(folder / "tokens.npz"), "inputs": {"input_ids": "input_ids"}, "batch": 2}
    return {
        "version": 1,
        "name": "tiny",
        "model": {"checkpoint": str(folder / dtype)},
        "data": {"calibration": data, "evaluation": {**data, "target": "labels"}},
        "metric": "perplexity",
        "passes": [{"pass": "quantize-weights", **options}],
        "exports": [{"format": "safetensors", "layout": "compressed-tensors"}],
        "limits": {"metric-drop": 1e6, "size-ratio": 1},
        "output": str(output),
        **keys,
    }


def ran(value: Mapping[str, Any]) -> dict[str, Any]:
    return dict(run_spec(check_spec(Document(Path("spec.yaml"), dict(value)))).report)


def perplexity(path: Path) -> float:
    with quiet_libraries(), torch.inference_mode():
        network = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
        logits = network(torch.from_numpy(TOKENS)).logits[:, :-1].float()
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, WORDS), torch.from_numpy(TOKENS[:, 1:]).reshape(-1)
    )
    return float(loss.exp())


def config(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())["quantization_config"]
    return found


@pytest.mark.parametrize(
    ("dtype", "options", "stored"),
    [
        ("float32", STATIC, "input_scale"),
        ("bfloat16", {"preset": "nvfp4-w4a4"}, "input_global_scale"),
        pytest.param("float32", {"preset": "int8-w8a8"}, "", marks=pytest.mark.slow),
        pytest.param("float32", {"preset": "fp8-w8a8"}, "", marks=pytest.mark.slow),
        pytest.param(
            "float32", {"preset": "fp8-w8a8-static"}, "input_scale", marks=pytest.mark.slow
        ),
        pytest.param("bfloat16", {"preset": "mxfp4-w4a4"}, "", marks=pytest.mark.slow),
    ],
    ids=lambda value: value.get("preset") if isinstance(value, dict) else None,
)
def test_transformers_gives_the_reported_perplexity(
    folder: Path, tmp_path: Path, dtype: str, options: dict[str, Any], stored: str
):
    report = ran(spec(folder, dtype, options, tmp_path / "out"))
    reported = report["artifacts"][0]["metric"]["value"]
    # Sums that transformers rounds to bfloat16 fall on other codes of 4 bits: 9 % as measured. Of
    # float32, one in another order does so where it is near a tie: 7e-5 as measured, with AVX-512.
    tolerance = 3e-4 if dtype == "float32" else 0.2
    assert perplexity(tmp_path / "out") == pytest.approx(reported, rel=tolerance)
    proof = {check["name"]: check["detail"] for check in report["artifacts"][0]["checks"]}
    assert proof["gives the dequantized outputs"] == "equal, input_ids"
    weights = ran(spec(folder, dtype, without_activations(options), tmp_path / "weights"))
    assert reported != pytest.approx(weights["artifacts"][0]["metric"]["value"], rel=1e-5)
    (group,) = config(tmp_path / "out")["config_groups"].values()
    dynamic = {"": True, "input_scale": False, "input_global_scale": "local"}[stored]
    assert group["input_activations"]["dynamic"] == dynamic
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        scales = [name for name in file.keys() if "proj.input_" in name]  # noqa: SIM118
    assert all(name.endswith(f".{stored}") for name in scales)
    assert len(scales) == (14 if stored else 0)


def without_activations(options: Mapping[str, Any]) -> dict[str, Any]:
    weights = {"int8": "int8", "fp8": "fp8", "nvfp4": "nvfp4", "mxfp4": "mxfp4"}
    return {**options, "preset": weights[options["preset"].partition("-")[0]]}


def test_layers_of_several_formats_are_read_each_as_it_is(folder: Path, tmp_path: Path):
    report = ran(spec(folder, "float32", MIXED, tmp_path / "out"))
    reported = report["artifacts"][0]["metric"]["value"]
    assert perplexity(tmp_path / "out") == pytest.approx(reported, rel=1e-5)
    found = config(tmp_path / "out")
    groups = {
        (g["format"], str((g["input_activations"] or {}).get("strategy"))): g["targets"]
        for g in found["config_groups"].values()
    }
    assert groups[("float-quantized", "token")] == [r"model.layers.0.mlp.down_proj"]
    assert groups[("int-quantized", "tensor")] == [r"model.layers.1.mlp.down_proj"]
    assert groups[("pack-quantized", "None")] == [r"re:model\.layers\.\d+\.self_attn\.o_proj$"]
    assert len(groups[("int-quantized", "token")]) == 4
    assert found["format"] == "mixed-precision"
    assert r"re:model\.layers\.\d+\.self_attn\.q_proj$" in found["ignore"]
    schemes = {row["name"]: row["scheme"] for row in report["passes"][0]["layers"]}
    assert schemes["model.layers.1.mlp.down_proj"] == "int8/channel, int8/tensor inputs"
    assert schemes["model.layers.1.self_attn.o_proj"] == "int8/channel"


@pytest.mark.parametrize(
    ("dtype", "options", "keys", "message"),
    [
        ("float32", {"preset": "nvfp4-w4a4"}, {}, "give a bfloat16 model"),
        ("float32", {"preset": "int4-g32", "activations": "int8"}, {}, "weights of 8 bits without"),
        ("float32", {"preset": "fp8", "activations": "int8"}, {}, "would be fp8-e4m3/channel, and"),
        ("float32", {"preset": "mxfp4", "activations": "mxfp4", "static": True}, {}, "each group"),
        (
            "float32",
            {"preset": "int8-w8a8", "embeddings": True},
            {},
            "inputs of tables are indices",
        ),
        pytest.param(  # the model is lowered first
            "float32",
            {"preset": "int8-w8a8"},
            {"model": {"factory": "transformers.AutoModelForCausalLM"}},
            "leave out model.factory",
            marks=pytest.mark.slow,
        ),
        ("float32", {"preset": "int8-w8a8"}, {"exports": [{"format": "gguf"}]}, "weights alone"),
        ("float32", {"preset": "fp8-w8a8-static"}, {"data": {}}, "set data.calibration"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_the_plan(
    folder: Path,
    tmp_path: Path,
    dtype: str,
    options: dict[str, Any],
    keys: dict[str, Any],
    message: str,
):
    value = spec(folder, dtype, options, tmp_path / "out", **keys)
    value["model"] = {"checkpoint": str(folder / dtype), **keys.get("model", {})}
    if not value["data"]:
        value = {k: v for k, v in value.items() if k not in ("data", "metric", "limits")}
    with pytest.raises(CompressorError, match=message):
        make_plan(check_spec(Document(Path("spec.yaml"), value)))
    assert not (tmp_path / "out").exists()
