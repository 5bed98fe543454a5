"""Keys and values of 8 and 4 bits: the graph has their scales, and does what was judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers

from compressor.errors import SpecError
from compressor.exporters.genai.running import GenaiRunner
from compressor.lab.quantizing import QuantizeOptions, quantization_spec
from compressor.models.transformers.block_checkpoint import open_blocks
from compressor.models.transformers.cached_attention import change_cache
from compressor.passes.quantize.attention_cache import QuantizeCache
from compressor.types.passes import PassContext
from compressor.types.rounded_inputs import CacheScheme
from tests.compressor.exporters.genai.test_genai_export import initializers, stepped, written
from tests.compressor.exporters.gguf.folders import SIZES, WORDS, save, save_network
from tests.compressor.exporters.test_activation_formats import ran

TOKENS = np.random.default_rng(0).integers(2, WORDS, (2, 24))
GREATEST = {"int8": 127, "int4": 7}


def spec(folder: Path, form: str, output: Path) -> dict[str, Any]:
    labels = np.concatenate([TOKENS[:, 1:], np.full((len(TOKENS), 1), -100)], axis=1)
    np.savez(folder.parent / "tokens.npz", input_ids=TOKENS, labels=labels)
    data = {"npz": str(folder.parent / "tokens.npz"), "inputs": {"input_ids": "input_ids"}}
    return {
        "version": 1,
        "name": "tiny",
        "model": {"checkpoint": str(folder)},
        "data": {"calibration": data, "evaluation": {**data, "target": "labels"}},
        "metric": "perplexity",
        "passes": [{"pass": "quantize-cache", "format": form}],
        "exports": [{"format": "genai", "matmul-compute": "float32"}],
        "limits": {"metric-drop": 1e6, "size-ratio": 1.1},
        "output": str(output),
    }


def perplexity(logits: np.ndarray) -> float:
    flat = torch.from_numpy(logits[:, :-1].reshape(-1, WORDS))
    wanted = torch.from_numpy(TOKENS[:, 1:]).reshape(-1)
    return float(torch.nn.functional.cross_entropy(flat, wanted).exp())


@pytest.mark.parametrize(
    "form", [pytest.param("int8", marks=pytest.mark.slow), "int4"]
)  # they differ in constants
def test_what_is_kept_is_rounded_as_it_was_judged(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    network = save(folder)
    report = ran(spec(folder, form, tmp_path / "out"))
    judged = report["artifacts"][0]["metric"]["value"]
    stored = initializers(tmp_path / "out" / "model.onnx")
    greatest = GREATEST[form]
    lost: dict[str, list[float]] = {}

    def nearest(kept: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (kept / scale).round().clamp(-greatest - 1, greatest) * scale

    def rounded(name: str, kept: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor(stored[name]).view(1, kept.shape[1], 1, kept.shape[3])
        reached = kept.abs().amax((0, 2), keepdim=True)
        assert (scale * greatest <= reached * 1.0001).all() or "layers.1" in name
        found = (nearest(kept, scale), nearest(kept, reached / greatest))
        lost[name] = [float((each - kept).square().sum()) for each in found]
        return found[0]

    for path, part in network.named_modules():
        if path.endswith("self_attn"):
            change_cache(
                part,
                lambda k, v, n=path: (rounded(f"{n}.k_scale", k), rounded(f"{n}.v_scale", v)),  # type: ignore[misc]
            )
    with torch.inference_mode():
        expected = network(input_ids=torch.from_numpy(TOKENS)).logits.numpy()
    assert perplexity(expected) == pytest.approx(judged, rel=1e-5)
    # Of 4 bits, scales are those of least squared error.
    for name, (error, of_the_greatest) in lost.items():
        assert error < (0.95 if form == "int4" else 1.05) * of_the_greatest, name
    at_once = GenaiRunner(tmp_path / "out").run({"input_ids": TOKENS})["output"]
    for found in (at_once, stepped(tmp_path / "out" / "model.onnx")):
        assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    kinds = {v.type.tensor_type.elem_type for v in graph.input if v.name.startswith("past")}
    assert kinds == {onnx.TensorProto.INT8 if form == "int8" else onnx.TensorProto.UINT8}
    settings = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    head = network.model.layers[0].self_attn.head_dim
    kept = settings["model"]["decoder"]["head_size"]
    assert kept == (head if form == "int8" else head // 2)
    row = next(r for r in report["passes"][0]["layers"] if r["name"].endswith("0.self_attn.k_proj"))
    assert row["scheme"] == f"float32, keys {form}/channel"


def test_each_format_has_its_export(tmp_path: Path) -> None:
    save(tmp_path / "llama")
    blocks = open_blocks(tmp_path / "llama")
    genai, usual = (PassContext(targets=frozenset({t})) for t in ("genai", "compressed-tensors"))
    with pytest.raises(SpecError, match="no place in genai; take format int8 or int4"):
        QuantizeCache().survey(blocks, genai)
    with pytest.raises(
        SpecError, match=r"int4 that have no place in compressed-tensors; take.*--kv-cache fp8\)"
    ):
        QuantizeCache(format="int4").survey(blocks, usual)
    both = PassContext(targets=genai.targets | usual.targets)
    with pytest.raises(SpecError, match="no place in compressed-tensors; take format fp8-e4m3"):
        QuantizeCache(format="int8").survey(blocks, both)
    assert QuantizeCache(format="int4").survey(blocks, genai).requests


def test_the_command_line_names_the_format(tmp_path: Path) -> None:
    save(tmp_path / "llama")
    text = tmp_path / "train.txt"
    text.write_text("x" * 500)
    options = QuantizeOptions(cache="int4", text=text, format="genai")
    made = quantization_spec(tmp_path / "llama", tmp_path / "out", options)
    assert made.passes[-1] == QuantizeCache(format="int4")


def test_each_block_has_its_own_scales(tmp_path: Path) -> None:
    """Block 10 comes before block 2 in a file's order of names."""
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 11})
    network = save_network(tmp_path / "llama", config)
    attention = network.model.layers[0].self_attn
    count = attention.head_dim * config.num_key_value_heads
    caches = {
        f"model.layers.{i}.self_attn": CacheScheme(
            "int8", (127.0 * (i + 1),) * count, (1.0,) * count
        )
        for i in sorted(range(11), key=str)
    }
    carrier = open_blocks(tmp_path / "llama").with_caches(caches)
    stored = initializers(written(carrier, tmp_path / "out"))
    for i in range(11):
        assert stored[f"model.layers.{i}.self_attn.k_scale"] == pytest.approx(np.full(count, i + 1))
