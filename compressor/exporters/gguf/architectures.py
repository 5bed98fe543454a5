"""Architectures of llama.cpp: which models of ``transformers`` they are, and what each reads.

llama.cpp computes with code of its own for each architecture, which knows names of tensors and of
numbers. What that code has no place for is refused here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compressor.errors import ModelError, SpecError, listed

BLOCK = "blk.{}."
"""What names of a block's tensors begin with."""

_PROJECTIONS = ("attn_q", "attn_k", "attn_v")
_LINEAR = (*_PROJECTIONS, "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_WEIGHTS = ("attn_norm", "ffn_norm", *_LINEAR)
_GELU = ("gelu_pytorch_tanh", "gelu_new")
REMEDY = "leave out this export"
"""For what llama.cpp has no code for."""
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with what each frequency of the rotary embedding is divided by."""


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp has a family of models.

    Attributes:
        name: llama.cpp's.
        reading: the ``model_type`` of ``transformers`` that computes what llama.cpp does.
        rotates_pairs: the rotary embedding turns neighbouring channels of a head together, where
            ``transformers`` turns those half a head apart: rows of query and key are reordered.
        norms_add_one: norms multiply with 1 more than their weight, which is written.
        activations: of the layers between.
        biases: tensors of a block that are biases, read where the model has them.
        others: further tensors that each block has.
        alternates: attention slides over a window in every second block, the first among them, and
            two caps bound its scores and the logits.
    """

    name: str
    reading: str
    rotates_pairs: bool = False
    norms_add_one: bool = False
    activations: tuple[str, ...] = ("silu",)
    biases: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    alternates: bool = False

    def names(self, blocks: int) -> tuple[set[str], set[str]]:
        """Return the names of the tensors that there have to be, and of those that there may be."""
        needed, optional = {"token_embd.weight", "output_norm.weight"}, {"output.weight"}
        for index in range(blocks):
            start = BLOCK.format(index)
            needed |= {f"{start}{name}.weight" for name in (*_WEIGHTS, *self.others)}
            optional |= {f"{start}{name}.bias" for name in self.biases}
        return needed, optional

    def turned(self, name: str) -> str:
        """Return which heads the rows of a tensor belong to if they are reordered: query or key."""
        part = name.split(".")[-2]
        return {"attn_q": "query", "attn_k": "key"}.get(part, "") if self.rotates_pairs else ""

    def adds_one(self, name: str) -> bool:
        """Return whether a tensor is written with 1 added."""
        return self.norms_add_one and name.endswith("_norm.weight")


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "llama", rotates_pairs=True, biases=_LINEAR),
    "mistral": Architecture("llama", "llama", rotates_pairs=True, biases=_LINEAR),
    "qwen2": Architecture("qwen2", "qwen2", biases=_PROJECTIONS),
    "qwen3": Architecture("qwen3", "qwen3", others=("attn_q_norm", "attn_k_norm")),
    "gemma": Architecture(
        "gemma",
        "gemma",
        norms_add_one=True,
        activations=_GELU,
    ),
    "gemma2": Architecture(
        "gemma2",
        "gemma2",
        norms_add_one=True,
        activations=_GELU,
        others=("post_attention_norm", "post_ffw_norm"),
        alternates=True,
    ),
}
"""By the ``model_type`` of ``config.json``."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a model.

    Raises:
        SpecError: it is none of those that can be written.
    """
    kind = config.get("model_type")
    found = ARCHITECTURES.get(str(kind))
    if found is None:
        raise SpecError(
            "export gguf",
            f"has no architecture for a model of type {kind!r}; it has those of "
            f"{', '.join(ARCHITECTURES)}",
            REMEDY,
        )
    return found


def check_names(architecture: Architecture, blocks: int, names: Mapping[str, str]) -> None:
    """Compare the tensors of a model with those that llama.cpp reads.

    Args:
        names: the name in the file, by that in the checkpoint.

    Raises:
        SpecError: there are tensors that it does not read.
        ModelError: it misses some.
    """
    needed, optional = architecture.names(blocks)
    strange = sorted(old for old, new in names.items() if new not in needed | optional)
    if strange:
        raise SpecError(
            "export gguf",
            f"has no place for {listed(strange)} in llama.cpp's {architecture.name}",
            REMEDY,
        )
    missing = sorted(needed - set(names.values()))
    if missing:
        raise ModelError(
            "export gguf",
            f"misses {listed(missing)} of llama.cpp's {architecture.name}",
            "a shard is missing, or config.json belongs to another model",
        )
