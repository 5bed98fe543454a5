"""Scales of the keys and values that attention keeps: in the file, and in what is judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from compressor.errors import SpecError
from compressor.exporters.safetensors.stream_plan import plan_stream
from compressor.lab.quantizing import QuantizeOptions, quantization_spec
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.transformers.block_checkpoint import BlockCheckpoint, open_blocks
from compressor.models.transformers.cached_attention import change_cache
from compressor.passes.quantize.attention_cache import QuantizeCache
from compressor.progress import Silent, quiet_libraries
from compressor.run.blocks.decoder_blocks import DecoderStage
from compressor.run.pipeline import run_passes
from compressor.run.plan import make_plan
from compressor.run.store import Store
from compressor.run.workspace import Workspace
from compressor.spec.load import check_spec
from compressor.spec.source_text import Document
from compressor.types.passes import PassContext
from tests.compressor.exporters.test_activation_formats import (
    TOKENS,
    WORDS,
    config,
    folder,  # noqa: F401  # a fixture
    ran,
    spec,
)

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

WEIGHTS = {"pass": "quantize-weights", "preset": "int8"}
CACHE = {"pass": "quantize-cache"}
Look = Callable[[str, torch.Tensor], torch.Tensor]


def perplexity(path: Path, look: Look) -> float:
    """Return the perplexity of a directory with the keys and values that a function returns."""
    with quiet_libraries(), torch.inference_mode():
        network = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
        for name, part in network.named_modules():
            if name.endswith("self_attn"):
                change_cache(
                    part,
                    lambda k, v, n=name: (look(f"{n}.k_scale", k), look(f"{n}.v_scale", v)),  # type: ignore[misc]
                )
        logits = network(torch.from_numpy(TOKENS)).logits[:, :-1]
    wanted = torch.from_numpy(TOKENS[:, 1:]).reshape(-1)
    return float(torch.nn.functional.cross_entropy(logits.reshape(-1, WORDS), wanted).exp())


def scales(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path / "model.safetensors", "pt") as file:
        return {n: file.get_tensor(n) for n in file.keys() if n[-8:] in (".k_scale", ".v_scale")}  # noqa: SIM118


def test_scales_are_those_of_the_greatest_magnitudes_and_judged(
    folder: Path,  # noqa: F811
    tmp_path: Path,
):
    value = spec(folder, "float32", {}, tmp_path / "out", passes=[WEIGHTS, CACHE])
    report = ran(value)
    judged = report["artifacts"][0]["metric"]["value"]
    scheme = config(tmp_path / "out")["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["type"], scheme["strategy"]) == (8, "float", "tensor")
    assert scheme["dynamic"] is False
    written = scales(tmp_path / "out")
    assert {tuple(scale.shape) for scale in written.values()} == {(1,)}
    largest: dict[str, float] = {}

    def seen(name: str, kept: torch.Tensor) -> torch.Tensor:
        largest[name] = float(kept.abs().max())
        return kept

    as_floats = perplexity(tmp_path / "out", seen)
    assert written.keys() == largest.keys()
    assert len(written) == 4
    for name, scale in written.items():
        assert float(scale) == pytest.approx(largest[name] / 448, rel=1e-5), name

    def rounded(name: str, kept: torch.Tensor) -> torch.Tensor:
        return (kept / written[name]).to(torch.float8_e4m3fn).float() * written[name]

    assert perplexity(tmp_path / "out", rounded) == pytest.approx(judged, rel=1e-5)
    assert judged != pytest.approx(as_floats, rel=1e-4)
    rows = {row["name"]: row for row in report["passes"][1]["layers"]}
    row = rows["model.layers.1.self_attn.k_proj"]
    assert row["scheme"] == "int8, keys fp8-e4m3/tensor"
    expected = largest["model.layers.1.self_attn.k_scale"]
    assert row["details"]["largest_keys"] == pytest.approx(expected, rel=1e-5)
    assert rows["model.layers.1.mlp.up_proj"]["details"] == {}


def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path):  # noqa: F811
    blocks, step = open_blocks(folder / "float32"), QuantizeCache()
    with pytest.raises(SpecError, match="no place in gguf"):
        step.survey(blocks, PassContext(targets=frozenset({"gguf"})))
    with pytest.raises(SpecError, match=r"give data\.calibration"):
        step.survey(open_checkpoint(folder / "float32"), PassContext())
    with pytest.raises(SpecError, match="no layer is quantized"):
        plan_stream(step.preview(blocks, PassContext(), {}))
    neox = transformers.GPTNeoXConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    with quiet_libraries():
        transformers.GPTNeoXForCausalLM(neox).save_pretrained(tmp_path / "neox")
    with pytest.raises(SpecError, match="finds no attention with a cache and a layer k_proj"):
        step.survey(open_blocks(tmp_path / "neox"), PassContext())


def test_what_was_found_is_kept(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    def caches() -> Any:
        value = spec(folder, "float32", {}, tmp_path / "out", passes=[WEIGHTS, CACHE])
        del value["metric"], value["limits"], value["data"]["evaluation"]
        plan = make_plan(check_spec(Document(Path("spec.yaml"), value)))
        carrier = run_passes(Workspace(plan, Store(tmp_path), Silent()))[-1].carrier
        assert isinstance(carrier, BlockCheckpoint)
        return carrier.caches

    first = caches()
    monkeypatch.setattr(DecoderStage, "statistics", None)
    assert first == caches() != {}


def test_the_command_line_adds_the_pass(folder: Path, tmp_path: Path):  # noqa: F811
    text = tmp_path / "train.txt"
    text.write_text("x" * 500)
    given = (folder / "float32", tmp_path / "out")
    made = quantization_spec(*given, QuantizeOptions(cache="fp8", text=text))
    assert [step.name for step in made.passes] == ["quantize-weights", "quantize-cache"]
    with pytest.raises(SpecError, match=r"is missing, and --kv-cache is calibrated on text"):
        quantization_spec(*given, QuantizeOptions(cache="fp8"))
