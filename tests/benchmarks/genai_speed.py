"""Tokens a second of folders that onnxruntime-genai reads, one token of each in turn.

Run it in an environment with onnxruntime-genai, on one thread:

    OMP_NUM_THREADS=1 python tests/benchmarks/genai_speed.py THEIRS OURS

Other programs slow all folders down alike, as their tokens alternate; what is compared is the
median, and the best tenth.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import numpy as np

PROMPT, TOKENS, ROUNDS = 128, 200, 6
SMALLEST_VOCABULARY = 250  # prompts are of tokens that each model has
_ONE_THREAD = {"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}}


def _opened(library: Any, folder: str) -> Any:
    config = library.Config(folder)
    config.overlay(json.dumps(_ONE_THREAD))
    return library.Model(config)


def _started(library: Any, model: Any, prompt: Any) -> tuple[Any, float]:
    """Return a generator after its first token, and the seconds that took."""
    params = library.GeneratorParams(model)
    length = PROMPT + TOKENS
    params.set_search_options(max_length=length, min_length=length, do_sample=False)
    generator = library.Generator(model, params)
    start = time.perf_counter()
    generator.append_tokens(prompt)
    generator.generate_next_token()
    return generator, time.perf_counter() - start


def main(folders: list[str]) -> None:
    """Print a line for each folder."""
    library = importlib.import_module("onnxruntime_genai")
    models = {folder: _opened(library, folder) for folder in folders}
    prompt = np.random.default_rng(0).integers(2, SMALLEST_VOCABULARY, (1, PROMPT))
    tokens: dict[str, list[float]] = {folder: [] for folder in folders}
    prompts: dict[str, list[float]] = {folder: [] for folder in folders}
    for turn in range(ROUNDS):
        running = {}
        for folder in folders[:: 1 if turn % 2 else -1]:
            running[folder], seconds = _started(library, models[folder], prompt.astype(np.int32))
            prompts[folder].append(seconds)
        for number in range(TOKENS - 2):
            for folder in folders[:: 1 if number % 2 else -1]:
                start = time.perf_counter()
                running[folder].generate_next_token()
                tokens[folder].append(time.perf_counter() - start)
    for folder in folders:
        median, best = np.median(tokens[folder]), np.quantile(tokens[folder], 0.1)
        print(
            f"{folder}: {1 / median:.1f} tokens/s (median), {1 / best:.1f} (best tenth), "
            f"{np.median(tokens[folders[0]]) / median:.3f} of the first; "
            f"prompt {PROMPT / np.median(prompts[folder]):.0f} tokens/s"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
