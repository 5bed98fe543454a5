"""Mixtures of experts are calibrated from their files, and each expert sees all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from compressor.errors import CompressorError
from compressor.models.transformers.block_checkpoint import open_blocks
from compressor.models.transformers.single_experts import Experts, experts_of
from compressor.progress import quiet_libraries
from compressor.run.plan import make_plan
from compressor.spec.load import check_spec
from compressor.spec.source_text import Document
from tests.compressor.exporters.test_activation_formats import TOKENS, WORDS, perplexity, ran, spec

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
}  # fmt: skip
SPARSE = {**SIZES, "num_experts": 6, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
CONFIGS = {
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3": transformers.Qwen3MoeConfig(**SPARSE, head_dim=8),
    "shared": transformers.Qwen2MoeConfig(**SPARSE, shared_expert_intermediate_size=32),
    "stacked": transformers.GraniteMoeConfig(**SIZES, num_local_experts=4),
    "rows": transformers.DbrxConfig(
        vocab_size=WORDS, d_model=32, n_heads=4, n_layers=2, max_seq_len=64,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "sorted": transformers.Llama4TextConfig(
        **{**SIZES, "intermediate_size": 32}, num_local_experts=4, interleave_moe_layer_step=1,
        intermediate_size_mlp=64, head_dim=8, no_rope_layers=[1, 1], attn_temperature_tuning=False,
    ),
}  # fmt: skip
# Of the six, two are never among a token's two: their score is always between two others.
SCORES = torch.tensor([1.0, -1.0, 0.1, 0.2, 0.9, -0.9])
GPTQ = {"bits": 4, "group": 16, "method": "gptq"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        with quiet_libraries():
            network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for key, parameter in network.named_parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=0.3)
                if name == "qwen3" and key.endswith("mlp.gate.weight"):
                    parameter.data = SCORES[:, None] * parameter.data[:1]
            network.save_pretrained(path / name)
    labels = np.concatenate([TOKENS[:, 1:], np.full((len(TOKENS), 1), -100)], axis=1)
    np.savez(path / "tokens.npz", input_ids=TOKENS, labels=labels)
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_the_blocks_compute_what_the_network_computes(folder: Path, name: str):
    decoder = open_blocks(folder / name).unstacked().decoder
    tokens = torch.from_numpy(TOKENS[:2])
    given = decoder.arguments(tokens)
    hidden = given[0].hidden
    sent = []
    for index in range(len(decoder.blocks)):
        module = decoder.open(index)
        hidden = decoder.run(module, hidden, given[index])
        sent += [experts.sent for experts in experts_of(module).values()]
    with quiet_libraries(), torch.inference_mode():
        network = transformers.AutoModelForCausalLM.from_pretrained(folder / name).eval()
        wanted = network(tokens).logits
    torch.testing.assert_close(decoder.logits(tokens, hidden), wanted, rtol=1e-4, atol=1e-5)
    single = name not in ("stacked", "rows")
    assert any(isinstance(m, Experts) for m in module.modules()) is single
    assert [sum(counts) for counts in sent] == ([2 * tokens.numel()] * 2 if single else [])


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("mixtral", "gptq"),
        ("qwen3", "gptq"),
        ("sorted", "rtn"),
        ("sorted", "gptq"),
        pytest.param("sorted", "awq", marks=pytest.mark.slow),
        pytest.param("mixtral", "awq", marks=pytest.mark.slow),
        pytest.param("qwen3", "awq", marks=pytest.mark.slow),
        pytest.param("shared", "gptq", marks=pytest.mark.slow),
    ],
)
def test_transformers_opens_the_codes_of_all_experts(
    folder: Path, tmp_path: Path, name: str, method: str
):
    report = ran(spec(folder, name, {**GPTQ, "method": method}, tmp_path / "out"))
    reported = report["artifacts"][0]["metric"]["value"]
    assert perplexity(tmp_path / "out") == pytest.approx(reported, rel=1e-5)
    rows = {r["name"]: r for r in report["passes"][0]["layers"] if ".experts." in r["name"]}
    experts = 4 if name in ("mixtral", "sorted") else 6
    assert len(rows) == 2 * experts * 3
    assert {row["scheme"] for row in rows.values()} == {"int4/group 16"}
    if name == "qwen3":
        ups = [rows[f"model.layers.0.mlp.experts.{i}.up_proj"] for i in range(experts)]
        sent = [row["details"]["tokens_sent"] for row in ups]
        assert sent[2] == sent[3] == 0
        assert sent[0] == sent[4] > 0
        assert sum(sent) == 2 * TOKENS.size
        note = "model.layers.0.mlp.experts: each of 6 experts was calibrated on all tokens"
        assert any(n.startswith(note) and n.endswith("2 are sent none") for n in notes_of(report))
    if name == "sorted" and method != "rtn":
        note = "model.layers.1.feed_forward.experts: each of 4 experts was calibrated on the tokens"
        assert any(n.startswith(note) for n in notes_of(report))


def test_what_is_beside_experts_in_rows_is_calibrated(folder: Path, tmp_path: Path):
    report = ran(spec(folder, "rows", GPTQ, tmp_path / "out"))
    artifact = report["artifacts"][0]
    assert perplexity(tmp_path / "out") == pytest.approx(artifact["metric"]["value"], rel=1e-5)
    rows = {
        row["name"].rpartition(".")[2]
        for row in report["passes"][0]["layers"]
        if row["scheme"] == "int4/group 16"
    }
    assert rows == {"Wqkv", "out_proj"}
    assert "DbrxExpertGLU holds its weights in parameters of its own" in artifact["remarks"][0]


def notes_of(report: dict[str, Any]) -> list[str]:
    return [note for step in report["passes"] for note in step.get("notes", ())]


@pytest.mark.slow
def test_an_expert_that_no_token_is_sent_to_is_calibrated(folder: Path, tmp_path: Path):
    """Without the inputs of all tokens, it would be rounded to nearest."""
    gptq = ran(spec(folder, "qwen3", GPTQ, tmp_path / "gptq"))
    nearest = ran(spec(folder, "qwen3", {**GPTQ, "method": "rtn"}, tmp_path / "rtn"))
    name = "model.layers.0.mlp.experts.3.down_proj"
    (ours, theirs) = (
        next(r["weight_sqnr_db"] for r in report["passes"][0]["layers"] if r["name"] == name)
        for report in (gptq, nearest)
    )
    assert ours < theirs - 0.1, "it gives up weights for outputs"


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("fp8-w8a8-static", r"expert '.*stored scale.*use a scale for each token"),
        ("int8-w8a8", r"expert '.*does not stack.*use preset fp8-w8a8"),
    ],
)
def test_what_transformers_cannot_stack_is_refused(
    folder: Path, tmp_path: Path, preset: str, message: str
):
    value = spec(folder, "mixtral", {"preset": preset}, tmp_path / "out")
    with pytest.raises(CompressorError, match=message):
        make_plan(check_spec(Document(Path("spec.yaml"), value)))
