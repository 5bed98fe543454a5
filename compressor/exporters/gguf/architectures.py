"""Architectures of llama.cpp: which models of ``transformers`` they are, and what each reads.

llama.cpp computes with code of its own for each architecture, which knows names of tensors and of
numbers. What that code has no place for is refused here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from compressor.errors import ModelError, SpecError, listed

BLOCK = "blk.{}."
"""What names of a block's tensors begin with."""

_PROJECTIONS = ("attn_q", "attn_k", "attn_v")
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")
_LINEAR = (*_PROJECTIONS, "attn_output", *_DENSE)
_WEIGHTS = ("attn_norm", "ffn_norm", *_PROJECTIONS, "attn_output")
_ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")
_HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
_GELU = ("gelu_pytorch_tanh", "gelu_new")
SLIDING, FULL = "sliding_attention", "full_attention"
"""What ``transformers`` calls attention over a window, and over all tokens."""

OUTPUT = "lm_head.weight"
"""The output layer of a checkpoint, which is part of no other module."""
REMEDY = "leave out this export"
"""For what llama.cpp has no code for."""
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with what each frequency of the rotary embedding is divided by."""


@dataclass(frozen=True)
class SlidingRule:
    """How attention slides over a window in some blocks, as llama.cpp has it built in.

    Attributes:
        period: the last of so many blocks attends to all tokens, the others slide.
        largest: blocks of the one model whose scores are scaled by the heads' share of the width,
            where those of all others are by the width of a head.
        capped: two caps bound the scores and the logits.
        rope_base: of the rotary embedding in blocks that slide; ``None`` if it is that of the
            others.
    """

    period: int
    largest: int
    capped: bool = False
    rope_base: float | None = None

    def kinds(self, blocks: int) -> list[str]:
        """Return what ``transformers`` calls the attention of each block."""
        every = [self.period - 1 == i % self.period for i in range(blocks)]
        return [FULL if whole else SLIDING for whole in every]


@dataclass(frozen=True)
class ExpertRule:
    """How tokens are sent to some of the experts of a block, as llama.cpp has it built in.

    Attributes:
        inner: the number of ``config.json`` that is the width inside of an expert.
        shares_sum: the shares of the experts that a token is sent to are made to sum to 1.
        shared: one more expert sees all tokens, and a gate decides its share.
    """

    inner: str = "moe_intermediate_size"
    shares_sum: bool = True
    shared: bool = False

    @property
    def weights(self) -> tuple[str, ...]:
        """The tensors of a block that are in the place of its dense layers."""
        beside = (_ROUTERS[1], *(f"{name}_shexp" for name in _DENSE)) if self.shared else ()
        return (_ROUTERS[0], *(f"{name}_exps" for name in _DENSE), *beside)


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
        tied: the output layer may be the table of tokens.
        experts: how tokens are sent to some of them; ``None`` where there are none.
        sliding: how attention slides over a window in some blocks; ``None`` where it never does.
        rope_types: of rotary embeddings.
        sparse_config: ``config.json`` leaves out what its class has defaults for.
        text: what names of the text's tensors have in them, for networks that take pictures too;
            llama.cpp keeps what reads those in a file of its own.
    """

    name: str
    reading: str
    rotates_pairs: bool = False
    norms_add_one: bool = False
    activations: tuple[str, ...] = ("silu",)
    biases: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    tied: bool = True
    experts: ExpertRule | None = None
    sliding: SlidingRule | None = None
    rope_types: tuple[str, ...] = ("default", "linear")
    sparse_config: bool = False
    text: str = ""

    def names(self, blocks: int) -> tuple[set[str], set[str]]:
        """Return the names of the tensors that there have to be, and of those that there may be."""
        needed, optional = {"token_embd.weight", "output_norm.weight"}, {"output.weight"}
        inner = _DENSE if self.experts is None else self.experts.weights
        for index in range(blocks):
            start = BLOCK.format(index)
            needed |= {f"{start}{name}.weight" for name in (*_WEIGHTS, *inner, *self.others)}
            optional |= {f"{start}{name}.bias" for name in self.biases}
        return needed, optional

    def in_text(self, name: str) -> str:
        """Return what a tensor of a checkpoint is called where there is text alone, or nothing."""
        if self.text in name:
            return name.replace(self.text, "", 1)
        return name if name == OUTPUT else ""

    def turned(self, name: str) -> str:
        """Return which heads the rows of a tensor belong to if they are reordered: query or key."""
        part = name.split(".")[-2]
        return {"attn_q": "query", "attn_k": "key"}.get(part, "") if self.rotates_pairs else ""

    def stacks(self, name: str) -> bool:
        """Return whether a tensor has an axis for experts."""
        return name.split(".")[-2].endswith("_exps")

    def in_single(self, name: str) -> bool:
        """Return whether a tensor is float32 in any case: one that chooses among experts."""
        return name.split(".")[-2] in _ROUTERS

    def adds_one(self, name: str) -> bool:
        """Return whether a tensor is written with 1 added."""
        return self.norms_add_one and name.endswith("_norm.weight")


_GEMMA3 = Architecture(
    "gemma3",
    "gemma3_text",
    norms_add_one=True,
    activations=_GELU,
    others=(*_HEAD_NORMS, "post_attention_norm", "post_ffw_norm"),
    sliding=SlidingRule(6, largest=62, rope_base=10000.0),
    sparse_config=True,
)
_LLAMA = Architecture(
    "llama",
    "llama",
    rotates_pairs=True,
    biases=_LINEAR,
    rope_types=("default", "linear", "llama3"),
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": replace(
        _LLAMA, reading="mixtral", biases=(), experts=ExpertRule("intermediate_size")
    ),
    "qwen2": Architecture("qwen2", "qwen2", biases=_PROJECTIONS),
    "qwen3": Architecture("qwen3", "qwen3", others=_HEAD_NORMS),
    "qwen2_moe": Architecture(
        "qwen2moe",
        "qwen2_moe",
        biases=_PROJECTIONS,
        tied=False,
        experts=ExpertRule(shares_sum=False, shared=True),
        sparse_config=True,
    ),
    "qwen3_moe": Architecture(
        "qwen3moe", "qwen3_moe", others=_HEAD_NORMS, experts=ExpertRule(), sparse_config=True
    ),
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
        sliding=SlidingRule(2, largest=46, capped=True),
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": replace(_GEMMA3, text="language_model."),
}
"""What llama.cpp needs to know, by the ``model_type`` of ``config.json``."""


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
