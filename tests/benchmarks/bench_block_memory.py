"""Anonymous memory of passes that calibrate a checkpoint block by block, on blocks of real size.

A Llama-shaped directory of random bfloat16 weights: width 3,072, 8,192 in the MLP, a vocabulary of
128,256 that is the output layer, too. Each pass runs in a process of its own, whose memory is read
fifty times a second. ``BENCH_BLOCKS`` sets how many blocks there are (several numbers with commas:
a directory of each; 28 are 6 GB), ``BENCH_SAMPLES`` how many pieces of ``BENCH_LENGTH`` tokens are
read (with fewer than 17 of 512 the moments of the MLP are found at the end, from inputs that were
kept), ``BENCH_PASSES`` the passes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.benchmarks.bench_streaming import anonymous_bytes
from tests.benchmarks.marks import benchmark
from tests.paths import ROOT

pytestmark = benchmark(seconds=7200)
BLOCKS = tuple(map(int, os.environ.get("BENCH_BLOCKS", "2").split(",")))
SAMPLES = int(os.environ.get("BENCH_SAMPLES", "17"))
LENGTH = int(os.environ.get("BENCH_LENGTH", "512"))
WIDTH, KEYS, MIDDLE, WORDS = 3072, 1024, 8192, 128_256
LETTERS = "abcdefghijklmnopqrstuvwxyz "
QUANTIZE = {"pass": "quantize-weights", "preset": "int4-g128"}
PASSES: dict[str, dict[str, Any]] = {
    "gptq": {**QUANTIZE, "method": "gptq"},
    "awq": {**QUANTIZE, "method": "awq"},
    "prune-wanda": {"pass": "prune-wanda", "sparsity": 0.5},
    "prune-sparsegpt": {"pass": "prune-sparsegpt", "n": 2, "m": 4},
}


def make_directory(folder: Path, blocks: int) -> None:
    """Write the weights, each block in a shard of its own, with a tokenizer of letters."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": MIDDLE,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": blocks,
        "vocab_size": WORDS,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(LETTERS)}, []))
    tokenizer.save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16()

    ones = torch.ones(WIDTH).bfloat16()
    places = {}

    def write(number: int, tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{number:05}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        places.update(dict.fromkeys(tensors, name))

    write(0, {"model.embed_tokens.weight": random(WORDS, WIDTH), "model.norm.weight": ones})
    for block in range(blocks):
        path = f"model.layers.{block}"
        shapes = {
            "self_attn.q_proj": (WIDTH, WIDTH),
            "self_attn.k_proj": (KEYS, WIDTH),
            "self_attn.v_proj": (KEYS, WIDTH),
            "self_attn.o_proj": (WIDTH, WIDTH),
            "mlp.gate_proj": (MIDDLE, WIDTH),
            "mlp.up_proj": (MIDDLE, WIDTH),
            "mlp.down_proj": (WIDTH, MIDDLE),
        }
        tensors = {f"{path}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{path}.{name}.weight"] = ones.clone()
        write(block + 1, tensors)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@dataclass(frozen=True)
class Cost:
    """What a run took: seconds of the processor, and bytes of anonymous memory at most."""

    seconds: float
    peak: int


def cost(spec: Path) -> Cost:
    """Run a spec, and watch its memory."""
    before = getrusage(RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "compressor", "run", str(spec), "-q"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.02)
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()
    after = getrusage(RUSAGE_CHILDREN)
    return Cost(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_block_memory(blocks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    make_directory(tmp_path / "llama", blocks)
    letters = torch.randint(len(LETTERS), (SAMPLES * LENGTH + 1,)).tolist()
    (tmp_path / "text.txt").write_text("".join(LETTERS[place] for place in letters))
    data = {
        "text": "text.txt",
        "tokenizer": "llama",
        "length": LENGTH,
        "samples": SAMPLES,
        "batch": 1,
        "inputs": {"input_ids": "input_ids"},
    }
    chosen = os.environ.get("BENCH_PASSES", ",".join(PASSES)).split(",")
    with capsys.disabled():
        print(f"\n{blocks} blocks, {SAMPLES} x {LENGTH} tokens")
        print(f"{'':16}{'anonymous MB':>14}{'CPU s':>9}", flush=True)
        for name in chosen:
            value = {
                "version": 1,
                "name": name,
                "model": {"checkpoint": "llama"},
                "data": {"calibration": data},
                "passes": [PASSES[name]],
                "exports": [{"format": "safetensors", "layout": "compressed-tensors"}],
                "output": name,
            }
            spec = tmp_path / f"{name}.yaml"
            spec.write_text(json.dumps(value))
            found = cost(spec)
            print(f"{name:16}{found.peak / 1e6:14.0f}{found.seconds:9.0f}", flush=True)
