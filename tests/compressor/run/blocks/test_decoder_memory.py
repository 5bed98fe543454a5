"""Calibration from files takes the memory of one block, however many there are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from compressor.models.transformers.decoder import Decoder
from compressor.run.plan import make_plan
from compressor.spec.load import check_spec
from compressor.spec.source_text import Document
from tests.compressor.models.transformers_folders import save
from tests.paths import ROOT

HIDDEN, WIDE, LAYERS, WORDS = 768, 2048, 12, 32_000
BLOCK = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * WIDE)  # bytes in float32
BOUND = 150_000_000  # of anonymous memory beyond what there is once the plan is made

SCRIPT = """
import json, sys, threading, time
from pathlib import Path
from compressor.progress import Silent
from compressor.run.pipeline import run_passes
from compressor.run.plan import make_plan
from compressor.run.store import Store
from compressor.run.workspace import Workspace
from compressor.spec.load import check_spec
from compressor.spec.source_text import Document

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

value = json.loads(sys.argv[1])
plan = make_plan(check_spec(Document(Path("spec.yaml"), value)))
before = peak = anonymous()
done = threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())
threading.Thread(target=watch, daemon=True).start()
run_passes(Workspace(plan, Store(Path(value["output"])), Silent()))
done.set()
print(json.dumps({"before": before, "growth": peak - before, "predicted": plan.peak_memory}))
"""


def large_llama(folder: Path) -> int:
    """Write a directory of random bfloat16 weights, and return its bytes."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).bfloat16()

    tensors = {"model.embed_tokens.weight": random(WORDS, HIDDEN)}
    tensors |= {"lm_head.weight": random(WORDS, HIDDEN)}
    ones = torch.ones(HIDDEN).bfloat16()
    tensors["model.norm.weight"] = ones.clone()
    for layer in range(LAYERS):
        start = f"model.layers.{layer}."
        for name in "qkvo":
            tensors[f"{start}self_attn.{name}_proj.weight"] = random(HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            tensors[f"{start}mlp.{name}_proj.weight"] = random(WIDE, HIDDEN)
        tensors[f"{start}mlp.down_proj.weight"] = random(HIDDEN, WIDE)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{start}{name}.weight"] = ones.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": WORDS,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.slow
def test_memory_holds_one_block(tmp_path: Path):
    size = large_llama(tmp_path / "llama")
    tokens = np.random.default_rng(0).integers(0, WORDS, (4, 64))
    np.savez(tmp_path / "tokens.npz", input_ids=tokens)
    data = {"npz": str(tmp_path / "tokens.npz"), "inputs": {"input_ids": "input_ids"}, "batch": 1}
    value = {
        "version": 1,
        "name": "large",
        "model": {"checkpoint": str(tmp_path / "llama")},
        "data": {"calibration": data},
        "passes": [{"pass": "prune-wanda", "sparsity": 0.5}],
        "exports": [{"format": "safetensors", "layout": "compressed-tensors"}],
        "output": str(tmp_path / "out"),
    }
    command = [sys.executable, "-c", SCRIPT, json.dumps(value)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert size > 1.5 * BOUND, "of bfloat16; float32 would be twice that"
    assert BLOCK < found["growth"] < BOUND, found
    assert found["before"] + found["growth"] < found["predicted"], found


@pytest.mark.parametrize(
    ("method", "role", "predicted"),
    [
        ("rtn", None, 660_000_000),
        ("gptq", "calibration", 960_000_000 + 2 * 4 * 48**2),  # a moment of the widest layer
        (
            "rtn",
            "evaluation",
            710_000_000 + 2 * 4 * 3 * 40_000_000,
        ),  # scores of the words at three places
    ],
)
def test_what_is_predicted_of_a_checkpoint(
    method: str, role: str | None, predicted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path / "llama", "llama")
    np.savez(tmp_path / "tokens.npz", input_ids=np.zeros((4, 3), np.int64))
    data = {"npz": "tokens.npz", "inputs": {"input_ids": "input_ids"}, "batch": 1}
    monkeypatch.setattr(Decoder, "vocabulary", 40_000_000)
    value = {
        "version": 1,
        "name": "llama",
        "model": {"checkpoint": "llama"},
        "data": {} if role is None else {role: data},
        "passes": [{"pass": "quantize-weights", "preset": "int8", "method": method}],
        "exports": [{"format": "safetensors", "layout": "compressed-tensors"}],
        "output": "out",
    }
    plan = make_plan(check_spec(Document(tmp_path / "spec.yaml", value)))
    assert plan.peak_memory == predicted
