"""The optimizer of a job, and activations that are computed twice to save memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from compressor.errors import SpecError
from compressor.passes.train.job import Job, ParameterGroup
from compressor.passes.train.recipe import Recipe

_FACTOR = "rate_factor"


def make_optimizer(job: Job, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimizer of a job's parameters that are trained.

    Weight decay acts on parameters with two axes or more: I. Loshchilov and F. Hutter, Decoupled
    weight decay regularization, 2019 (arXiv:1711.05101), for AdamW.
    """
    trained = {n: p for n, p in job.module.named_parameters() if p.requires_grad}
    grouped = frozenset[str]().union(*(group.names for group in job.groups))
    matrices = frozenset(n for n, p in trained.items() if p.ndim > 1) - grouped
    vectors = frozenset(trained) - matrices - grouped
    groups: list[dict[str, Any]] = [
        {
            "params": parameters,
            "weight_decay": recipe.weight_decay if group.decay else 0.0,
            _FACTOR: group.rate,
        }
        for group in (ParameterGroup(matrices, decay=True), ParameterGroup(vectors), *job.groups)
        if (parameters := [p for n, p in trained.items() if n in group.names])
    ]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.learning_rate)
    return torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.momentum)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups, each with its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[_FACTOR]


def checkpoint_blocks(module: nn.Module) -> None:
    """Make a network's repeated blocks keep only their inputs for backward, in place.

    T. Chen et al., Training deep nets with sublinear memory cost, 2016 (arXiv:1604.06174). Networks
    of `transformers` have their own switch; elsewhere, blocks are the members of the outermost
    lists and sequences of modules.

    Raises:
        SpecError: there are no such blocks, or they have batch norms, which would count each batch
            twice.
    """
    able = next((m for m in module.modules() if hasattr(m, "gradient_checkpointing_enable")), None)
    if able is not None and getattr(able, "supports_gradient_checkpointing", False):
        able.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return
    blocks = _blocks(module)
    if not blocks:
        raise SpecError(
            "checkpointing", "is true, but the network has no list of blocks", "remove it"
        )
    for block in blocks:
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in block.modules()):
            raise SpecError(
                "checkpointing",
                "is true, but the blocks have batch norms, whose statistics would be updated twice",
                "remove it, or use micro-batch to save memory",
            )
    wrapped = {id(block) for block in blocks}
    apply_activation_checkpointing(
        module,
        partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        lambda candidate: id(candidate) in wrapped,
    )


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Return the members, with parameters, of the outermost lists of modules."""
    blocks: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            blocks += [m for m in child if next(m.parameters(), None) is not None]
        else:
            blocks += _blocks(child)
    return blocks
