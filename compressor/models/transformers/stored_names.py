"""Modules under the names that a checkpoint has for them.

``transformers`` renames tensors of some classes when it loads them: ``attn.wq_a`` of DeepSeek V4
becomes ``self_attn.q_a_proj``. What is found out about a layer, and what becomes of it, goes by the
name in the checkpoint, so a module has that path in the network, too, and first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from compressor.models.transformers.reading import Names

_WEIGHT = ".weight"


def under_stored_names(network: Any, blocks: str, names: Iterable[str]) -> None:
    """Give modules of a network the paths that their weights have in a checkpoint.

    Left out are paths inside the module itself, those that another module has, and those outside
    the blocks in parts that the class does not have.

    Args:
        network: it is changed.
        blocks: where its list of blocks is.
        names: the tensors of the checkpoint.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    follow = Names(network, get_model_conversion_mapping(network))
    for name in names:
        place, operations = follow.place(name)
        if place in (None, name) or operations:  # the same name, or no longer the same tensor
            continue
        if not (name.endswith(_WEIGHT) and place.endswith(_WEIGHT)):
            continue
        module = place.removesuffix(_WEIGHT)
        if name.startswith(f"{module}."):
            continue
        at: Any = network
        *parents, last = name.removesuffix(_WEIGHT).split(".")
        inside = name.startswith(f"{blocks}.") and place.startswith(f"{blocks}.")
        for parent in parents:
            if inside and parent not in at._modules:
                _lead(at, parent, nn.Module())
            at = at._modules.get(parent)
            if at is None:
                break
        else:
            if last not in at._modules:
                _lead(at, last, network.get_submodule(module))


def _lead(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Register a module before the others, so that PyTorch names it so wherever it is found."""
    others = {key: part for key, part in parent._modules.items() if key != name}
    parent._modules.clear()
    parent.add_module(name, module)
    parent._modules.update(others)
