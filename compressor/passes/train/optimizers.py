"""Optimizers and their parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compressor.passes.train.job import Job, ParameterGroup
from compressor.passes.train.recipe import Recipe

_FACTOR = "rate_factor"


def make_optimizer(job: Job, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimizer of a job's parameters that are trained.

    Weight decay acts on what has two axes or more: I. Loshchilov and F. Hutter, Decoupled weight
    decay regularization, 2019 (arXiv:1711.05101), for AdamW.
    """
    groups = [_group(job.module, own, recipe.weight_decay) for own in _groups(job)]
    used = [group for group in groups if group["params"]]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(used, lr=recipe.learning_rate)
    return torch.optim.SGD(used, lr=recipe.learning_rate, momentum=recipe.momentum)


def _groups(job: Job) -> list[ParameterGroup]:
    trained = {n: p for n, p in job.module.named_parameters() if p.requires_grad}
    taken = frozenset[str]().union(*(group.names for group in job.groups))
    matrices = frozenset(n for n, p in trained.items() if p.ndim > 1) - taken
    vectors = frozenset(trained) - matrices - taken
    own = [ParameterGroup(g.names & trained.keys(), g.rate, g.decay) for g in job.groups]
    return [ParameterGroup(matrices, decay=True), ParameterGroup(vectors), *own]


def _group(module: nn.Module, group: ParameterGroup, decay: float) -> dict[str, Any]:
    named = [p for n, p in module.named_parameters() if n in group.names]
    return {"params": named, "weight_decay": decay if group.decay else 0.0, _FACTOR: group.rate}


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups, each with its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[_FACTOR]
