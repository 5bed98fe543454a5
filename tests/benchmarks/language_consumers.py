"""Let a program that serves language models say how likely it finds texts; run by its Python.

    python language_consumers.py llamacpp|genai|vllm TOKENS.npy FOUND.npy DIRECTORY

TOKENS holds tokens ``[texts, length]``; FOUND gets the log probability of each but the first, by
what comes before it, ``[texts, length - 1]``. It knows nothing of the project, whose packages are
not here.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

Array = Any
WORDS = 1000  # scores of so many tokens are asked for


def llamacpp(directory: Path, tokens: Array) -> Array:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(directory / "model.gguf")
    parameters.n_ctx = tokens.shape[1] + 16
    parameters.n_parallel = 1
    parameters.warmup = False
    parameters.cpuparams.n_threads = 1
    parameters.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(parameters)

    def likely(before: Array, token: int) -> float:
        asked = {
            "prompt": before.tolist(),
            "max_tokens": 1,
            "logprobs": WORDS,
            "temperature": 0,
            "cache_prompt": True,
        }
        (choice,) = server.handle_completions(asked)["choices"]
        (found,) = choice["logprobs"]["content"]
        scores: dict[int, float] = {x["id"]: x["logprob"] for x in found["top_logprobs"]}
        return scores[token]

    return np.array([[likely(row[:n], row[n]) for n in range(1, len(row))] for row in tokens])


def genai(directory: Path, tokens: Array) -> Array:
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(directory))
    rows = []
    for row in tokens:
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(max_length=len(row) + 1, do_sample=False)
        generator = onnxruntime_genai.Generator(model, parameters)
        found = []
        for token, following in pairwise(row):
            generator.append_tokens(np.array([[token]], np.int32))
            scores = np.asarray(generator.get_logits(), np.float64).reshape(-1)
            found.append(scores[following] - np.logaddexp.reduce(scores))
        rows.append(found)
    return np.array(rows)


def vllm(directory: Path, tokens: Array) -> Array:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(directory),
        dtype="bfloat16",
        max_model_len=tokens.shape[1] + 16,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_seqs=4,
    )
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    done = engine.generate([{"prompt_token_ids": row.tolist()} for row in tokens], asked)

    def likely(found: list[Any], row: Array) -> list[float]:
        places = zip(found[1:], row[1:].tolist(), strict=True)
        return [place[token].logprob for place, token in places]

    return np.array([likely(x.prompt_logprobs, row) for x, row in zip(done, tokens, strict=True)])


if __name__ == "__main__":
    name, data, target, folder = sys.argv[1:]
    served = {"llamacpp": llamacpp, "genai": genai, "vllm": vllm}[name]
    np.save(target, served(Path(folder).resolve(), np.load(data)))
