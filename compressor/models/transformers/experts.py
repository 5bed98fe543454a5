"""Mixtures of experts of ``transformers``, computed in a form that can be lowered.

The library multiplies tokens, sorted by their expert, with as many matrices at once by kernels
that have no counterpart in ONNX. How many tokens an expert gets depends on the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_MARKS = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj")
"""What the library's decorator for experts in one tensor, and their classes, set."""
_ROWS = ("w1", "v1", "w2", "ffn_hidden_size", "activation_fn")
"""What the part of DBRX's experts has that holds them in the rows of three matrices."""


@contextmanager
def plain_experts(module: nn.Module) -> Iterator[None]:
    """Run every expert of a module on all tokens, one expert after the other.

    The results are those of the library, up to the order of sums.
    """
    found = ((part, plain_forward(part)) for part in module.modules())
    experts = [(part, forward) for part, forward in found if forward is not None]
    for part, forward in experts:
        part.forward = forward
    try:
        yield
    finally:
        for part, _ in experts:
            del part.forward


def plain_forward(module: Any) -> Callable[..., Tensor] | None:
    """Return a function that runs all experts of a module in turn; ``None`` for other modules."""
    if all(hasattr(module, mark) for mark in _MARKS):
        return partial(every_expert, module)
    part = getattr(module, "mlp", None)
    if hasattr(module, "num_experts") and all(hasattr(part, name) for name in _ROWS):
        return partial(every_expert_of_rows, module)
    return None


def every_expert(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return what the chosen experts make of each token; the others' share is 0.

    Args:
        experts: the module that holds all of them.
        hidden_states: ``[tokens, features]``.
        top_k_index: the experts that each token is sent to, ``[tokens, k]``.
        top_k_weights: their shares, ``[tokens, k]``.
    """
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    total = torch.zeros_like(hidden_states)
    for index in range(experts.num_experts):
        inner = _product(experts, first, index, hidden_states)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        result = _product(experts, "down_proj", index, inner)
        if experts.has_post_expert_norm:
            result = experts.post_expert_norm(result)
        share = torch.where(top_k_index == index, top_k_weights, 0).sum(-1, keepdim=True)
        total = total + result * share
    return total.to(hidden_states.dtype)


def every_expert_of_rows(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the same for experts that follow each other in the rows of matrices, as in DBRX.

    Args:
        experts: as above.
        hidden_states: ``[batch, tokens, features]``.
        top_k_index: as above, with the tokens of all samples in one axis.
        top_k_weights: as above, likewise.
    """
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    shape = (experts.num_experts, -1, tokens.shape[-1])
    stacks = [getattr(experts.mlp, name).view(shape) for name in ("w1", "v1", "w2")]
    total = torch.zeros_like(tokens)
    for index, weights in enumerate(zip(*stacks, strict=True)):
        share = torch.where(top_k_index == index, top_k_weights, 0).sum(-1, keepdim=True)
        total = total + experts.mlp(tokens, *weights) * share
    return total.reshape(hidden_states.shape)


def _product(experts: Any, name: str, index: int, tokens: Tensor) -> Tensor:
    weight = getattr(experts, name)[index]
    bias = getattr(experts, f"{name}_bias")[index] if experts.has_bias else None
    return functional.linear(tokens, weight.T if experts.is_transposed else weight, bias)
