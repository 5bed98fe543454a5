"""Quantize a language model with another program, or read what was written; run by its Python.

    python language_peers.py quantize TOOL BITS GROUP ZEROS MODEL CALIBRATION.npy TARGET
    python language_peers.py logits TOKENS.npy FOUND.npz DIRECTORY...

TOOL is ``gptqmodel``, ``autoround`` or ``llmcompressor``. ZEROS is ``zeros`` where codes have zero
points, and else ``symmetric``. CALIBRATION holds tokens, ``[samples, length]``, and everything that
is not said here is the tool's own choice. ``logits`` opens directories by transformers, in float32,
and writes the logits of each by its name. It knows nothing of the project, whose packages are not
here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 8


@dataclass(frozen=True)
class Form:
    """What codes are like."""

    bits: int
    group: int
    symmetric: bool


def gptqmodel(source: Path, target: Path, tokens: torch.Tensor, form: Form) -> None:
    # It wants two threads, and takes half as many as there are processors.
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=form.bits, group_size=form.group, sym=form.symmetric)
    model = GPTQModel.load(str(source), config, device="cpu")
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens]
    model.quantize(rows, batch_size=BATCH)
    model.save(str(target))


def autoround(source: Path, target: Path, tokens: torch.Tensor, form: Form) -> None:
    from auto_round import AutoRound
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tool = AutoRound(
        model,
        AutoTokenizer.from_pretrained(source),
        bits=form.bits,
        group_size=form.group,
        sym=form.symmetric,
        dataset=DataLoader(rows, batch_size=BATCH),
        seqlen=tokens.shape[1],
        nsamples=len(tokens),
        batch_size=BATCH,
        device_map="cpu",
    )
    tool.quantize_and_save(str(target), format="auto_gptq")


def llmcompressor(source: Path, target: Path, tokens: torch.Tensor, form: Form) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = {"num_bits": form.bits, "type": "int", "symmetric": form.symmetric}
    groups = {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**weights, "strategy": "group", "group_size": form.group},
        }
    }
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    oneshot(
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(source),
        dataset=Dataset.from_dict({"input_ids": tokens.tolist()}),
        recipe=GPTQModifier(config_groups=groups, ignore=["lm_head"]),
        max_seq_length=tokens.shape[1],
        num_calibration_samples=len(tokens),
    )
    model.save_pretrained(str(target), save_compressed=True)


TOOLS: dict[str, Callable[..., None]] = {
    "gptqmodel": gptqmodel,
    "autoround": autoround,
    "llmcompressor": llmcompressor,
}


def quantize(tool: str, bits: str, group: str, zeros: str, *files: str) -> None:
    source, data, target = files
    form = Form(int(bits), int(group), zeros == "symmetric")
    tokens = torch.from_numpy(np.load(data))
    paths = Path(source).resolve(), Path(target).resolve()
    os.chdir(paths[1].parent)  # GPTQModel writes logs to the working folder
    TOOLS[tool](*paths, tokens, form)


@torch.inference_mode()
def logits(data: str, target: str, *directories: str) -> None:
    from transformers import AutoModelForCausalLM

    tokens = torch.from_numpy(np.load(data))
    found: dict[str, Any] = {}
    for directory in directories:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        made = [model(input_ids=rows, use_cache=False).logits for rows in tokens.split(BATCH)]
        found[Path(directory).name] = torch.cat(made).numpy()
    np.savez(target, **found)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    {"quantize": quantize, "logits": logits}[sys.argv[1]](*sys.argv[2:])
