"""Activations that are computed twice in place of being kept."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from compressor.errors import SpecError

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
