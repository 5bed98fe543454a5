"""Find tensors of a module that its forward writes, and whose next values a graph would lose."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from compressor.errors import ModelError, listed

_STATISTICS = "_native_batch_norm_legit_functional"  # it writes them, and reads those of the batch


@contextmanager
def assigned_buffers(module: nn.Module) -> Iterator[Collection[str]]:
    """Give the names of the buffers to which code assigns a tensor, as they become known.

    PyTorch's exporter sees such an assignment in the outermost module alone.
    """
    paths = {id(part): path for path, part in module.named_modules()}
    usual, found = nn.Module.__setattr__, set[str]()

    def watched(part: nn.Module, name: str, value: Any) -> None:
        if id(part) in paths and name in part._buffers:
            found.add(".".join(filter(None, (paths[id(part)], name))))
        usual(part, name, value)

    hook = "__setattr__"
    setattr(nn.Module, hook, watched)
    try:
        yield found
    finally:
        setattr(nn.Module, hook, usual)


def check_stateless(
    module: nn.Module, program: ExportedProgram | None, assigned: Collection[str] = ()
) -> None:
    """Check that no output depends on a tensor that forward writes.

    Such a tensor is a state: each call sees what the one before left, and an exported file would
    see the first value in every call. A tensor that is written and not read, such as a count of
    calls or a statistic of batches, changes no output.

    Args:
        program: what the module was exported to.
        assigned: buffers of which :func:`assigned_buffers` knows.

    Raises:
        ModelError: there is one.
    """
    if program is None:
        return
    signature = program.graph_signature
    changed = (signature.buffers_to_mutate, signature.parameters_to_mutate)
    written = {*assigned, *(name for names in changed for name in names.values())}
    held = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    returned = set(signature.user_outputs)
    states = sorted(
        held[node.name]
        for node in program.graph.nodes
        if held.get(node.name) in written and returned & _reached(node)
    )
    if not states:
        return
    raise ModelError(
        f"module {type(module).__name__}",
        f"writes {listed(states)} in forward and reads {'it' if len(states) == 1 else 'them'} in "
        "the next call, and a file keeps nothing between calls",
        "take it as an input and return its next value, which data carry from step to step "
        "(samples: feeds, state: {INPUT: OUTPUT}); or write it in training alone (if "
        "self.training), which leaves it as it is stored",
    )


def _reached(start: fx.Node) -> set[str]:
    """Return the names of the nodes whose values depend on a node's; lengths are no values."""
    found, left = {start}, [start]
    while left:
        for node in left.pop().users:
            tensors = isinstance(node.meta.get("val"), torch.Tensor | list | tuple)
            if node not in found and tensors and _STATISTICS not in str(node.target):
                found.add(node)
                left.append(node)
    return {node.name for node in found}
