"""Run a graph with a cache in ONNX Runtime: whole texts, and token after token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from compressor.errors import artifact_errors
from compressor.exporters.genai.description import SETTINGS, read_settings
from compressor.models.onnx.ort_session import OrtRunner
from compressor.types.tensors import Array, Batch

Cache = Mapping[str, Array]
"""Keys and values of all blocks, by input: ``[batch, key heads, tokens, head width]``, float32,
int8, or uint8 with two numbers in each element of half the width."""

_TOKENS, _MASK, _LOGITS = "input_ids", "attention_mask", "logits"


class GenaiRunner:
    """The graph of a folder that onnxruntime-genai reads, by its settings.

    Args:
        folder: with the settings, the graph and its weights.

    Raises:
        ArtifactError: settings or graph are damaged.
    """

    def __init__(self, folder: Path):
        self._subject = f"artifact {folder.name!r}"
        decoder = read_settings(folder / SETTINGS, self._subject)
        self._blocks = int(decoder["num_hidden_layers"])
        self._kept = (int(decoder["num_key_value_heads"]), int(decoder["head_size"]))
        with artifact_errors("export it again"):
            self._session = OrtRunner(folder / str(decoder["filename"]), self._subject)
        self.runtime = self._session.runtime

    def run(self, batch: Batch) -> Batch:
        """Run whole texts, with nothing before them; arrays that it does not take are ignored.

        Returns:
            The logits as ``output``, float32 ``[batch, tokens, vocabulary]``.
        """
        tokens = np.asarray(batch[_TOKENS]).astype(np.int64)
        logits, _ = self.step(tokens, self.empty(len(tokens)))
        return {"output": logits}

    def empty(self, batch: int) -> Cache:
        """Return a cache with no token in it."""
        heads, width = self._kept
        names = (
            f"past_key_values.{index}.{part}"
            for index in range(self._blocks)
            for part in ("key", "value")
        )
        dtypes = {spec.name: spec.dtype for spec in self._session.inputs}
        return {name: np.zeros((batch, heads, 0, width), dtypes[name]) for name in names}

    def step(self, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        """Run some more tokens.

        Args:
            tokens: int64 ``[batch, tokens]``, which follow those in the cache.

        Returns:
            Their logits, and the cache with them in it.
        """
        past = next(iter(cache.values())).shape[2]
        mask = np.ones((tokens.shape[0], past + tokens.shape[1]), np.int64)
        found = self._session.run({_TOKENS: tokens, _MASK: mask, **cache})
        grown = {name: found[name.replace("past_key_values", "present")] for name in cache}
        return found[_LOGITS], grown
