"""Optimizers, what is watched while they work, and activations computed twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from statistics import median
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


_KNOWN = 10  # losses before one can be called large
_LOOKED_AT = 100
_EXPLODED = 1000.0
_SHOWN = 5
_PART = 10  # of the training: the first and the last of so many are compared
_GROWN = 1.5


def divergence(loss: float, before: Sequence[float]) -> str:
    """Say what is wrong with a loss; empty if nothing is.

    Args:
        loss: of the step.
        before: those of the steps before.

    Returns:
        That it is not a number or infinite, or a thousand times the median of the last hundred.
    """
    if not isfinite(loss):
        return f"the loss is {loss}"
    recent = before[-_LOOKED_AT:]
    if len(recent) >= _KNOWN and loss > _EXPLODED * max(median(recent), 1e-12) and loss > 1:
        return f"the loss has grown to {loss:.3g}"
    return ""


def growth(losses: Sequence[float]) -> str:
    """Say that a training ended with a larger loss than it began with; empty if it did not.

    Args:
        losses: of all steps. Medians of the first and the last tenth are compared, so that a
            batch that is hard by chance is no growth.
    """
    part = len(losses) // _PART
    if part < 1:
        return ""
    first, last = median(losses[:part]), median(losses[-part:])
    if last <= _GROWN * first:
        return ""
    return (
        f"the loss grew from {first:.4g} to {last:.4g}: training made the network worse; "
        "lower learning-rate, or clip gradients (clip: 1)"
    )


def last_losses(before: Sequence[float]) -> str:
    """Show the last losses, for messages."""
    return ", ".join(f"{loss:.4g}" for loss in before[-_SHOWN:]) or "none"


@dataclass
class Best:
    """The best validation so far.

    Attributes:
        higher_is_better: direction.
        value: the best value; ``None`` before the first.
        step: when it was had.
        since: how many validations have come since.
        history: step and value of all.
    """

    higher_is_better: bool
    value: float | None = None
    step: int = 0
    since: int = 0
    history: list[tuple[int, float]] = field(default_factory=list)

    def note(self, step: int, value: float) -> bool:
        """Take a value, and tell whether it is the best."""
        self.history.append((step, value))
        known = self.value
        better = known is None or (value > known if self.higher_is_better else value < known)
        if better:
            self.value, self.step, self.since = value, step, 0
        else:
            self.since += 1
        return better

    def as_json(self) -> dict[str, Any]:
        """Return all but the direction."""
        return {
            "value": self.value,
            "step": self.step,
            "since": self.since,
            "history": [list(entry) for entry in self.history],
        }

    def restore(self, document: dict[str, Any]) -> None:
        """Take what :meth:`as_json` returned."""
        self.value, self.step = document["value"], document["step"]
        self.since = document["since"]
        self.history = [(int(step), float(value)) for step, value in document["history"]]


_LISTS = (nn.ModuleList, nn.Sequential)


def checkpoint_blocks(module: nn.Module) -> None:
    """Let a network's repeated blocks keep nothing but their inputs for backward, in place.

    T. Chen et al., Training deep nets with sublinear memory cost, 2016 (arXiv:1604.06174). Networks
    of `transformers` do it their own way; elsewhere blocks are what lies in the outermost lists
    and sequences of modules.

    Raises:
        SpecError: there are no such blocks, or they have batch norms, which would count each batch
            twice.
    """
    own = next((m for m in module.modules() if hasattr(m, "gradient_checkpointing_enable")), None)
    if own is not None and getattr(own, "supports_gradient_checkpointing", False):
        own.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return
    blocks = _blocks(module)
    if not blocks:
        raise SpecError(
            "checkpointing", "is true, and the network has no list of blocks", "leave it out"
        )
    for block in blocks:
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in block.modules()):
            raise SpecError(
                "checkpointing",
                "is true, and the blocks have batch norms, whose statistics would move twice",
                "leave it out, or use micro-batch to save memory",
            )
    chosen = {id(block) for block in blocks}
    apply_activation_checkpointing(
        module,
        partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        lambda candidate: id(candidate) in chosen,
    )


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Return the members, with parameters, of the outermost lists of modules."""
    found = []
    for child in module.children():
        if isinstance(child, _LISTS):
            found += [m for m in child if next(m.parameters(), None) is not None]
        else:
            found += _blocks(child)
    return found
